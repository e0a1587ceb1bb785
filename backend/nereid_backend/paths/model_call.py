# SPDX-License-Identifier: Apache-2.0
"""Calls a transformers model, and prepares the inputs and outputs of the calls."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from nereid_backend.attention.layers import LayerGroups
from nereid_backend.core.step import Chunk
from nereid_backend.device_transfer import upload_all
from nereid_backend.paths.step_batch import tokens_of

# The forward methods of transformers' models accept the cache under one of these argument names.
_CACHE_NAMES = ("past_key_values", "cache_params")


class UnfitError(Exception):
    """Raised if an implementation of the forward pass cannot run a model.

    The engine then tries the other implementations. The message states the reason, as a clause
    without a final period.
    """


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the KV cache and of the block tables.

    Attributes:
        num_blocks: the number of blocks that sequences may use.
        block_size: tokens in one block.
        max_num_seqs: the largest number of sequences that run at the same time. Their rows are
            numbered from 0.
        max_model_len: the largest number of tokens in a sequence.
        kv_cache_dtype: the data type of keys and values: "auto" (the model's), "int8" or "fp8".
        groups: the groups of the attention layers; None if all layers form one group.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_dtype: str = "auto"
    groups: LayerGroups | None = None


class ModelCall:
    """Calls a transformers model with the arguments that its forward method accepts.

    Attributes:
        cache_name: the name of the cache argument; None if the model accepts no cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Store a model and the names of the arguments that its forward method accepts."""
        self._model: Any = model
        self._names = frozenset(inspect.signature(model.forward).parameters)
        cache_names = [name for name in _CACHE_NAMES if name in self._names]
        self.cache_name = cache_names[0] if cache_names else None

    def takes(self, name: str) -> bool:
        """Return whether the forward method of the model has a parameter with the name `name`."""
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
        """Run the model and return the logits of the last tokens, [batch, num_logits, vocab_size].

        Arguments that the model's forward method does not accept are left out.

        Args:
            input_ids: [batch, num_tokens] int64.
            num_logits: the number of last tokens whose logits are returned, at least 1.
            position_ids: [batch, num_tokens] int64.
            attention_mask: [batch, past + num_tokens] int64, where `past` is the length of the
                cache.
            cache: a cache of transformers.

        Mutates: cache.
        """
        optional: dict[str, object] = {
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "logits_to_keep": num_logits,
        }
        arguments = {
            name: value
            for name, value in optional.items()
            if value is not None and self.takes(name)
        }
        if self.takes("use_cache"):
            arguments["use_cache"] = cache is not None
        if cache is not None and self.cache_name is not None:
            arguments[self.cache_name] = cache
        logits: Tensor = self._model(input_ids=input_ids, return_dict=True, **arguments).logits
        # A model without the argument `logits_to_keep` returns the logits of all tokens.
        return logits[:, -num_logits:]


class BlockCacheLayer(CacheLayerMixin):
    """A cache layer for transformers. Its keys and values are stored in the engine's blocks.

    Attributes:
        engine_names: the names of the attributes that do not belong to the state of a sequence.
        num_past_tokens: the number of tokens of the longest sequence before this step.
    """

    is_sliding = False
    engine_names = frozenset({"num_past_tokens"})

    def __init__(self) -> None:
        super().__init__()
        self.num_past_tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the blocks already exist."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - transformers' signature
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged. The engine's attention code stores them."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys in the attention mask, and the index of the first key."""
        return self.num_past_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens before this step in the longest sequence of the batch."""
        return self.num_past_tokens

    def get_max_length(self) -> int:
        """Return -1, which means that the length of the cache is not limited."""
        return -1


def token_inputs(chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the positions of the tokens that a forward pass computes.

    All chunks (the tokens of one sequence each) must have the same number of tokens. The two
    tensors are copied to the device together, and the CPU does not wait for the copy.

    Returns:
        The token ids and the positions, both [num_chunks, num_tokens] int64.
    """
    ids = np.array([tokens_of(chunk) for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    positions = starts[:, None] + np.arange(ids.shape[1])
    uploaded_ids, uploaded_positions = upload_all([ids, positions], device)
    return uploaded_ids, uploaded_positions


def extend_to_start(chunk: Chunk) -> Chunk:
    """Return a chunk that begins at the sequence's first token, and ends at the end of `chunk`.

    Example: a chunk of 3 tokens that starts at 5 becomes a chunk of 8 tokens that starts at 0.
    """
    return chunk._replace(start=0, num_tokens=chunk.start + chunk.num_tokens)


def join_rows(parts: Iterable[Tensor | None], row_size: int) -> Tensor:
    """Concatenate the rows of several chunks, such as their logits, into one tensor.

    Args:
        parts: [num_rows, row_size], the rows of each chunk, in order; None for a chunk without
            rows.
        row_size: the number of columns.
    """
    filled = [part for part in parts if part is not None and part.shape[0]]
    return torch.cat(filled) if filled else torch.empty(0, row_size)


def num_bytes(value: object) -> int:
    """Return the total size in bytes of the tensors that a value contains.

    The value may be a tensor, a container, or a cache of transformers. A tensor that occurs several
    times is counted once. Example: a list that contains one float32 tensor of the shape [2, 3]
    twice has 24 bytes.
    """
    return _num_new_bytes(value, set())


def _num_new_bytes(value: object, seen: set[int]) -> int:
    """Return the size in bytes of all tensors in a value, except tensors that were counted before.

    The value is a tensor, a cache of transformers, or a dict, list or tuple of such values. `seen`
    contains the ids of the Python objects that were counted before.

    Mutates: `seen`. The ids of all objects in the value are added.
    """
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_num_new_bytes(part, seen) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_new_bytes(part, seen) for part in value)
    # If the value is an object of a transformers class, it is a cache or a cache layer. The
    # attributes of this object contain the tensors.
    if type(value).__module__.startswith("transformers."):
        return _num_new_bytes(vars(value), seen)
    return 0
