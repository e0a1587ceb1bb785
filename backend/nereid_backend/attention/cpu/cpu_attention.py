# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a CPU with native kernels, which read blocks where they are.

A decode is bound by memory, a prefill by arithmetic, so each has a kernel of its own.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.cpu.cpu_build import KernelBuildError, load_library
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec

__all__ = ["CpuKVCache", "KernelBuildError", "attend", "cache_type", "has_kernels", "kernels"]

logger = logging.getLogger(__name__)

_LANES = 16
_DTYPES = (torch.float32, torch.bfloat16)


class _Shape(ctypes.Structure):
    """`Shape` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("block_size", "window", "chunk")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class _Layer(ctypes.Structure):
    """`Layer` of cpu_kernels.h."""

    _fields_ = (
        ("shape", _Shape),
        ("is_bfloat16", c_int64),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
    )


class _Decodes(ctypes.Structure):
    """`Decodes` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "blocks")),
        ("blocks_stride", c_int64),
        ("lens", c_void_p),
        ("num_seqs", c_int64),
    )


class _Prefill(ctypes.Structure):
    """`Prefill` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("first", "num_tokens", "num_cached")),
        ("blocks", c_void_p),
    )


class _Forward(ctypes.Structure):
    """`Forward` of cpu_shim.cpp."""

    _fields_ = (
        *(("layers", c_void_p), ("num_layers", c_int64)),
        *(("groups", c_void_p), ("num_groups", c_int64)),
        *(("prefills", c_void_p), ("num_prefills", c_int64)),
        *(("slots", c_void_p), ("num_tokens", c_int64), ("num_threads", c_int64)),
        ("spent", c_void_p),
    )


class Spent(ctypes.Structure):
    """Nanoseconds that compiled models have spent in the kernels."""

    _fields_ = (("linear_ns", c_int64), ("attention_ns", c_int64))


@dataclass(frozen=True, slots=True)
class _NativeLayer:
    """One layer of a cache as the kernels want it, and for which calls that holds."""

    spec: LayerSpec
    scale: float
    dtype: torch.dtype
    block_size: int
    layer: _Layer


@dataclass(frozen=True, slots=True)
class _NativeStep:
    """A step as the kernels want it, the same for every layer; its tensors stay the batch's."""

    slots: int
    num_tokens: int
    groups: "ctypes.Array[_Decodes]"
    prefills: "ctypes.Array[_Prefill]"


@functools.cache
def kernels() -> ctypes.CDLL:
    """The kernels of this process.

    Raises:
        KernelBuildError: they cannot be built here; the message says why.
    """
    library = load_library()
    pointer, size = c_void_p, c_int64
    rows = (pointer, size, size)
    library.nereid_attend.argtypes = [
        *(pointer, pointer, *rows, *rows, *rows),
        *(pointer, size, pointer, pointer, c_int),
    ]
    library.nereid_linear_int8.argtypes = [*([pointer] * 4), *([size] * 3), c_int]
    library.nereid_linear_int8.restype = None
    library.nereid_attend.restype = None
    library.nereid_attend_prefills.argtypes = [pointer, pointer, size, *rows, *[pointer] * 2, c_int]
    library.nereid_attend_prefills.restype = None
    library.nereid_serve.argtypes, library.nereid_serve.restype = [pointer], None
    return library


