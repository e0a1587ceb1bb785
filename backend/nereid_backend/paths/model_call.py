# SPDX-License-Identifier: Apache-2.0
"""What the forward paths have in common: their sizes, and how a model is called."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nereid_backend.core.step import Chunk
from nereid_backend.paths.step_batch import tokens_of


class UnfitError(Exception):
    """A model cannot take a path; the message says why. Another path is tried then."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a path has to hold.

    Attributes:
        num_blocks: blocks that requests may hold.
        block_size: tokens in one block.
        max_num_seqs: requests that run at once; their rows are below that.
        max_model_len: longest request in tokens.
        stored: how keys and values are kept, as in the setting kv_cache_dtype.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    stored: str = "auto"


class ModelCall:
    """Calls a transformers model with those of the arguments that its forward takes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._names = frozenset(inspect.signature(model.forward).parameters)
        self.cache_name = next(
            (name for name in ("past_key_values", "cache_params") if name in self._names), None
        )

    def takes(self, name: str) -> bool:
        """Whether forward has an argument of this name."""
        return name in self._names

    def __call__(
        self,
        input_ids: Tensor,
        *,
        num_logits: int,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: object | None = None,
    ) -> Tensor:
        """Run the model.

        Shapes: input_ids, position_ids [batch, num_tokens] int64, attention_mask [batch, past +
        num_tokens] int64; returns logits [batch, num_logits, vocab_size] of the last tokens.
        Mutates: cache.
        """
        found: dict[str, object] = {
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "logits_to_keep": num_logits,
        }
        arguments = {k: v for k, v in found.items() if v is not None and k in self._names}
        if self.takes("use_cache"):
            arguments["use_cache"] = cache is not None
        if cache is not None and self.cache_name is not None:
            arguments[self.cache_name] = cache
        logits: Tensor = self._model(input_ids=input_ids, return_dict=True, **arguments).logits
        return logits[:, -num_logits:]


def ids_of(chunk: Chunk, device: torch.device) -> Tensor:
    """A chunk's tokens as [1, num_tokens] int64."""
    return torch.tensor([tokens_of(chunk)], device=device)


def positions_of(chunk: Chunk, device: torch.device) -> Tensor:
    """Their positions as [1, num_tokens] int64."""
    return torch.arange(chunk.start, chunk.start + chunk.num_tokens, device=device)[None]


def from_the_start(chunk: Chunk) -> Chunk:
    """The chunk made longer at its front, so that it begins with the request's first token."""
    return chunk._replace(start=0, num_tokens=chunk.start + chunk.num_tokens)


def joined(parts: Iterable[Tensor | None], like: Tensor | None, vocab_size: int) -> Tensor:
    """Logits of a plan, [sum of num_logits, vocab_size], from those of its chunks in order."""
    found = [part for part in parts if part is not None and part.shape[0]]
    if found:
        return torch.cat(found)
    return torch.empty(0, vocab_size) if like is None else like.new_empty(0, vocab_size)
