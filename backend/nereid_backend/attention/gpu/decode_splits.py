# SPDX-License-Identifier: Apache-2.0
"""Computes the number of splits into which the decode kernel divides the keys of a sequence.

A decode has only one new token, so one sequence alone cannot keep a GPU busy. Therefore, the keys
of a long sequence are divided into splits. Different programs of the kernel compute the splits in
parallel, and a second kernel combines the results.
"""

import functools

import torch

from nereid_backend.attention.gpu.gpu_batch import DecodeRows
from nereid_backend.attention.gpu.gpu_call import divide_up, next_power_of_two
from nereid_backend.attention.layers import LayerWindow

# The largest number of splits of a sequence. With more splits, combining the results of the splits
# would take more time than is saved by computing the splits in parallel.
MAX_SPLITS = 128
# The smallest number of key tiles in a split. Each split has an overhead: its program reads the
# query, and writes a result that must be combined with the results of other splits. For smaller
# splits, this overhead would be too large.
_MIN_TILES = 2
# The desired number of programs per multiprocessor when the decode kernel is launched. If each
# multiprocessor runs several programs, all multiprocessors finish at about the same time. If a step
# has few tokens, the number of programs is smaller.
_PROGRAMS_PER_PROCESSOR = 4
# A kernel launch in a CUDA graph may have up to `_CAPTURED_FACTOR` times as many programs as a
# launch for a single step, because the graph is replayed for different steps. In some of these
# steps, one sequence is much longer than the others. The programs of the short sequences then end
# at once, and the programs of the longest sequence must suffice to keep the GPU busy.
_CAPTURED_FACTOR = 2
# In a CUDA graph, the keys of each sequence are divided into at least `_MIN_CAPTURED_SPLITS` splits
# if the longest sequence is long enough. A program whose split contains no keys ends immediately.
_MIN_CAPTURED_SPLITS = 4
# The number of multiprocessors of the GPU that tests simulate on a machine without a GPU.
_SIMULATED_PROCESSORS = 4


def split_size_and_count(
    rows: DecodeRows, window: LayerWindow, programs_per_split: int, tile: int, device: torch.device
) -> tuple[int, int]:
    """Divide the keys of each sequence into splits. Return the size and the number of the splits.

    The size of a split is the number of its keys. Sequences have different numbers of splits. The
    returned number is the number of splits of the longest sequence.

    Different programs compute the splits in parallel, and a reduction combines their results. The
    splits are as short as three limits allow: the launch has only as many programs as keep the GPU
    busy, a sequence has at most `MAX_SPLITS` splits, and a split has at least `_MIN_TILES` tiles.
    More splits would make the reduction slower.

    Args:
        rows: the decodes (sequences with one new token). Only the bounds of their lengths are used:
            one pair (number of sequences, largest length) for each group of decodes.
        window: the attention window of the layer.
        programs_per_split: the number of programs for one split of one sequence. Each of these
            programs computes different heads.
        tile: the number of keys in a tile.
        device: the device of the step.
    """
    # Pairs of numbers: the number of sequences in a group, and the number of keys that the kernel
    # reads for each sequence of the group.
    lens = [(num_seqs, _num_visible(length, window, tile)) for num_seqs, length in rows.bounds]
    longest = max(length for _, length in lens)
    num_tokens = sum(num_seqs * length for num_seqs, length in lens)
    wanted_programs = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    # Each of the three limits (programs, splits and tiles) requires a minimum number of tokens in a
    # split.
    min_for_programs = divide_up(num_tokens * programs_per_split, wanted_programs)
    min_for_splits = divide_up(longest, MAX_SPLITS)
    min_for_tiles = _MIN_TILES * tile
    min_tokens = max(min_for_programs, min_for_splits, min_for_tiles)
    # The number of tiles is rounded up to a power of two, so that different steps usually have
    # splits of the same size.
    num_tiles = next_power_of_two(divide_up(min_tokens, tile))
    split_tokens = num_tiles * tile
    return split_tokens, divide_up(longest, split_tokens)


def captured_splits(
    rows: DecodeRows, window: LayerWindow, programs_per_split: int, tile: int, device: torch.device
) -> int:
    """Return how many splits a sequence may have at most if a CUDA graph records the kernel launch.

    A split is a part of a sequence's keys, and a separate program computes each split. A CUDA graph
    records a launch and repeats it in later steps. Therefore, the result depends only on values
    that are equal for all these steps.

    Args:
        rows: the decodes (sequences with one new token). Only their number and their bounds are
            used: one pair (number of sequences, largest possible length) for each group of decodes.
        window: the attention window of the layer.
        programs_per_split: the number of programs for one split of one sequence. Each of these
            programs computes different heads.
        tile: the number of keys in a tile.
        device: the device of the step.
    """
    wanted_programs = _CAPTURED_FACTOR * _PROGRAMS_PER_PROCESSOR * num_processors(device)
    splits_for_busy_gpu = divide_up(wanted_programs, rows.count * programs_per_split)
    # Each split has at least `_MIN_TILES` tiles, so the length of the longest sequence limits the
    # number of splits.
    most_keys = max(_num_visible(max_length, window, tile) for _, max_length in rows.bounds)
    splits_of_longest = max(1, divide_up(most_keys, _MIN_TILES * tile))
    upper_bound = min(splits_of_longest, MAX_SPLITS)
    # If there are many sequences, `splits_for_busy_gpu` is small. Use at least
    # `_MIN_CAPTURED_SPLITS` splits, so that the keys of a long sequence are divided among several
    # programs.
    return min(max(splits_for_busy_gpu, _MIN_CAPTURED_SPLITS), upper_bound)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _SIMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _num_visible(length: int, window: LayerWindow, tile: int) -> int:
    """Return the largest number of keys that the kernel reads for a sequence of `length` tokens.

    With an attention window, the kernel reads the window and up to one tile before the window,
    because the first tile that overlaps the window can begin before the window. Example: a window
    of 512 tokens and a tile of 64 keys give at most 576.
    """
    return length if window.limit is None else min(length, window.limit + tile)
