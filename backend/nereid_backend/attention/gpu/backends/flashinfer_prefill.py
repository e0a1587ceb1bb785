# SPDX-License-Identifier: Apache-2.0
"""Computes the attention of prefills with FlashInfer, if the package `flashinfer` is installed.

FlashInfer plans each step on the CPU, and a CUDA graph cannot contain the planning. Therefore,
FlashInfer is used only for prefills. KVCache has the layout that FlashInfer calls "HND". This code
has not yet run on a GPU.
"""

from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import Prefill
from nereid_backend.attention.gpu.backends.attention_backend import (
    LayerInputs,
    Situation,
    first_refusal,
)
from nereid_backend.attention.layers import LayerSpec

_DTYPES = (torch.bfloat16, torch.float16)
# The size of FlashInfer's buffer for intermediate results, in bytes. FlashInfer's documentation
# recommends this size.
_WORKSPACE_BYTES = 128 * 2**20


class FlashInferPrefill:
    """The prefill attention of FlashInfer; see `AttentionBackend`."""

    name = "FlashInfer"
    situations = frozenset({Situation.PROMPT, Situation.CHUNK})

    def __init__(self) -> None:
        """Create a backend. Its workspace and wrappers are created when they are first needed."""
        self._workspace: Tensor | None = None
        # FlashInfer's method `plan` stores metadata in a wrapper object. The metadata depends on
        # the step and on the properties of the layer, so there is one wrapper for each set of layer
        # properties.
        self._wrappers: dict[LayerSpec, Any] = {}

    def refusal(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        """Return why FlashInfer cannot compute a layer; None if FlashInfer can compute the layer.

        See `AttentionBackend.refusal` for the arguments.
        """
        if find_spec("flashinfer") is None:
            return "the package flashinfer is not installed"
        if dtype not in _DTYPES:
            return f"it does not support {dtype}"
        return first_refusal(spec, supports_window=True, supports_softcap=True)

    def attend(self, situation: Situation, inputs: LayerInputs, out: Tensor) -> None:  # noqa: ARG002
        """Compute all prefills of a step in one call; see `AttentionBackend.attend`."""
        wrapper = self._wrapper_of_step(inputs)
        # The new tokens of the prefills are contiguous, because the prefills follow one another.
        prefills = inputs.batch.prefills
        tokens = slice(prefills[0].start, prefills[-1].end)
        query = inputs.query[:, tokens].transpose(0, 1).contiguous()
        out[tokens] = wrapper.run(query, (inputs.call.keys, inputs.call.values))

    def _wrapper_of_step(self, inputs: LayerInputs) -> Any:  # noqa: ANN401 - the package has no types
        """Return the FlashInfer wrapper that contains the metadata of the step for a layer.

        All layers with an equal `spec` need the same metadata, so only the first of these layers
        computes it. The other layers find the wrapper in `shared`, a dict that is empty at the
        start of each step.
        """
        shared = inputs.rows.shared
        key = ("flashinfer", inputs.call.spec)  # other backends use other keys
        wrapper = shared.get(key)
        if wrapper is None:
            wrapper = self._plan(inputs)
            shared[key] = wrapper
        return wrapper

    def _plan(self, inputs: LayerInputs) -> Any:  # noqa: ANN401 - the package has no types
        """Store the step's metadata in the FlashInfer wrapper of a layer, and return the wrapper.

        A prefill is a sequence with several new tokens. FlashInfer gets the block tables of all
        prefills as one list of block numbers, which `_cumulative_starts` divides into prefills.
        """
        call = inputs.call
        spec = call.spec
        block_size = inputs.batch.block_size
        prefills = inputs.batch.prefills

        query_starts = _cumulative_starts([prefill.end - prefill.start for prefill in prefills])
        block_starts = _cumulative_starts([prefill.blocks.numel() for prefill in prefills])
        # Prefill.blocks has the shape [1, n].
        block_numbers = torch.cat([prefill.blocks[0] for prefill in prefills]).to(torch.int32)
        # FlashInfer's window is the number of earlier tokens to which a token attends. -1 means all
        # earlier tokens.
        window_left = -1 if spec.window.size is None else spec.window.size - 1
        wrapper = self._wrapper_for(spec, call.keys.device)
        wrapper.plan(
            qo_indptr=query_starts,
            paged_kv_indptr=block_starts,
            paged_kv_indices=block_numbers,
            paged_kv_last_page_len=_last_block_lens(prefills, block_size),
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.key_dim,
            page_size=block_size,
            head_dim_vo=spec.value_dim,
            causal=True,
            sm_scale=call.scale,
            window_left=window_left,
            logits_soft_cap=spec.softcap,
            q_data_type=inputs.query.dtype,
            kv_data_type=call.keys.dtype,
        )
        return wrapper

    def _wrapper_for(self, spec: LayerSpec, device: torch.device) -> Any:  # noqa: ANN401 - the package has no types
        """Return the FlashInfer wrapper for all layers whose properties equal `spec`.

        A wrapper is the object of FlashInfer that stores the metadata of a step and launches the
        kernels. All wrappers share one workspace for intermediate results, because the layers are
        computed one after the other.
        """
        if spec not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            flashinfer = import_module("flashinfer")
            # "HND" is the layout of the KV cache: the dimensions of a block are [heads, tokens,
            # vector size].
            self._wrappers[spec] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, kv_layout="HND"
            )
        return self._wrappers[spec]


def _cumulative_starts(counts: list[int]) -> Tensor:
    """Return the start index of each prefill. The last entry is the total number of elements.

    `counts` contains the number of elements of each prefill. Example: [2, 3] gives [0, 2, 5].
    """
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _last_block_lens(prefills: list[Prefill], block_size: int) -> Tensor:
    """For each prefill, return the number of tokens in the last block of its sequence.

    Example with 16 tokens in a block: a sequence of 20 tokens gives 4, and a sequence of 32 tokens
    gives 16.
    """
    lens = [(prefill.seq_len - 1) % block_size + 1 for prefill in prefills]
    return torch.tensor(lens, dtype=torch.int32)
