"""Quantises weights with ggml, the library of llama.cpp.

The Python library gguf cannot quantise weights to K-quants.
"""

import ctypes
import functools
from pathlib import Path

import gguf
import numpy as np
import pytest

FLOATS = ("F32", "F16", "BF16")


@functools.cache
def _ggml() -> ctypes.CDLL:
    """Load the library ggml. Skip the test if the package libggml is not installed."""
    libggml = pytest.importorskip("libggml")
    library = ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so.0"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def quantise(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantise a weight, and return its blocks: uint8 [..., number of bytes in a row].

    All inputs have the same importance. In llama.cpp, an importance matrix can change this.
    """
    if kind.name in FLOATS:
        return gguf.quantize(weight, kind)
    rows = np.ascontiguousarray(weight, dtype=np.float32).reshape(-1, weight.shape[-1])
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.empty((len(rows), rows.shape[1] // block_size * block_bytes), dtype=np.uint8)
    importance = np.ones(rows.shape[1], dtype=np.float32)
    num_written_bytes = _ggml().ggml_quantize_chunk(
        kind, rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, importance.ctypes.data
    )
    assert num_written_bytes == blocks.nbytes
    return blocks.reshape(*weight.shape[:-1], -1)
