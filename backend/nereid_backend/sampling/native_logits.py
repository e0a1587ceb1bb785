# SPDX-License-Identifier: Apache-2.0
"""Rows of logits read by our own kernels (cpu_logits.cpp), where there is a compiler.

Torch works on a whole vocabulary in several passes, and writes as much as it reads; the kernels
read every logit once, in the model's dtype. What they find in a row does not depend on other rows.
"""

import functools
from ctypes import CDLL, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.attention.cpu.cpu_attention import has_kernels, kernels


class RowFacts(NamedTuple):
    """What is known of rows of logits.

    Attributes:
        likeliest: [n] int64, the first token with the largest logit.
        logsumexp: [n] float32; not a finite number where the logits are no distribution.
    """

    likeliest: Tensor
    logsumexp: Tensor


def can_read(logits: Tensor) -> bool:
    """Whether the kernels take these logits."""
    is_known = logits.dtype in (torch.float32, torch.bfloat16)
    return logits.device.type == "cpu" and is_known and logits.shape[1] > 0 and has_kernels()


def read(logits: Tensor) -> RowFacts:
    """The likeliest tokens, and logarithms of sums of exponentials."""
    count = len(logits)
    found = RowFacts(torch.empty(count, dtype=torch.int64), torch.empty(count))
    logits = _lying_in_rows(logits)
    _library().nereid_read_logits(
        *_rows(logits), *(tensor.data_ptr() for tensor in found), torch.get_num_threads()
    )
    return found


def draw(logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float64]) -> Tensor:
    """One token a row by a random number in [0, 1) each: [n] int64. See `drawing`."""
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    logits, scales, shares = _lying_in_rows(logits), 1 / temperature, np.ascontiguousarray(uniform)
    _library().nereid_draw(
        *(*_rows(logits), scales.ctypes.data, shares.ctypes.data),
        *(token_ids.data_ptr(), torch.get_num_threads()),
    )
    return token_ids


def likeliest(
    logits: Tensor, temperature: NDArray[np.float32], width: int
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row.

    Returns:
        Their probabilities, falling, [n, width] float32, and their ids, int64; 0 and -1 for what a
        row lacks of tokens within reach.
    """
    probs = torch.empty(len(logits), width)
    token_ids = torch.empty(len(logits), width, dtype=torch.int64)
    logits, scales = _lying_in_rows(logits), 1 / temperature
    _library().nereid_likeliest(
        *(*_rows(logits), scales.ctypes.data, width),
        *(token_ids.data_ptr(), probs.data_ptr(), torch.get_num_threads()),
    )
    return probs, token_ids


def _lying_in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _rows(logits: Tensor) -> tuple[bool, int, int, int, int]:
    is_bfloat16 = logits.dtype == torch.bfloat16
    return is_bfloat16, logits.data_ptr(), len(logits), logits.stride(0), logits.shape[1]


@functools.cache
def _library() -> CDLL:
    library = kernels()
    rows: list[Any] = [c_int, c_void_p, *[c_int64] * 3]
    library.nereid_read_logits.argtypes = [*rows, c_void_p, c_void_p, c_int]
    library.nereid_draw.argtypes = [*rows, *[c_void_p] * 3, c_int]
    library.nereid_likeliest.argtypes = [*rows, c_void_p, c_int64, *[c_void_p] * 2, c_int]
    for name in ("read_logits", "draw", "likeliest"):
        getattr(library, f"nereid_{name}").restype = None
    return library
