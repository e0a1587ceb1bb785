# SPDX-License-Identifier: Apache-2.0
"""Compares the GPU kernels with the reference implementation when a model is loaded.

The engine's self-check runs the whole model on short sequences. This check runs one attention layer
on longer sequences. Therefore, it also tests splits of long sequences, the reduction of the splits,
tiles of keys without a mask, and windows that begin after the first token. The check also compiles
the kernels.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch, DecodeGroup, Prefill
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.backends.attention_backend import ChosenBackends
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.scaled_cache import ScaledKVCache
from nereid_backend.errors import first_line

# For each data type, the largest relative error that the test accepts. The reference computes in
# float32. If the kernels use a window that is wrong by only one token, the error is larger than
# 0.1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
_SCALE = 0.3
# The rounding error of a number in an e4m3 cache must not exceed the sum of two terms. The first
# term is the number times `_FLOAT8_ERROR`, which is 1/16, increased by 1 % because of inexact
# arithmetic. The second term is the largest number in the vector times `_FLOAT8_SMALLEST`. This
# term is needed because small numbers are stored as subnormal numbers, which have fewer significant
# bits.
_FLOAT8_ERROR = 1.01 / 16
_FLOAT8_SMALLEST = 2.0**-17
# The largest accepted rounding error in an int8 cache, relative to the largest number in the
# vector. It is half of the distance between two adjacent int8 numbers, increased by 2 % because of
# inexact arithmetic.
_INT8_ERROR = 0.51 / 127


class KernelError(Exception):
    """Raised if the kernels and the reference compute different results.

    The message is a clause without a final period.
    """


@dataclass(frozen=True, slots=True)
class Trial:
    """A test case with random numbers, for comparing implementations of an attention layer.

    Attributes:
        spec: the properties of the layer.
        cache: the cache, filled with random keys and values.
        batch: the metadata of the step.
        inputs: the query, the key and the value of the step; see `gpu_attention.attend`.
        sinks: the attention sinks; None if the layer has no sinks.
    """

    spec: LayerSpec
    cache: gpu_attention.GpuKVCache
    batch: AttentionBatch
    inputs: tuple[Tensor, Tensor, Tensor]
    sinks: Tensor | None

    def attend(self, backends: ChosenBackends = gpu_attention.GpuKVCache.backends) -> Tensor:
        """Store the keys and values of the step, and compute the attention of the step.

        The libraries in `backends` replace the kernels. Mutates: the cache.
        """
        self.cache.backends = backends
        return gpu_attention.attend(
            self.inputs, 0, self.cache, self.batch, scale=_SCALE, sinks=self.sinks
        )


@dataclass(frozen=True, slots=True)
class TrialStep:
    """The sequences of a test step.

    Attributes:
        decodes: the length of each decode, a sequence with one new token. The new token is counted.
        prefills: a pair for each prefill, a sequence with several new tokens: the number of cached
            tokens, and the number of new tokens.
    """

    decodes: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()

    @property
    def token_counts(self) -> list[tuple[int, int]]:
        """For each sequence, the pair (number of cached tokens, number of new tokens).

        The decodes come first. Example: one decode of length 400 and the prefill (140, 20) give
        [(399, 1), (140, 20)].
        """
        return [*((length - 1, 1) for length in self.decodes), *self.prefills]


_STEP = TrialStep(decodes=(400, 1, 17), prefills=((0, 40), (140, 20)))


@dataclass(frozen=True, slots=True)
class TrialLayer:
    """An attention layer and its KV cache, for tests with random numbers.

    Attributes:
        cache_class: the class of the KV cache.
        spec: the properties of the layer.
        block_size: the number of tokens in one block.
        dtype: the data type of the model.
        device: the GPU.
    """

    cache_class: type[gpu_attention.GpuKVCache]
    spec: LayerSpec
    block_size: int
    dtype: torch.dtype
    device: torch.device

    def make_trial(self, step: TrialStep = _STEP) -> Trial:
        """Create a KV cache and the inputs of a test step, filled with random numbers.

        `step` contains the lengths of the sequences.
        """
        spec = self.spec
        tables = _scattered_tables(step, self.block_size)
        batch = _make_batch(step, tables, self.block_size, self.device)
        num_tokens = batch.slots.numel()
        num_blocks = sum(len(table) for table in tables)  # without the null block
        generator = torch.Generator().manual_seed(0)
        cache = self._random_cache(num_blocks, generator)
        query = self._random(generator, num_tokens, spec.num_heads, spec.key_dim)
        key = self._random(generator, num_tokens, spec.num_kv_heads, spec.key_dim)
        value = self._random(generator, num_tokens, spec.num_kv_heads, spec.value_dim)
        inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        sinks = self._random(generator, spec.num_heads) if spec.has_sinks else None
        return Trial(spec, cache, batch, inputs, sinks)

    def _random_cache(
        self, num_blocks: int, generator: torch.Generator
    ) -> gpu_attention.GpuKVCache:
        """Create a cache, and fill all blocks except the null block with random numbers.

        `num_blocks` is the number of blocks without the null block, which is the last block.
        """
        spec = self.spec
        cache = self.cache_class(
            [spec],
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        num_tokens = num_blocks * self.block_size
        keys = self._random(generator, num_tokens, spec.num_kv_heads, spec.key_dim)
        values = self._random(generator, num_tokens, spec.num_kv_heads, spec.value_dim)
        # A row of the cache contains the vector of one token and one head. The null block has the
        # last rows. All rows before it are written.
        rows = torch.arange(num_tokens * spec.num_kv_heads, device=self.device)
        cache.store(0, keys, values, rows)
        return cache

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Return a tensor of random numbers with the data type and the device of the layer."""
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)


