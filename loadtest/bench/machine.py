"""The processor name, the memory bandwidth and the matrix product speed of this machine."""

import platform
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from nereid_backend.linear import native_linear

from loadtest.bench.timing import call_times

# The number of calls in each measurement. Only the fastest call counts, because the first is slow.
_NUM_CALLS = 6
# The number of float32 values that are summed. The cache of a processor cannot contain them.
_NUM_SUMMED_VALUES = 2**27
_NUM_INPUTS, _NUM_OUTPUTS = 2**12, 2**15
# The side of the square matrices whose product is measured.
_MATRIX_SIZE = 2048


class MachineLimits(NamedTuple):
    """The measured limits of this machine."""

    read_bytes_per_s: float  # the memory bandwidth
    matmul_flops: float  # the floating-point operations of matrix products in one second


def processor_name() -> str:
    """Return the name of the processor, or "?" if the operating system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?"
    )


def measure_limits(dtype: torch.dtype) -> MachineLimits:
    """Measure the limits of this machine for weights of a dtype."""
    return MachineLimits(_measure_bandwidth(dtype), _measure_matmul_flops(dtype))


def _measure_bandwidth(dtype: torch.dtype) -> float:
    """Return the memory bandwidth in bytes/s, which is the larger of two measured rates.

    The first rate is measured with a sum. The second rate is measured with the product of one row
    and a large weight matrix, which often reads memory faster than a sum does.
    """
    values = torch.ones(_NUM_SUMMED_VALUES)
    bandwidth = values.nbytes / min(call_times(values.sum, _NUM_CALLS))
    weight = torch.ones(_NUM_OUTPUTS, _NUM_INPUTS, dtype=dtype)
    if not native_linear.can_pack(weight):
        return bandwidth
    packed, row = native_linear.pack(weight), torch.ones(1, _NUM_INPUTS, dtype=dtype)
    product = partial(native_linear.linear, row, packed, None, _NUM_OUTPUTS)
    return max(bandwidth, packed.nbytes / min(call_times(product, _NUM_CALLS)))


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of two square matrices.

    If the processor cannot multiply numbers of `dtype`, torch converts the numbers, and such a
    product can be slower than a product in float32. Therefore, both dtypes are measured, and the
    higher speed is returned.
    """
    times = []
    for matrix_dtype in {dtype, torch.float32}:
        matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=matrix_dtype)
        times += call_times(partial(torch.mm, matrix, matrix), _NUM_CALLS)
    return 2 * _MATRIX_SIZE**3 / min(times)
