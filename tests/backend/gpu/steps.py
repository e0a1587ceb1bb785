"""Runs attention over a paged KV cache, so that tests can compare implementations of attention."""

import itertools
import random

import pytest
import torch
from nereid_backend.attention.kv_cache import row_indices
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.step_batch import BatchBuilder

# The numbers of cached tokens and of new tokens of each sequence. The first four sequences are in
# the decode phase, and the last two are prompts.
SMALL = [(0, 1), (15, 1), (16, 1), (70, 1), (0, 23), (37, 9)]

SPECS = {
    "one head": LayerSpec(1, 1, 32, 32),
    "as many key heads as query heads": LayerSpec(4, 4, 64, 64),
    "three query heads a key head": LayerSpec(6, 2, 16, 16),
    "eleven query heads a key head": LayerSpec(11, 1, 16, 16),
    "forty query heads a key head": LayerSpec(40, 1, 16, 16),
    "heads of 80": LayerSpec(2, 1, 80, 80),
    "heads of 96": LayerSpec(2, 1, 96, 96),
    "heads of 128": LayerSpec(2, 1, 128, 128),
    "heads of 256": LayerSpec(2, 1, 256, 256),
    "keys and values of 192 and 128": LayerSpec(2, 2, 192, 128),
    "keys and values of 24 and 10": LayerSpec(4, 2, 24, 10),
    "window": LayerSpec(4, 2, 16, 16, LayerWindow(size=21)),
    "window of one token": LayerSpec(4, 2, 16, 16, LayerWindow(size=1)),
    "chunks": LayerSpec(4, 2, 16, 16, LayerWindow(chunk=32)),
    "window and chunks": LayerSpec(4, 2, 16, 16, LayerWindow(size=20, chunk=32)),
    "softcap": LayerSpec(4, 2, 16, 16, softcap=3.0),
    "sinks": LayerSpec(4, 2, 16, 16, has_sinks=True),
    "window, softcap and sinks": LayerSpec(
        4, 2, 16, 16, LayerWindow(size=21), softcap=3.0, has_sinks=True
    ),
}


def sampled(values, *representative):
    """Return test parameters for `values`. Values that are not `representative` are marked `long`.

    Example: `sampled([16, 64], 64)` returns 16 with the mark `long`, and 64 without a mark.
    """
    params = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = () if value in representative else (pytest.mark.long,)
        params.append(pytest.param(*arguments, marks=marks))
    return params


class Steps:
    """Sequences in one KV cache, with random queries, keys and values.

    `fill` stores the cached tokens. `run` then computes attention for the new tokens in one step.
    """

    def __init__(
        self, cache_type, spec, dtype, device, *, shapes=None, block=16, seed=0, rounded=None
    ):
        """Create an empty cache, and sequences whose blocks are in random order.

        Args:
            cache_type: the class of the KV cache.
            spec: the attention layer.
            dtype: the data type of the queries, keys and values.
            device: the device that computes attention.
            shapes: the numbers of cached tokens and of new tokens of each sequence.
            block: the number of tokens in a block.
            seed: the seed of the random numbers and of the order of the blocks.
            rounded: a data type. The random numbers are rounded to this type before they are
                converted to `dtype`. Two objects with different `dtype` but the same `rounded` have
                the same numbers.
        """
        self.shapes = SMALL if shapes is None else shapes
        self.spec, self.dtype, self.device = spec, dtype, device
        lengths = [num_cached + num_new for num_cached, num_new in self.shapes]
        blocks_of_sequences = [-(-length // block) for length in lengths]
        num_blocks = sum(blocks_of_sequences) + 5
        self.cache = cache_type(
            [spec], num_blocks=num_blocks, block_size=block, dtype=dtype, device=device
        )
        self._builder = BatchBuilder(
            max_num_seqs=len(self.shapes),
            max_model_len=max(lengths) + block,
            block_size=block,
            null_block=self.cache.null_block,
        )
        blocks = list(range(num_blocks))
        random.Random(seed).shuffle(blocks)
        free_blocks = iter(blocks)
        self._sequences = []
        for row, (length, count) in enumerate(zip(lengths, blocks_of_sequences, strict=True)):
            sequence = Sequence(str(row), [1] * length, SamplingParams(), max_total_tokens=10**9)
            sequence.row = row
            sequence.block_table = list(itertools.islice(free_blocks, count))
            self._sequences.append(sequence)
        self._rounded = rounded or dtype
        self._random = torch.Generator().manual_seed(seed)
        self._sinks = self._randn(spec.num_heads).to(device) if spec.has_sinks else None

    def fill(self, *, poison=()):
        """Store random keys and values for the cached tokens.

        Each item of `poison` is a tuple (row, start, end). The keys and values of this row are NaN
        from position `start` to position `end`, exclusive.
        """
        spec = self.spec
        for row, (num_cached, _) in enumerate(self.shapes):
            if not num_cached:
                continue
            key = self._randn(num_cached, spec.num_kv_heads, spec.key_dim)
            value = self._randn(num_cached, spec.num_kv_heads, spec.value_dim)
            for poisoned_row, start, end in poison:
                if poisoned_row == row:
                    key[start:end] = value[start:end] = float("nan")
            self._store(self._sequences[row], key, value)
        return self

    def _store(self, sequence, key, value):
        """Store keys and values of the first tokens of a sequence."""
        block_size = self.cache.values[0].shape[2]
        positions = torch.arange(len(key))
        blocks = torch.tensor(sequence.block_table)[positions // block_size]
        slots = blocks * block_size + positions % block_size
        rows = row_indices(slots, self.spec.num_kv_heads, block_size).to(self.device)
        key, value = (tensor.to(self.device, self.dtype) for tensor in (key, value))
        self.cache.store(0, key, value, rows)

    def run(self):
        """Return the attention outputs of the new tokens: [num_tokens, num_heads, value_dim]."""
        chunks = [
            Chunk(sequence, num_cached, num_new, samples=True, is_first=True, num_logits=1)
            for sequence, (num_cached, num_new) in zip(self._sequences, self.shapes, strict=True)
        ]
        return self._step(chunks).squeeze(0).cpu()

    def _randn(self, *shape):
        return torch.randn(*shape, generator=self._random).to(self._rounded)

    def _step(self, chunks):
        """Return the attention outputs of random queries for the tokens of the chunks."""
        spec, num_tokens = self.spec, sum(chunk.num_tokens for chunk in chunks)
        batch = self._builder.build(StepPlan(chunks, num_tokens), self.device)
        # The tensors are transposed views, because models also pass such views to attention.
        query = self._randn(1, num_tokens, spec.num_heads, spec.key_dim)
        key = self._randn(1, num_tokens, spec.num_kv_heads, spec.key_dim)
        value = self._randn(1, num_tokens, spec.num_kv_heads, spec.value_dim)
        query, key, value = (
            tensor.to(self.device, self.dtype).transpose(1, 2) for tensor in (query, key, value)
        )
        forward = PagedForward(self.cache, batch.attention)
        return forward(torch.nn.Module(), query, key, value, scaling=0.3, s_aux=self._sinks)
