# SPDX-License-Identifier: Apache-2.0
"""Paged attention for CPUs. The C++ kernels read the blocks of the KV cache directly.

Decodes and prefills have different kernels, because the speed of a decode is limited by memory,
whereas the speed of a prefill is limited by arithmetic.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu.compile_kernels import KernelBuildError
from nereid_backend.attention.cpu.cpu_library import (
    KernelTimes,
    NativeDecodeGroup,
    NativeForward,
    NativeGroupStep,
    NativeLayer,
    NativeLayerStep,
    NativePrefill,
    NativeRows,
    NativeShape,
    kernels,
)
from nereid_backend.attention.kv_cache import KVCache

logger = logging.getLogger(__name__)

# The number of tokens that the kernels process together. The block size must be a multiple of
# `_LANES`.
_LANES = 16
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _NativeStep:
    """C structs that describe the tokens and sequences of a step to the CPU kernels.

    The pointers refer to tensors that the AttentionBatch owns.

    Attributes:
        slots: the address of the cache slots; see `AttentionBatch.slots`.
        num_tokens: the number of tokens in the step.
        groups: the groups of decodes, at least one.
        prefills: the prefills.
    """

    slots: int
    num_tokens: int
    groups: "ctypes.Array[NativeDecodeGroup]"
    prefills: "ctypes.Array[NativePrefill]"


def cache_type(block_size: int, dtype: torch.dtype, device: torch.device) -> type[KVCache]:
    """Return the cache class for the CPU kernels, or `KVCache` if the kernels cannot be used.

    If the device is a CPU and the kernels cannot be used, log a warning.

    Args:
        block_size: the number of tokens in one block.
        dtype: the data type of keys and values.
        device: the device of the cache.
    """
    if device.type != "cpu":
        return KVCache
    reason = _why_unusable(block_size, dtype)
    if reason is None:
        return CpuKVCache
    logger.warning(
        "Attention runs without CPU kernels and is several times slower, because %s.", reason
    )
    return KVCache


def _why_unusable(block_size: int, dtype: torch.dtype) -> str | None:
    """Return the reason why the CPU kernels cannot be used; None if they can be used.

    The reason is a clause without a final period.
    """
    if block_size % _LANES:
        return f"block_size is {block_size}, which is not a multiple of {_LANES}"
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"the keys and values are {name}, but the kernels support float32 and bfloat16"
    try:
        kernels()  # loads the library of the kernels, and compiles it if necessary
    except KernelBuildError as error:
        return str(error)
    return None


class CpuKVCache(KVCache):
    """A KV cache for the CPU kernels. The keys are transposed within each block.

    Attributes:
        keys: one tensor for each layer, [num_blocks + 1, num_kv_heads, key_dim, block_size].
        key_scales: the factors of the keys. Empty unless the cache stores integers (int8_cache.py).
        value_scales: the factors of the values. Empty unless the cache stores integers.
        kernel_times: the time that compiled models have spent in the kernels since the measurement
            was started. The kernels update this object. None if the time is not measured.
    """

    kernel_times: KernelTimes | None
    key_scales: list[Tensor]
    value_scales: list[Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of KVCache
        """Allocate the blocks, filled with zeros; see `KVCache.__init__`."""
        super().__init__(*args, **kwargs)
        self.keys = [_with_transposed_shape(keys) for keys in self.keys]
        self.key_scales = []
        self.value_scales = []
        self.kernel_times = None
        # For each layer, the arguments and the result of its last call of `layer_struct`.
        self._structs: dict[int, tuple[tuple[object, ...], NativeLayer]] = {}
        # The result of `layer_structs`; None before the first call.
        self._all_structs: ctypes.Array[NativeLayer] | None = None

    def layer_struct(self, layer: int, scale: float, dtype: torch.dtype) -> NativeLayer:
        """Return the C struct that contains the sizes and the cache addresses of one layer.

        The struct is cached. It is built again only if the arguments change.

        Args:
            layer: the index of the layer.
            scale: the factor by which the scores are multiplied.
            dtype: the data type of the query, float32 or bfloat16.
        """
        arguments = (scale, dtype)
        cached_arguments, struct = self._structs.get(layer, (None, None))
        if struct is None or cached_arguments != arguments:
            struct = self._make_layer_struct(layer, scale, dtype)
            self._structs[layer] = (arguments, struct)
        return struct

    def layer_structs(self) -> "ctypes.Array[NativeLayer]":
        """Return the C structs of all layers, for the kernels that compiled models call.

        A struct contains the sizes and the cache addresses of a layer. The field `scale` is 0,
        because a compiled model passes the scale in each call. The structs are built only once.
        """
        if self._all_structs is None:
            structs = [
                self._make_layer_struct(layer, scale=0.0, dtype=self.dtype)
                for layer in range(len(self.layers))
            ]
            self._all_structs = (NativeLayer * len(structs))(*structs)
        return self._all_structs

    def _make_layer_struct(self, layer: int, scale: float, dtype: torch.dtype) -> NativeLayer:
        """Build the C struct of one layer. `layer_struct` documents the arguments."""
        spec = self.layers[layer]
        # The value 0 disables the attention window (`window`), the attention chunks (`chunk`) or
        # the softcap (`softcap`).
        shape = NativeShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            block_size=self.block_size,
            window=spec.window.size or 0,
            chunk=spec.window.chunk or 0,
            scale=scale,
            softcap=spec.softcap or 0.0,
        )
        has_scales = bool(self.key_scales)
        return NativeLayer(
            shape=shape,
            is_bfloat16=dtype is torch.bfloat16,
            keys=self.keys[layer].data_ptr(),
            values=self.values[layer].data_ptr(),
            key_scales=self.key_scales[layer].data_ptr() if has_scales else None,
            value_scales=self.value_scales[layer].data_ptr() if has_scales else None,
        )

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Write the keys and values of one step into the cache.

        Args:
            layer: the index of the layer.
            key: [num_tokens, num_kv_heads, key_dim].
            value: [num_tokens, num_kv_heads, value_dim].
            rows: [num_tokens * num_kv_heads] int64, the row of each vector in a cache tensor that
                is viewed as [num_blocks * num_kv_heads * block_size, dim]. The row is (block *
                num_kv_heads + head) * block_size + token_in_block.

        Mutates: this cache.
        """
        keys = self.keys[layer]
        values = self.values[layer]
        _, _, key_dim, block_size = keys.shape
        # The cache stores the keys of each block and head as a matrix, [key_dim, block_size]. The
        # first index of this view selects the matrix: block * num_kv_heads + head.
        transposed_keys = keys.view(-1, key_dim, block_size)
        block_and_head = rows // block_size
        token_in_block = rows % block_size
        # A key is a column of its matrix. `index_copy_` writes only whole rows.
        transposed_keys[block_and_head, :, token_in_block] = key.reshape(-1, key_dim)
        value_dim = values.shape[3]
        values.view(-1, value_dim).index_copy_(0, rows, value.reshape(-1, value_dim))

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of sequences from cache blocks into contiguous tensors.

        A row of a cache tensor contains the keys or values of one head in one block. The index of
        the row is block * num_kv_heads + head. `rows` is [num_seqs, num_kv_heads, num_blocks] int64
        and contains the indices of the rows to copy.

        Returns:
            The keys, [num_seqs, num_kv_heads, num_tokens, key_dim], and the values,
            [num_seqs, num_kv_heads, num_tokens, value_dim].
        """
        num_seqs, num_heads, num_blocks = rows.shape
        _, _, key_dim, block_size = self.keys[layer].shape
        value_dim = self.values[layer].shape[3]
        num_tokens = num_blocks * block_size
        flat_rows = rows.reshape(-1)
        # The cache stores the keys of a row as [key_dim, block_size]. `transpose` swaps these two
        # dimensions, so `keys` becomes [num_seqs, num_heads, num_blocks, block_size, key_dim].
        keys = self.keys[layer].view(-1, key_dim, block_size).index_select(0, flat_rows)
        keys = keys.view(num_seqs, num_heads, num_blocks, key_dim, block_size).transpose(3, 4)
        keys = keys.reshape(num_seqs, num_heads, num_tokens, key_dim)
        # The values of a row are stored in the order of the result, [block_size, value_dim].
        values = self.values[layer].view(-1, block_size * value_dim).index_select(0, flat_rows)
        return keys, values.view(num_seqs, num_heads, num_tokens, value_dim)


def _with_transposed_shape(zeros: Tensor) -> Tensor:
    """Swap the last two dimensions of a tensor [num_blocks, num_kv_heads, block_size, key_dim].

    The tensor contains only zeros, so a view with the new shape is sufficient.
    """
    num_blocks, num_heads, block_size, key_dim = zeros.shape
    return zeros.view(num_blocks, num_heads, key_dim, block_size)


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: int,
    cache: CpuKVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of one layer in the cache, and compute the attention of the layer.

    `reference.attend` documents the arguments and the result. Mutates: cache.
    """
    # The kernels get only pointers. These variables keep the tensors in memory until the calls
    # return.
    query, key, value = (with_contiguous_rows(tensor) for tensor in inputs)
    sink_scores = None if sinks is None else sinks.float().contiguous()
    spec = cache.layers[layer]
    step = _native_step(batch)
    out = query.new_empty(step.num_tokens, spec.num_heads, spec.value_dim)
    native_layer = ctypes.byref(cache.layer_struct(layer, scale, query.dtype))
    layer_step = NativeLayerStep(
        query=native_rows(query),
        keys=native_rows(key),
        values=native_rows(value),
        slots=step.slots,
        num_tokens=step.num_tokens,
        sinks=None if sink_scores is None else sink_scores.data_ptr(),
        out=out.data_ptr(),
    )
    num_threads = torch.get_num_threads()
    for group in step.groups:
        kernels().nereid_attend(
            native_layer, ctypes.byref(group), ctypes.byref(layer_step), num_threads
        )
        # The first call in this loop stores the keys and values of all tokens. After this call,
        # `num_tokens` is 0, so the later calls store nothing.
        layer_step.num_tokens = 0
    if step.prefills:
        kernels().nereid_attend_prefills(
            native_layer,
            step.prefills,
            len(step.prefills),
            ctypes.byref(layer_step),
            num_threads,
        )
    return out