@functools.cache
def why_unusable(layer: TrialLayer) -> str | None:
    """Return the reason why the kernels cannot compute a layer; None if they can compute it.

    The kernels compute a test step, whose result is compared with the reference implementation.
    """
    try:
        check_kernels(layer)
    except Exception as error:  # noqa: BLE001
        # A compiler or a driver may raise any exception. After an exception, the caller uses the
        # reference implementation instead of the kernels.
        reason = first_line(error)
        return reason if isinstance(error, KernelError) else f"{type(error).__name__}: {reason}"
    return None


@torch.inference_mode()
def check_kernels(layer: TrialLayer) -> float:
    """Raise a KernelError if the kernels and the reference compute a layer differently.

    Return the largest relative error of any token; see `check_trial`.
    """
    trial = layer.make_trial()
    return check_trial(trial, trial.attend())


@torch.inference_mode()
def check_trial(trial: Trial, computed: Tensor) -> float:
    """Compare the results of a trial with the reference: the attention and the stored numbers.

    The stored numbers are the keys and values that the trial has written into the KV cache.

    A trial is one attention layer in one step, computed by the GPU kernels.

    Args:
        trial: the trial, after a call of `Trial.attend`.
        computed: the attention, which is the result of `Trial.attend`.

    Returns:
        The largest relative error of the attention of any token; see `_largest_relative_error`.

    Raises:
        KernelError: if the stored numbers or the attention differ by more than the accepted
            rounding errors.
    """
    query, key, value = trial.inputs
    # The reference computes in float32, and reads the same rounded numbers as the kernels.
    reference_cache = _float32_cache(trial.cache)
    stored = _read_step_vectors(reference_cache, trial.batch)
    _check_rounding_errors(trial.cache, stored=stored, originals=(key, value))
    inputs = (query.float(), *stored)
    expected = reference.attend(
        inputs, 0, reference_cache, trial.batch, scale=_SCALE, sinks=trial.sinks
    )
    error = _largest_relative_error(computed.float(), expected)
    tolerance = _TOLERANCE[query.dtype]
    if error > tolerance or math.isnan(error):
        raise KernelError(
            f"the attention differs from the reference by a relative error of {error:.2g}, "
            f"but the limit is {tolerance:g}"
        )
    return error


