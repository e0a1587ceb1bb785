# SPDX-License-Identifier: Apache-2.0
"""The path of models that fit no other: one sequence at a time, by transformers' own rules.

Inputs are prepared as transformers' generate prepares them, and what a model keeps from one token
to the next, under whatever name, stays with the request's row. Models that keep nothing get their
whole sequence at every step.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import joined


@dataclass(slots=True)
class _Kept:
    """What is kept of one sequence: the arguments of the next call, and the tokens in them."""

    arguments: dict[str, Any]
    num_tokens: int


class SinglePath:
    """Runs plans one sequence after the other. Owns what the model keeps of each."""

    def __init__(self, checkpoint: Checkpoint, *, keeps: bool) -> None:
        """Make a path.

        Args:
            checkpoint: the model, with attention of its own.
            keeps: whether the model's own cache is used; otherwise each step computes the whole
                sequence.
        """
        self._model: Any = checkpoint.model
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._keeps = keeps
        self._kept: dict[int, _Kept] = {}
        names = inspect.signature(self._model.forward).parameters
        self._takes_positions = "position_ids" in names
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"

    def forward(self, plan: StepPlan) -> Tensor:
        """See `ForwardPath.forward`."""
        parts: list[Tensor | None] = []
        for chunk in plan.chunks:
            row = chunk.request.row
            assert row is not None
            if chunk.is_first:
                self._kept.pop(row, None)
            parts.append(self._logits(row, chunk))
        found = next((part for part in parts if part is not None), None)
        return joined(parts, found, self._vocab_size)

    def clear(self, request: Request) -> None:
        """See `ForwardPath.clear`."""
        if request.row is not None:
            self._kept.pop(request.row, None)

    def kept_bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(_num_bytes(kept.arguments, set()) for kept in self._kept.values())

    def _logits(self, row: int, chunk: Chunk) -> Tensor | None:
        """Logits [num_logits, vocab_size] after the chunk's last tokens.

        A prompt goes through the model once, when its last chunk comes: not every model's own cache
        can be continued by several tokens.
        """
        if chunk.num_logits == 0:
            return None
        end = chunk.start + chunk.num_tokens
        first = end - chunk.num_logits + 1
        kept = self._kept.get(row)
        if self._keeps and (kept is None or kept.num_tokens != first - 1):
            # A request that starts again goes the way that it went at first, its prompt in one
            # pass and then token by token: on some models the two ways differ.
            first = min(first, chunk.request.num_prompt_tokens)
        found = [self._after(row, chunk.request.token_ids[:n]) for n in range(first, end + 1)]
        return torch.stack(found[-chunk.num_logits :])

    def _after(self, row: int, token_ids: list[int]) -> Tensor:
        """Logits [vocab_size] after these tokens, the sequence's first ones."""
        kept = self._kept.pop(row, None)
        ids = torch.tensor([token_ids], device=self._device)
        if kept is None or kept.num_tokens != len(token_ids) - 1:
            kept = _Kept(self._first_arguments(ids), 0)
        is_first = kept.num_tokens == 0
        length = 1 if self._keeps and not is_first else None
        if is_first and kept.arguments.get(self._cache_name) is not None:
            length = len(token_ids)
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=length, is_first_iteration=is_first, **kept.arguments
        )
        output = self._model(**inputs, return_dict=True)
        if self._keeps:
            arguments = self._model._update_model_kwargs_for_generation(output, kept.arguments)
            self._kept[row] = _Kept(arguments, len(token_ids))
        logits: Tensor = output.logits[0, -1]
        return logits

    def _first_arguments(self, ids: Tensor) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "use_cache": self._keeps,
        }
        if self._takes_positions:
            positions = self._model._prepare_position_ids_for_generation(ids, arguments)
            arguments["position_ids"] = positions
        if self._keeps and self._model._supports_default_dynamic_cache():
            config = self._model.config.get_text_config(decoder=True)
            arguments[self._cache_name] = DynamicCache(config=config)
        return arguments


def _num_bytes(value: object, seen: set[int]) -> int:
    """Bytes of all tensors that can be reached from a value."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_num_bytes(part, seen) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_bytes(part, seen) for part in value)
    # A cache and its layers; nothing else in the arguments has attributes that matter.
    if type(value).__module__.startswith("transformers."):
        return _num_bytes(vars(value), seen)
    return 0
