# SPDX-License-Identifier: Apache-2.0
"""The interface of an attention library that can replace the project's GPU kernels.

No library is required, because the project's kernels can compute every layer. When a model is
loaded, each library is tested. A library is used only if its results were correct and it was faster
than the kernels; see fastest_backend.py.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.gpu.gpu_batch import GpuBatch
from nereid_backend.attention.gpu.gpu_call import AttentionCall
from nereid_backend.attention.layers import LayerSpec


class Situation(enum.Enum):
    """The kind of an attention call: decodes, whole prompts, or later parts of prompts."""

    DECODE = "decodes"
    """The decodes of a step."""
    PROMPT = "prompts without cached tokens"
    """The prefills of a step in which no sequence has cached tokens."""
    CHUNK = "prompts with cached tokens"
    """The prefills of a step in which some sequences have cached tokens."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The data that is needed to compute the attention of one layer in one step.

    The cache already contains the keys and values of the step.

    Attributes:
        query: [num_heads, num_tokens, key_dim].
        new: the key [num_kv_heads, num_tokens, key_dim] and the value [num_kv_heads, num_tokens,
            value_dim] of the step; None if the key and the value are only in the cache.
        call: the properties and the cache of the layer.
        batch: the metadata of the step.
        rows: the metadata of the step in the form that GPU kernels read.
    """

    query: Tensor
    new: tuple[Tensor, Tensor] | None
    call: AttentionCall
    batch: AttentionBatch
    rows: GpuBatch

    def situations(self) -> list[Situation]:
        """Return one `Situation` for the decodes and one for the prefills, if the step has any."""
        situations = []
        if self.batch.num_decodes:
            situations.append(Situation.DECODE)
        if self.batch.prefills:
            has_cached_tokens = any(prefill.num_cached for prefill in self.batch.prefills)
            # A library that computes whole prompts (`Situation.PROMPT`) reads the new keys and
            # values from `self.new`. Therefore, `self.new` must not be None.
            is_prompt = self.new is not None and not has_cached_tokens
            situations.append(Situation.PROMPT if is_prompt else Situation.CHUNK)
        return situations


class AttentionBackend(Protocol):
    """An attention library that can replace the project's GPU kernels.

    Attributes:
        name: the name of the library in log messages.
        situations: the situations in which the library can compute the attention.
    """

    name: str
    situations: frozenset[Situation]

    def refusal(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> str | None:
        """Return why the library cannot compute a layer; None if the library can compute the layer.

        The reason is a clause without a final period.

        Args:
            spec: the properties of the layer.
            block_size: the number of tokens in one block.
            dtype: the data type of queries, keys and values.
        """
        ...

    def attend(self, situation: Situation, inputs: LayerInputs, out: Tensor) -> None:
        """Compute the attention of either all decodes or all prefills of a step.

        Args:
            situation: one of `situations`. DECODE selects the decodes, and any other situation
                selects the prefills.
            inputs: the inputs of the layer.
            out: [num_tokens, num_heads, value_dim]. The rows of the selected tokens are written.

        Mutates: out, and `inputs.rows.shared`.
        """
        ...


# Maps the properties of a layer and a situation (such as `Situation.DECODE`) to the library that
# computes the attention. The project's kernels compute the attention for every pair that is
# missing.
ChosenBackends = Mapping[tuple[LayerSpec, Situation], AttentionBackend]


def first_refusal(spec: LayerSpec, *, supports_window: bool, supports_softcap: bool) -> str | None:
    """Return why a library cannot compute a layer; None if the library can compute the layer.

    The library functions that this package calls do not support attention sinks and attention
    chunks.

    Args:
        spec: the properties of the layer.
        supports_window: whether the library supports sliding windows.
        supports_softcap: whether the library supports a softcap.
    """
    if spec.has_sinks:
        return "the layer has attention sinks"
    if spec.window.chunk is not None:
        return "the layer has attention chunks"
    if spec.window.size is not None and not supports_window:
        return "the layer has a sliding window"
    if spec.softcap is not None and not supports_softcap:
        return "the layer has a softcap"
    return None