@functools.cache
def has_kernels() -> bool:
    """Whether the kernels can be built here."""
    try:
        kernels()
    except KernelBuildError:
        return False
    return True


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
        spent: what compiled models spend in the kernels is added here; None: it is not measured.
    """

    spent: Spent | None
    key_scales: list[Tensor]
    value_scales: list[Tensor]
    _native: dict[int, _NativeLayer]
    _native_layers: "ctypes.Array[_Layer] | None"

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - KVCache's own
        super().__init__(*args, **kwargs)
        self.key_scales, self.value_scales = [], []
        self._native = {}
        self._native_layers = None
        self.spent = None
        # All zero so far, so that another shape over the same memory is another layout.
        self.keys = [keys.view(*keys.shape[:2], keys.shape[3], keys.shape[2]) for keys in self.keys]

    def native(
        self, layer: tuple[int, LayerSpec], scale: float, dtype: torch.dtype, block_size: int
    ) -> _Layer:
        """One layer as the kernels want it; made when it is first asked for."""
        number, spec = layer
        found = self._native.get(number)
        if (
            found is None
            or found.spec is not spec
            or found.scale != scale
            or found.dtype is not dtype
            or found.block_size != block_size
        ):
            made = self._native_layer(number, spec, scale, dtype, block_size)
            found = self._native[number] = _NativeLayer(spec, scale, dtype, block_size, made)
        return found.layer

    def native_layers(self, specs: Sequence[LayerSpec], block_size: int) -> "ctypes.Array[_Layer]":
        """All layers as the kernels want them but for their scales; made once."""
        found = self._native_layers
        if found is None:
            made = [
                self._native_layer(number, spec, 0.0, self.dtype, block_size)
                for number, spec in enumerate(specs)
            ]
            found = self._native_layers = (_Layer * len(made))(*made)
        return found

    def _native_layer(
        self, number: int, spec: LayerSpec, scale: float, dtype: torch.dtype, block_size: int
    ) -> _Layer:
        shape = _Shape(
            *(spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, block_size),
            *(spec.span.window or 0, spec.span.chunk or 0, scale, spec.softcap or 0.0),
        )
        scales = (self.key_scales[number], self.value_scales[number]) if self.key_scales else ()
        tensors = (self.keys[number], self.values[number], *scales)
        return _Layer(shape, dtype is torch.bfloat16, *(tensor.data_ptr() for tensor in tensors))

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

    Arguments and result are those of `reference.attend`. Mutates: cache.
    """
    query = inputs[0]
    held = [_with_rows(tensor) for tensor in inputs]  # until the kernels have read them
    query_rows, key_rows, value_rows = map(_rows_of, held)
    step = _native_step(batch)
    spec = layer[1]
    out = query.new_empty(step.num_tokens, spec.num_heads, spec.value_dim)
    sinks_float = None if sinks is None else sinks.float().contiguous()
    sinks_at = None if sinks_float is None else sinks_float.data_ptr()
    native = ctypes.byref(cache.native(layer, scale, query.dtype, batch.block_size))
    num_threads = torch.get_num_threads()
    num_tokens = step.num_tokens
    for group in step.groups:
        kernels().nereid_attend(
            native,
            ctypes.byref(group),
            *query_rows,
            *key_rows,
            *value_rows,
            step.slots,
            num_tokens,
            sinks_at,
            out.data_ptr(),
            num_threads,
        )
        num_tokens = 0  # The first call has stored them.
    if step.prefills:
        kernels().nereid_attend_prefills(
            native,
            step.prefills,
            len(step.prefills),
            *query_rows,
            sinks_at,
            out.data_ptr(),
            num_threads,
        )
    return out


@contextmanager
def serving(
    cache: CpuKVCache, layers: Sequence[LayerSpec], batch: AttentionBatch
) -> Iterator[None]:
    """Let compiled models that run in this thread meanwhile call the kernels for one step.

    Args:
        cache: gets the step's keys and values. Mutated.
        layers: what each layer needs.
        batch: where everything is.
    """
    step = _native_step(batch)
    natives = cache.native_layers(layers, batch.block_size)
    forward = _Forward(
        *(ctypes.addressof(natives), len(natives)),
        *(ctypes.addressof(step.groups), len(step.groups)),
        *(ctypes.addressof(step.prefills), len(step.prefills)),
        *(step.slots, step.num_tokens, torch.get_num_threads()),
        None if cache.spent is None else ctypes.addressof(cache.spent),
    )
    kernels().nereid_serve(ctypes.byref(forward))
    try:
        yield
    finally:
        kernels().nereid_serve(None)


def _with_rows(tensor: Tensor) -> Tensor:
    """A tensor as the kernels can read it: its last dimension is contiguous."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _rows_of(tensor: Tensor) -> tuple[int, int, int]:
    """`Rows` of cpu_kernels.h: where they are, and the strides of head and token."""
    head, token, _ = tensor.stride()
    return tensor.data_ptr(), head, token


def _native_step(batch: AttentionBatch) -> _NativeStep:
    """A step as the kernels want it; made for its first layer, and kept."""
    step = batch.device_rows
    if not isinstance(step, _NativeStep):
        step = batch.device_rows = _make_native_step(batch)
    return step


def _make_native_step(batch: AttentionBatch) -> _NativeStep:
    groups = [
        _Decodes(
            None if group.tokens is None else group.tokens.data_ptr(),
            group.blocks.data_ptr(),
            group.blocks.stride(0),
            group.lens.data_ptr(),
            group.lens.numel(),
        )
        for group in batch.decodes
    ]
    prefills = [
        _Prefill(p.start, p.end - p.start, p.num_cached, p.blocks.data_ptr())
        for p in batch.prefills
    ]
    groups = groups or [_Decodes()]  # A step without decodes is stored all the same.
    return _NativeStep(
        batch.slots.data_ptr(),
        batch.slots.numel(),
        (_Decodes * len(groups))(*groups),
        (_Prefill * len(prefills))(*prefills),
    )