@contextmanager
def serving(cache: CpuKVCache, batches: Sequence[AttentionBatch]) -> Iterator[None]:
    """Return a context manager that makes the attention of compiled models use `cache`.

    A compiled model calls the kernels without Python, so it cannot pass the cache and the metadata
    of the step as arguments. Instead, the kernels read them from a C struct. The context applies
    only to models that run in this thread. Contexts must not be nested, because the end of a
    context removes the struct.

    Args:
        cache: the KV cache, into which the keys and values of the step are stored. Mutated.
        batches: the metadata of the step for each group of layers.
    """
    # `forward` contains only the addresses of three arrays: `layer_structs`, `group_steps` and
    # `group_of`. These local variables keep the arrays in memory until the `with` block ends.
    steps = [_native_step(batch) for batch in batches]
    layer_structs = cache.layer_structs()
    group_steps = (NativeGroupStep * len(steps))(*map(_group_step, steps))
    group_of = (ctypes.c_int64 * len(layer_structs))(*cache.group_of)
    # `kernel_times` is set only while the time in the kernels is measured. The kernels add their
    # computing time to this object.
    times = None if cache.kernel_times is None else ctypes.addressof(cache.kernel_times)
    forward = NativeForward(
        layers=ctypes.addressof(layer_structs),
        num_layers=len(layer_structs),
        steps=ctypes.addressof(group_steps),
        group_of=ctypes.addressof(group_of),
        num_tokens=steps[0].num_tokens,
        num_threads=torch.get_num_threads(),
        times=times,
    )
    kernels().nereid_serve(ctypes.byref(forward))
    try:
        yield
    finally:
        kernels().nereid_serve(None)


