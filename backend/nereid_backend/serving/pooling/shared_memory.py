# SPDX-License-Identifier: Apache-2.0
"""Checks whether the outputs of a request fit into the free shared memory of the machine."""

import os
from typing import Any

import numpy.typing as npt

from nereid_backend.serving.tensors import Tensors

# If the outputs have fewer than `_SMALL_BYTES` bytes, the free shared memory is not checked.
_SMALL_BYTES = 64 * 1024
# Triton server enlarges the memory pool of a Python model in steps of `_POOL_STEP_BYTES` bytes.
_POOL_STEP_BYTES = 1024 * 1024


def fits_shared_memory(outputs: Tensors) -> bool:
    """Return whether output tensors fit into the free shared memory.

    Triton server receives the outputs through shared memory. For small tensors, return True without
    checking the memory.
    """
    num_bytes = sum(map(_num_bytes, outputs.values()))
    if num_bytes < _SMALL_BYTES:
        return True
    try:
        shared_memory = os.statvfs("/dev/shm")
    except OSError:
        return True
    free_bytes = shared_memory.f_bavail * shared_memory.f_frsize
    # The server may have to enlarge the memory pool of this Python model. While the pool is
    # enlarged, it needs space for both the old content and the new response.
    needed_bytes = 2 * num_bytes + _POOL_STEP_BYTES
    return free_bytes > needed_bytes


def _num_bytes(array: npt.NDArray[Any]) -> int:
    """Return the number of bytes of a tensor. A STRING tensor is an array of byte strings."""
    if array.dtype == object:
        return sum(map(len, array))
    return array.nbytes