def _largest_relative_error(computed: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of any token.

    The relative error of a token is the root mean square of its error, divided by the root mean
    square of its expected values. Both tensors are [num_tokens, num_heads, value_dim].
    """
    error_sizes = (computed - expected).square().mean((1, 2)).sqrt()
    expected_sizes = expected.square().mean((1, 2)).sqrt()
    return float((error_sizes / expected_sizes).max())


def _make_batch(
    step: TrialStep, tables: list[list[int]], block_size: int, device: torch.device
) -> AttentionBatch:
    """Build the metadata of a test step.

    Args:
        step: the lengths of the step's decodes (one new token) and prefills (several new tokens).
        tables: the block table of each sequence. The tables of the decodes come first.
        block_size: the number of tokens in one block.
        device: the device of the tensors.
    """
    slots: list[int] = []  # the place of each new token in the cache
    prefills: list[Prefill] = []
    num_decodes = len(step.decodes)
    for index, (num_cached, num_new) in enumerate(step.token_counts):
        start = len(slots)
        slots += _slots(tables[index], range(num_cached, num_cached + num_new), block_size)
        is_prefill = index >= num_decodes
        if is_prefill:
            blocks = _int64([tables[index]], device)
            prefills.append(Prefill(start, len(slots), num_cached, blocks))
    groups = []
    if num_decodes:
        groups.append(_decode_group(step, tables, block_size, device))
    return AttentionBatch(_int64(slots, device), num_decodes, groups, prefills, block_size)


def _decode_group(
    step: TrialStep, tables: list[list[int]], block_size: int, device: torch.device
) -> DecodeGroup:
    """Return one group with all decoding sequences of a step.

    Args:
        step: the lengths of the sequences.
        tables: the block table of each sequence. The tables of the decodes come first.
        block_size: the number of tokens in one block.
        device: the device of the tensors.
    """
    # The n blocks in `tables` have the ids 0 to n - 1, so the null block, which pads
    # short tables, has the id n.
    null_block = sum(len(table) for table in tables)
    decode_tables = tables[: len(step.decodes)]
    blocks = _int64(_padded(decode_tables, null_block), device)
    lens = _int64(step.decodes, device)
    # tokens=None means that the tokens of the decodes are the first tokens of the step.
    return DecodeGroup(tokens=None, blocks=blocks, lens=lens, block_size=block_size)


def _int64(values: Sequence[int] | list[list[int]], device: torch.device) -> Tensor:
    """Return a tensor of int64 numbers on a device."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def _scattered_tables(step: TrialStep, block_size: int) -> list[list[int]]:
    """Return a block table for each sequence of a step. The tables of the decodes come first.

    The blocks in a table are in random order, and no block is in two tables. `block_size` is the
    number of tokens in one block.
    """
    table_lens = [
        math.ceil((num_cached + num_new) / block_size) for num_cached, num_new in step.token_counts
    ]
    blocks = list(range(sum(table_lens)))
    random.Random(0).shuffle(blocks)
    return [[blocks.pop() for _ in range(table_len)] for table_len in table_lens]


def _padded(tables: list[list[int]], null_block: int) -> list[list[int]]:
    """Return the block tables, padded with the null block to the same length."""
    width = max(len(table) for table in tables)
    return [table + [null_block] * (width - len(table)) for table in tables]


def _slots(table: list[int], positions: range, block_size: int) -> list[int]:
    """Return the cache slots of one sequence's tokens. `table` is the sequence's block table."""
    return [table[p // block_size] * block_size + p % block_size for p in positions]


def _float32_cache(cache: KVCache) -> KVCache:
    """Return a float32 copy of the cache of one layer. 8-bit numbers are converted to float32.

    The reference implementation computes with the copy, so that its results contain only the
    rounding errors of the stored numbers, and no rounding errors of its own arithmetic.
    """
    # The null block has the highest id of all blocks, so its id equals the number of other blocks.
    num_blocks = cache.null_block
    float32_cache = KVCache(
        cache.layers,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        dtype=torch.float32,
        device=cache.device,
    )
    keys, values = cache.keys[0], cache.values[0]
    if isinstance(cache, ScaledKVCache):
        # An 8-bit cache stores each vector as 8-bit numbers and one factor. `restored` converts the
        # vectors back to float32.
        keys = cache.restored(keys, cache.key_scales[0])
        values = cache.restored(values, cache.value_scales[0])
    float32_cache.keys[0].copy_(keys)
    float32_cache.values[0].copy_(values)
    return float32_cache


def _read_step_vectors(cache: KVCache, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Read the keys and values that the kernels have stored for the step's new tokens.

    Args:
        cache: a float32 copy of the cache, with one layer.
        batch: the metadata of the step. `slots` contains the place of each token in the cache.

    Returns:
        The keys, [num_kv_heads, num_tokens, key_dim] float32, and the values, [num_kv_heads,
        num_tokens, value_dim] float32.
    """
    blocks = batch.slots // batch.block_size
    places_in_block = batch.slots % batch.block_size
    # The selected vectors have the shape [num_tokens, num_kv_heads, dim].
    keys = cache.keys[0][blocks, :, places_in_block].transpose(0, 1)
    values = cache.values[0][blocks, :, places_in_block].transpose(0, 1)
    return keys, values


def _check_rounding_errors(
    cache: KVCache, *, stored: tuple[Tensor, Tensor], originals: tuple[Tensor, Tensor]
) -> None:
    """Raise a KernelError if a stored key or value differs too much from the original."""
    for actual, original in zip(stored, originals, strict=True):
        expected = original.float()
        is_accepted = (actual - expected).abs() <= _allowed_rounding_error(cache, expected)
        if not bool(is_accepted.all()):
            raise KernelError(
                "the GPU kernel stored other keys or values than the test step contains"
            )


def _allowed_rounding_error(cache: KVCache, vectors: Tensor) -> Tensor:
    """Return the largest accepted rounding error of each number in the vectors [..., dim].

    If the cache does not store 8-bit numbers, no number may be rounded.
    """
    largest = vectors.abs().amax(-1, keepdim=True)
    if isinstance(cache, Float8KVCache):
        return vectors.abs() * _FLOAT8_ERROR + largest * _FLOAT8_SMALLEST
    if isinstance(cache, ScaledKVCache):
        return largest * _INT8_ERROR
    return torch.zeros_like(largest)
