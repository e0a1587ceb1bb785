# SPDX-License-Identifier: Apache-2.0
"""Decides into how many parts the decode kernel divides the keys of each sequence.

A decode has only one new token. The keys of long sequences are therefore divided into parts, which
different programs of the kernel compute in parallel. A second kernel combines the parts.
"""

import functools

import torch

from nereid_backend.attention.gpu.gpu_batch import DecodeRows
from nereid_backend.attention.gpu.gpu_call import next_power_of_two
from nereid_backend.attention.layers import LayerWindow

# The largest number of parts of a sequence. If there were more parts, combining them would cost
# more time than computing them in parallel saves.
MAX_SPLITS = 128
# The smallest number of key tiles in a part. Every part also reads the query and writes a result
# that must be combined with others, so small parts are not worth their cost.
_MIN_TILES = 2
# A decode launch should have this number of programs for each multiprocessor. With several programs
# each, all multiprocessors finish at about the same time. A step with few tokens has fewer
# programs.
_PROGRAMS_PER_PROCESSOR = 4
# How many times more programs a launch in a CUDA graph may have than a launch for one step. The
# graph is also used in steps in which one sequence is much longer than the others.
_CAPTURED_FACTOR = 2
# A launch in a CUDA graph divides each sequence into at least this number of parts. The program for
# an empty part ends immediately.
_MIN_CAPTURED_SPLITS = 4
# The number of multiprocessors that tests on a machine without a GPU simulate.
_SIMULATED_PROCESSORS = 4


def split(
    rows: DecodeRows, window: LayerWindow, num_programs: int, tile: int, device: torch.device
) -> tuple[int, int]:
    """Return the number of tokens in each part of a sequence, and the number of parts.

    Parts are as long as possible while there are enough programs to keep the GPU busy, because each
    further part reads the query again and adds a row to the reduction.

    Args:
        rows: the decodes. Only the bounds of their lengths are used.
        window: the attention window of the layer.
        num_programs: the number of programs that compute one part of one sequence. Each of these
            programs computes different heads.
        tile: the number of keys in a tile.
        device: the device of the step.
    """
    lens = [(count, _num_visible(length, window, tile)) for count, length in rows.bounds]
    longest = max(length for _, length in lens)
    total_tokens = sum(count * length for count, length in lens) * num_programs
    wanted_programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    tokens_by_occupancy = _divide_up(total_tokens, wanted_programs)
    tokens_by_max_splits = _divide_up(longest, MAX_SPLITS)
    min_tokens = max(tokens_by_occupancy, tokens_by_max_splits, _MIN_TILES * tile)
    # Round the number up to a power of two times the tile size. Only few different numbers then
    # occur, so that many steps can use the same graph.
    split_tokens = tile * next_power_of_two(_divide_up(min_tokens, tile))
    return split_tokens, _divide_up(longest, split_tokens)


def captured_splits(
    rows: DecodeRows, window: LayerWindow, num_programs: int, tile: int, device: torch.device
) -> int:
    """Return the largest number of parts of a sequence for a launch in a CUDA graph.

    The number depends only on values that are equal for all steps which replay the graph. The
    arguments are those of `split`.
    """
    longest = max(_num_visible(length, window, tile) for _, length in rows.bounds)
    max_splits_by_length = _divide_up(longest, _MIN_TILES * tile)
    wanted_programs = _CAPTURED_FACTOR * _PROGRAMS_PER_PROCESSOR * num_processors(device)
    splits_by_occupancy = _divide_up(wanted_programs, rows.count * num_programs)
    num_splits = max(splits_by_occupancy, _MIN_CAPTURED_SPLITS)
    return max(1, min(num_splits, max_splits_by_length, MAX_SPLITS))


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _SIMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _num_visible(length: int, window: LayerWindow, tile: int) -> int:
    """Return the largest number of keys that the kernel reads for one sequence.

    The sequence has `length` tokens.

    The first tile that the kernel reads can begin before the window.
    """
    return length if window.limit is None else min(length, window.limit + tile)


def _divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up. Example: `_divide_up(7, 3)` returns 3."""
    return -(-number // divisor)
