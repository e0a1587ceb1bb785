# SPDX-License-Identifier: Apache-2.0
"""The C interface of the CPU kernels: the types of the functions and of the structs.

The structs have the same layout as the structs in cpu_kernels.h and cpu_shim.cpp.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p

from nereid_backend.attention.cpu.compile_kernels import KernelBuildError
from nereid_backend.attention.cpu.instruction_sets import CPU_INSTRUCTIONS
from nereid_backend.attention.cpu.load_kernels import load_library


class NativeShape(ctypes.Structure):
    """The struct `Shape` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("block_size", "window", "chunk", "is_bidirectional")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class NativeLayer(ctypes.Structure):
    """The struct `Layer` of cpu_kernels.h."""

    _fields_ = (
        ("shape", NativeShape),
        ("is_bfloat16", c_int64),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
    )


class NativeDecodeGroup(ctypes.Structure):
    """The struct `DecodeGroup` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "blocks")),
        ("blocks_stride", c_int64),
        ("lens", c_void_p),
        ("num_seqs", c_int64),
    )


class NativePrefill(ctypes.Structure):
    """The struct `Prefill` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("first", "num_tokens", "num_cached")),
        ("blocks", c_void_p),
    )


class NativeRows(ctypes.Structure):
    """The struct `Rows` of cpu_kernels.h."""

    _fields_ = (("at", c_void_p), ("head_stride", c_int64), ("token_stride", c_int64))


class NativeLayerStep(ctypes.Structure):
    """The struct `LayerStep` of cpu_kernels.h."""

    _fields_ = (
        *((name, NativeRows) for name in ("query", "keys", "values")),
        *(("slots", c_void_p), ("num_tokens", c_int64)),
        *(("sinks", c_void_p), ("out", c_void_p)),
    )


class NativeGroupStep(ctypes.Structure):
    """The struct `GroupStep` of cpu_shim.cpp."""

    _fields_ = (
        *(("decodes", c_void_p), ("num_decodes", c_int64)),
        *(("prefills", c_void_p), ("num_prefills", c_int64)),
        ("slots", c_void_p),
    )


class NativeForward(ctypes.Structure):
    """The struct `Forward` of cpu_shim.cpp."""

    _fields_ = (
        *(("layers", c_void_p), ("num_layers", c_int64)),
        *(("steps", c_void_p), ("group_of", c_void_p)),
        *(("num_tokens", c_int64), ("num_threads", c_int64)),
        ("times", c_void_p),
    )


class NativeGroupedWeights(ctypes.Structure):
    """The struct `GroupedWeights` of cpu_kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "zeros")),
        *((name, c_int64) for name in ("bits", "group_size", "dim", "num_outputs")),
        ("has_byte_zeros", c_int64),
    )


class NativeAdaptedProduct(ctypes.Structure):
    """The struct `AdaptedProduct` of cpu_kernels.h."""

    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("num_outputs", "first_layer", "num_layers")),
    )


class NativeAdapterMatrices(ctypes.Structure):
    """The struct `AdapterMatrices` of cpu_kernels.h."""

    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int64))


class NativeAdapterStep(ctypes.Structure):
    """The struct `AdapterStep` of cpu_kernels.h."""

    _fields_ = (
        *(("products", c_void_p), ("num_products", c_int64), ("layer_outputs", c_void_p)),
        *(("adapters", c_void_p), ("num_adapters", c_int64), ("is_bfloat16", c_int64)),
        *(("owners", c_void_p), ("chunk_owners", c_void_p)),
        *((name, c_int64) for name in ("num_tokens", "num_chunks", "unfit_rows")),
    )


class KernelTimes(ctypes.Structure):
    """The time that compiled models have spent in the kernels, in nanoseconds."""

    _fields_ = (("linear_ns", c_int64), ("attention_ns", c_int64))


_LOGITS = (c_int, c_void_p, c_int64, c_int64, c_int64)
# The argument types of the functions in cpu_kernels.h and cpu_shim.cpp. The functions return
# nothing.
_ARGUMENT_TYPES: dict[str, tuple[type, ...]] = {
    "nereid_attend": (*[c_void_p] * 3, c_int),
    "nereid_attend_prefills": (c_void_p, c_void_p, c_int64, c_void_p, c_int),
    "nereid_serve": (c_void_p,),
    "nereid_linear": (c_int, *[c_void_p] * 4, *[c_int64] * 3, c_int),
    "nereid_grouped_linear": (c_int, *[c_void_p] * 4, c_int64, c_int),
    "nereid_serve_adapters": (c_void_p,),
    "nereid_adapt": (c_int, *[c_void_p] * 3, *[c_int64] * 3, c_int),
    "nereid_read_logits": (*_LOGITS, c_void_p, c_void_p, c_int),
    "nereid_sample": (*_LOGITS, *[c_void_p] * 3, c_int),
    "nereid_likeliest": (*_LOGITS, c_void_p, c_int64, *[c_void_p] * 2, c_int),
}


@functools.cache
def kernels() -> ctypes.CDLL:
    """Return the library of kernels. The first call loads the library, and builds it if necessary.

    Raises:
        KernelBuildError: if the kernels cannot be built on this machine.
    """
    library = load_library()
    for name, argument_types in _ARGUMENT_TYPES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = None
    return library


@contextmanager
def forced_instruction_set(name: str) -> Iterator[None]:
    """Return a context manager that selects the kernels for another instruction set.

    The context is intended for tests and measurements. A model that was compiled outside the
    context must not be called inside the context. Its calls stay bound to the previous library of
    kernels, but the metadata of a step is then passed only to the new library.

    Args:
        name: the name of one of the instruction sets in `instruction_sets.INSTRUCTION_SETS`.
    """
    previous_name = os.environ.get(CPU_INSTRUCTIONS)
    try:
        os.environ[CPU_INSTRUCTIONS] = name
        _forget_kernels()  # The next call of a kernel loads the library again.
        yield
    finally:
        if previous_name is None:
            del os.environ[CPU_INSTRUCTIONS]
        else:
            os.environ[CPU_INSTRUCTIONS] = previous_name
        _forget_kernels()


def _forget_kernels() -> None:
    """Clear the caches, so that the next call of `kernels` loads a library again."""
    kernels.cache_clear()
    has_kernels.cache_clear()


@functools.cache
def has_kernels() -> bool:
    """Return whether the kernels can be used on this machine. The first call loads the kernels."""
    try:
        kernels()
    except KernelBuildError:
        return False
    return True