def _group_step(step: _NativeStep) -> NativeGroupStep:
    """Return the C struct with the addresses of the arrays in `step`."""
    return NativeGroupStep(
        decodes=ctypes.addressof(step.groups),
        num_decodes=len(step.groups),
        prefills=ctypes.addressof(step.prefills),
        num_prefills=len(step.prefills),
        slots=step.slots,
    )


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as the kernels require.

    Only a tensor that is not contiguous in this dimension is copied.
    """
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def native_rows(tensor: Tensor) -> NativeRows:
    """Return the C struct that describes a tensor [num_heads, num_tokens, dim]."""
    head_stride, token_stride, _ = tensor.stride()
    return NativeRows(tensor.data_ptr(), head_stride, token_stride)


def _native_step(batch: AttentionBatch) -> _NativeStep:
    """Return C structs that describe the tokens and sequences of a step to the CPU kernels.

    The first call builds the structs and stores them in `batch.kernel_metadata`.
    """
    step = batch.kernel_metadata
    if not isinstance(step, _NativeStep):
        step = batch.kernel_metadata = _make_native_step(batch)
    return step


def _make_native_step(batch: AttentionBatch) -> _NativeStep:
    """Build C structs that describe the tokens and sequences of a step.

    A decode is a sequence with one new token, and a prefill is a sequence with several new tokens.
    The structs contain pointers to the tensors of `batch`, so they must not be used after `batch`
    has been freed.
    """
    groups = [
        NativeDecodeGroup(
            tokens=None if group.tokens is None else group.tokens.data_ptr(),
            blocks=group.blocks.data_ptr(),
            blocks_stride=group.blocks.stride(0),
            lens=group.lens.data_ptr(),
            num_seqs=group.lens.numel(),
        )
        for group in batch.decodes
    ]
    prefills = [
        NativePrefill(
            first=prefill.start,
            num_tokens=prefill.end - prefill.start,
            num_cached=prefill.num_cached,
            blocks=prefill.blocks.data_ptr(),
        )
        for prefill in batch.prefills
    ]
    # The kernel is called once for each group of decodes. The first call also stores the keys and
    # values of the step. If the step has no decodes, add an empty group, so that the keys and
    # values are still stored.
    if not groups:
        groups = [NativeDecodeGroup()]
    return _NativeStep(
        slots=batch.slots.data_ptr(),
        num_tokens=batch.slots.numel(),
        groups=(NativeDecodeGroup * len(groups))(*groups),
        prefills=(NativePrefill * len(prefills))(*prefills),
    )
