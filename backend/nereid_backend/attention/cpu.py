# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a CPU with native kernels, which read blocks where they are.

Decodes go through the kernel; a prefill is matrix products all the way, for which torch's fused
attention is as good, so it goes the reference's way over the same cache.
"""

import ctypes
import functools
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention import reference
from nereid_backend.attention.batch import AttentionBatch, Decodes
from nereid_backend.attention.cpu_build import KernelBuildError, load_library
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec

__all__ = ["CpuKVCache", "KernelBuildError", "attend", "cache_type", "kernels"]

logger = logging.getLogger(__name__)

_LANES = 16
_DTYPES = (torch.float32, torch.bfloat16)


class _Shape(ctypes.Structure):
    """`Shape` of cpu_kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("block_size", "window", "chunk")),
        ("scale", c_float),
        ("softcap", c_float),
    )


@functools.cache
def kernels() -> ctypes.CDLL:
    """The kernels of this process.

    Raises:
        KernelBuildError: they cannot be built here; the message says why.
    """
    library = load_library()
    pointer, size = c_void_p, c_int64
    library.nereid_decode.argtypes = [
        *(pointer, c_int, pointer, pointer, pointer, pointer, size, size, pointer),
        *(pointer, size, pointer, size, pointer, pointer, c_int),
    ]
    library.nereid_store.argtypes = [
        *(pointer, c_int, pointer, pointer, pointer),
        *(pointer, pointer, pointer, pointer, size, c_int),
    ]
    library.nereid_linear_int8.argtypes = [*([pointer] * 4), *([size] * 3), c_int]
    library.nereid_linear_int8.restype = None
    library.nereid_decode.restype = library.nereid_store.restype = None
    return library


def cache_type(block_size: int, dtype: torch.dtype, device: torch.device) -> type[KVCache]:
    """The kind of cache that is fastest here: the kernels' own where they can serve it."""
    if device.type != "cpu":
        return KVCache
    reason = None
    if block_size % _LANES:
        reason = f"block_size {block_size} is not a multiple of {_LANES}"
    elif dtype not in _DTYPES:
        reason = f"{str(dtype).removeprefix('torch.')} is not float32 or bfloat16"
    else:
        try:
            kernels()
        except KernelBuildError as error:
            reason = str(error)
    if reason is None:
        return CpuKVCache
    logger.warning("attention without native kernels, several times slower: %s", reason)
    return KVCache


class CpuKVCache(KVCache):
    """A KV cache whose keys lie transposed within their block.

    Attributes:
        keys: per layer [num_blocks + 1, num_kv_heads, key_dim, block_size].
        key_scales: per layer, where the cache holds integers (int8_cache.py); empty elsewhere.
        value_scales: the same for values.
    """

    key_scales: list[Tensor]
    value_scales: list[Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - KVCache's own
        super().__init__(*args, **kwargs)
        self.key_scales, self.value_scales = [], []
        # All zero so far, so that another shape over the same memory is another layout.
        self.keys = [keys.view(*keys.shape[:2], keys.shape[3], keys.shape[2]) for keys in self.keys]

    def store(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """See `KVCache.store`."""
        keys, values = self.keys[layer], self.values[layer]
        _, _, dim, size = keys.shape
        cells, places = rows // size, rows % size
        keys.view(-1, dim, size)[cells, :, places] = key.reshape(-1, dim)
        value_dim = values.shape[3]
        values.view(-1, value_dim).index_copy_(0, rows, value.reshape(-1, value_dim))

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.gather`."""
        num_seqs, num_heads, count = rows.shape
        _, _, dim, size = self.keys[layer].shape
        taken = self.keys[layer].view(-1, dim, size).index_select(0, rows.reshape(-1))
        keys = taken.view(num_seqs, num_heads, count, dim, size).transpose(3, 4)
        keys = keys.reshape(num_seqs, num_heads, count * size, dim)
        size_of_value = self.values[layer].shape[3]
        values = self.values[layer].view(-1, size * size_of_value).index_select(0, rows.reshape(-1))
        return keys, values.view(num_seqs, num_heads, count * size, size_of_value)


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: tuple[int, LayerSpec],
    cache: CpuKVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store one packed step's keys and values in one layer, then attend.

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim].
        layer: its number in the cache, and what it needs.
        cache: gets the keys and values. Mutated.
        batch: where everything is.
        scale: factor on the scores.
        sinks: [num_heads], or None.

    Returns:
        [num_tokens, num_heads, value_dim] in the query's dtype.
    """
    query, key, value = (_rows(tensor) for tensor in inputs)
    number, spec = layer
    shape = _Shape(
        *(spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, batch.block_size),
        *(spec.span.window or 0, spec.span.chunk or 0, scale, spec.softcap or 0.0),
    )
    _store(shape, (key, value), (cache, number), batch)
    if not batch.num_decodes:
        return reference.attend_prefills((query, key, value), layer, cache, batch, scale, sinks)
    out = query.new_empty(batch.num_decodes, spec.num_heads, spec.value_dim)
    sinks_float = None if sinks is None else sinks.float().contiguous()
    for group in batch.decodes:
        _decode(shape, query, group, (cache, number), sinks_float, out)
    if not batch.prefills:
        return out
    rest = reference.attend_prefills((query, key, value), layer, cache, batch, scale, sinks)
    return torch.cat([out, rest])


def _pointers(cache: CpuKVCache, layer: int) -> tuple[Any, ...]:
    """Keys, values and, where they are integers, both scales of one layer, as the kernels want."""
    scales = None
    if cache.key_scales:
        found = (cache.key_scales[layer].data_ptr(), cache.value_scales[layer].data_ptr())
        scales = (c_void_p * 2)(*found)
    return cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), scales


def _rows(tensor: Tensor) -> Tensor:
    """The same values with the last dimension contiguous, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _store(
    shape: _Shape, new: tuple[Tensor, Tensor], place: tuple[CpuKVCache, int], batch: AttentionBatch
) -> None:
    key, value = new
    strides = (c_int64 * 4)(key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    kernels().nereid_store(
        ctypes.byref(shape),
        int(key.dtype == torch.bfloat16),
        *_pointers(*place),
        key.data_ptr(),
        value.data_ptr(),
        strides,
        batch.slots.data_ptr(),
        batch.slots.numel(),
        torch.get_num_threads(),
    )


def _decode(
    shape: _Shape,
    query: Tensor,
    group: Decodes,
    place: tuple[CpuKVCache, int],
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of one group of decodes. Mutates: their rows of out."""
    kernels().nereid_decode(
        ctypes.byref(shape),
        int(query.dtype == torch.bfloat16),
        *_pointers(*place),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        None if group.tokens is None else group.tokens.data_ptr(),
        group.blocks.data_ptr(),
        group.blocks.stride(0),
        group.lens.data_ptr(),
        group.lens.numel(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
