"""Check, measure and tune the attention kernels alone, for kernel_parts.py.

Every step runs through `gpu_attention.attend`, as in a layer of a model.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.gpu_attention import GpuKVCache
from nereid_backend.attention.gpu.gpu_call import AttentionCall
from nereid_backend.attention.gpu.tuning import Tuning
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.scaled_cache import ScaledKVCache
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.step_batch import BatchBuilder
from torch import Tensor
from torch.nn import functional

BLOCK = 16
_NO_LIMIT = 2**40
# If a value of the reference is v, the allowed difference is this number times (1 + |v|). The
# reference computes in float32. In float32, the difference comes from the hardware's exponential
# function, and from the softcap, which subtracts two numbers near one.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-5}

# The seconds for which a graph is replayed before it is measured.
_WARM_UP_S = 0.1

# The numbers of (cached, new) tokens of each sequence in one step.
Shapes = list[tuple[int, int]]

REAL_SPECS = {
    "32/8 heads of 128": LayerSpec(32, 8, 128, 128),
    "64/8 heads of 64, window 128, sinks": LayerSpec(
        64, 8, 64, 64, LayerWindow(size=128), has_sinks=True
    ),
    "64/8 heads of 64, sinks": LayerSpec(64, 8, 64, 64, has_sinks=True),
    "16/8 heads of 256, window 4096, softcap": LayerSpec(
        16, 8, 256, 256, LayerWindow(size=4096), softcap=50.0
    ),
    "16/16 heads, keys 192, values 128": LayerSpec(16, 16, 192, 128),
    "32/32 heads of 80": LayerSpec(32, 32, 80, 80),
    "32/32 heads of 96": LayerSpec(32, 32, 96, 96),
    "40/8 heads of 128, chunks of 8192": LayerSpec(40, 8, 128, 128, LayerWindow(chunk=8192)),
    "71/1 heads of 64": LayerSpec(71, 1, 64, 64),
}
# The step contains decodes of all lengths, and prompts that are whole, continued or tiny.
REAL_SHAPES: Shapes = [
    *[(9000, 1), (20000, 1), (17, 1), (0, 1)],
    *[(131 * i, 1) for i in range(20)],
    *[(0, 2000), (5000, 300), (0, 17), (12000, 5)],
]
TINY_SPECS = {
    "4/2 heads of 16, window 21, sinks": LayerSpec(
        4, 2, 16, 16, LayerWindow(size=21), has_sinks=True
    ),
    "2/1 heads of 24 and 10": LayerSpec(2, 1, 24, 10),
}
TINY_SHAPES: Shapes = [(40, 1), (0, 1), (0, 9), (20, 3)]

# The tile sizes that a search tries for each kernel if numbers have two bytes. Neighbouring entries
# differ in the number of stages, because the best number of stages is the least certain.
CANDIDATES = {
    "decode": [
        Tuning(16, tile, warps, stages)
        for tile, warps, stages in itertools.product((64, 32, 128), (4, 8), (3, 2, 4, 5))
    ],
    "prefill": [
        Tuning(rows, tile, warps, stages)
        for rows, tile, warps, stages in itertools.product(
            (128, 64), (64, 128, 32), (8, 4), (3, 2, 4)
        )
    ],
}


class KernelError(Exception):
    """A kernel differs from its reference implementation."""


class Case(NamedTuple):
    """One step of one layer.

    Attributes:
        name: the name in the report.
        spec: the layer.
        shapes: the tokens of each sequence.
        cache: the kind of the KV cache.
    """

    name: str
    spec: LayerSpec
    shapes: Shapes
    cache: type[GpuKVCache] = GpuKVCache


def decodes(num_tokens: int, count: int = 1) -> Shapes:
    """Return `count` sequences that decode. Each has `num_tokens` tokens, including the new one."""
    return [(num_tokens - 1, 1)] * count


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured rate and the rate with which it is compared.

    Attributes:
        name: the name in the report.
        milliseconds: the median time of a step.
        rate: the measured rate, in bytes/s or FLOP/s.
        limit: the rate for comparison, in the same unit.
    """

    name: str
    milliseconds: float
    rate: float
    limit: float


class LayerStep:
    """One layer of one packed step over a KV cache of random numbers."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = case.spec, dtype, device
        # In a step, sequences with one new token (decodes) come before all others (prefills).
        decode_shapes = [(cached, new) for cached, new in case.shapes if new == 1]
        prefill_shapes = [(cached, new) for cached, new in case.shapes if new > 1]
        self.shapes = [*decode_shapes, *prefill_shapes]
        self._num_blocks = [ceil_div(cached + new, BLOCK) for cached, new in self.shapes]
        self.cache = self._make_cache(case.cache, sum(self._num_blocks), dtype)
        self._fill()
        self.batch = self._make_batch()
        spec = self.spec
        self.inputs = (  # queries, keys and values
            self._random_heads(spec.num_heads, spec.key_dim),
            self._random_heads(spec.num_kv_heads, spec.key_dim),
            self._random_heads(spec.num_kv_heads, spec.value_dim),
        )
        self.sinks = torch.randn(spec.num_heads, device=device) if spec.has_sinks else None
        self.scale = spec.key_dim**-0.5

    def _make_batch(self) -> AttentionBatch:
        """Return the metadata of the step. The sequences have blocks in random order."""
        free_blocks = iter(torch.randperm(sum(self._num_blocks)).tolist())
        chunks = []
        for row, (cached, new) in enumerate(self.shapes):
            token_ids = [1] * (cached + new)  # attention does not read the token ids
            sequence = Sequence(str(row), token_ids, SamplingParams(), max_total_tokens=_NO_LIMIT)
            sequence.row = row
            sequence.block_table = list(itertools.islice(free_blocks, self._num_blocks[row]))
            chunks.append(
                Chunk(sequence, cached, num_tokens=new, samples=True, is_first=True, num_logits=1)
            )
        builder = BatchBuilder(
            max_num_seqs=len(self.shapes),
            max_model_len=max(self._num_blocks) * BLOCK,
            block_size=BLOCK,
            null_block=self.cache.null_block,
        )
        return builder.build(StepPlan(chunks, self._num_tokens), self.device).attention

    @property
    def _num_tokens(self) -> int:
        """The number of new tokens."""
        return sum(new for _, new in self.shapes)

    def _random_heads(self, num_heads: int, dim: int) -> Tensor:
        """Return random queries, keys or values of the new tokens, [num_heads, num_tokens, dim]."""
        size = (self._num_tokens, num_heads, dim)
        return torch.randn(size, dtype=self.dtype, device=self.device).transpose(0, 1)

    def attend(self) -> Tensor:
        """Return the output of the kernels, [num_tokens, num_heads, value_dim]."""
        return gpu_attention.attend(
            self.inputs, 0, self.cache, self.batch, scale=self.scale, sinks=self.sinks
        )

    def expected(self) -> tuple[Tensor, KVCache]:
        """Return the output of the reference in float32, and the cache that it read.

        Call this method before the kernels run. Exception: if the cache has 8 bits, call this
        method after the kernels, because the reference reads the numbers that the kernels wrote.
        """
        cache = self._make_cache(KVCache, self.cache.null_block, torch.float32)
        query, key, value = (tensor.float() for tensor in self.inputs)
        rows = self.batch.row_indices(self.spec.num_kv_heads)
        if isinstance(self.cache, ScaledKVCache):
            key, value = self._restore(self.cache, cache, rows)
        else:
            cache.keys[0].copy_(self.cache.keys[0])
            cache.values[0].copy_(self.cache.values[0])
            cache.store(0, key.transpose(0, 1), value.transpose(0, 1), rows)
        out = reference.attend(
            (query, key, value), 0, cache, self.batch, scale=self.scale, sinks=self.sinks
        )
        return out, cache

    @property
    def decode_bytes(self) -> int:
        """The bytes of keys and values that the decodes read."""
        lens = [cached + 1 for cached, new in self.shapes if new == 1]
        if isinstance(self.cache, ScaledKVCache):
            return sum(lens) * self.spec.bytes_per_token(1, torch.float32.itemsize)
        return sum(lens) * self.spec.bytes_per_token(self.dtype.itemsize)

    @property
    def prefill_flops(self) -> int:
        """The number of floating-point operations for the prompts, without masked scores."""
        return _flops(self.spec, [shape for shape in self.shapes if shape[1] > 1])

    def _restore(
        self, cache: ScaledKVCache, reference_cache: KVCache, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill the reference's cache from an 8-bit cache. Return the keys and values of this step.

        Raises:
            KernelError: the numbers that the step wrote differ by more than the rounding.
        """
        _, key, value = self.inputs
        keys, values = reference_cache.keys[0], reference_cache.values[0]
        for target, stored, scales in (
            (keys, cache.keys[0], cache.key_scales[0]),
            (values, cache.values[0], cache.value_scales[0]),
        ):
            for part in _slices(len(stored)):
                target[part] = cache.restored(stored[part], scales[part])
        return _written(cache, keys, rows, key), _written(cache, values, rows, value)

    def _fill(self) -> None:
        """Fill the cache with random keys and values, except the null block."""
        cache = self.cache
        for name in ("key", "value"):
            tensor = getattr(cache, f"{name}s")[0]
            if not isinstance(cache, ScaledKVCache):
                tensor[:-1].normal_()
                continue
            scales = getattr(cache, f"{name}_scales")[0]
            for part in _slices(len(tensor) - 1):
                numbers = torch.randn(tensor[part].shape, device=self.device)
                tensor[part], scales[part] = cache.rounded(numbers)

    def _make_cache(self, kind: type[Any], num_blocks: int, dtype: torch.dtype) -> Any:  # noqa: ANN401
        return kind(
            [self.spec], num_blocks=num_blocks, block_size=BLOCK, dtype=dtype, device=self.device
        )


def _slices(count: int) -> list[slice]:
    """Return slices of 4096 blocks, because all blocks in float32 would need too much memory."""
    return [slice(i, min(i + 4096, count)) for i in range(0, count, 4096)]


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up."""
    return -(-number // divisor)


def _flops(spec: LayerSpec, shapes: Shapes) -> int:
    """Return the number of floating-point operations of attention, without masked scores."""
    num_scores = sum(new * cached + new * (new + 1) // 2 for cached, new in shapes)
    return 2 * num_scores * spec.num_heads * (spec.key_dim + spec.value_dim)


def _written(cache: ScaledKVCache, restored: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Return the keys or values that a step wrote into a cache, after a comparison with `new`.

    `restored` contains all numbers of the cache as float32. The step wrote `rows` of the cache.
    `new` contains the numbers before the rounding, [num_kv_heads, num_tokens, dim].

    Raises:
        KernelError: the numbers differ by more than the rounding.
    """
    dim = restored.shape[3]
    written = restored.view(-1, dim)[rows].view(new.shape[1], -1, dim).transpose(0, 1)
    wanted = new.float()
    largest = wanted.abs().amax(-1, keepdim=True)
    if isinstance(cache, Float8KVCache):
        allowed = wanted.abs() * (1.01 / 16) + largest * 2.0**-17
    else:
        # A rounding error is at most half a step of the integers. The remaining 0.01 is a safety
        # margin.
        allowed = largest * (0.51 / 127)
    if not bool(((written - wanted).abs() <= allowed).all()):
        raise KernelError("the 8-bit cache write differs by more than the rounding")
    return written


def check(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference between the kernels and the reference in one step.

    Raises:
        KernelError: the difference is larger than rounding explains.
    """
    step = LayerStep(case, dtype, device)
    if case.cache is GpuKVCache:
        expected, cache = step.expected()
        out = step.attend()
        for stored, due in ((step.cache.keys, cache.keys), (step.cache.values, cache.values)):
            if not torch.equal(stored[0].float(), due[0]):
                raise KernelError(
                    f"{case.name}, {dtype}: the cache write differs from its reference"
                )
    else:
        out = step.attend()
        expected, _ = step.expected()
    difference = (out.float() - expected).abs()
    allowed = TOLERANCE[dtype] * (1 + expected.abs())
    if not bool((difference <= allowed).all()):
        worst = difference.nan_to_num(float("inf")).max().item()
        raise KernelError(
            f"{case.name}, {dtype}: attention differs from its reference by {worst:.3g}"
        )
    return float(difference.max())


def milliseconds(work: Callable[[], object], device: torch.device, repeat: int = 20) -> float:
    """Return the median time of a call on the device in milliseconds, without the launch time.

    On a GPU, the call is captured once as a CUDA graph and replayed, because launching a kernel
    from Python takes 80 to 100 microseconds, longer than a small kernel runs. An idle GPU lowers
    its clock, so replays of at least 100 ms come before the measurement.

    Args:
        work: launches kernels on the current stream. It must not wait for the device.
        device: the device.
        repeat: the number of measured replays on a GPU. On a CPU, one call is measured, because the
            interpreter is slow.
    """
    if device.type != "cuda":
        work()  # the first call loads code
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3
    replay = captured(work)
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_S:
        replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays the kernels of `work` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first calls compile kernels and allocate workspaces. A graph cannot capture these
        # operations.
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second, read plus written, at which torch copies a large tensor."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (milliseconds(lambda: target.copy_(source), device) / 1e3)


def decode_rate(case: Case, device: torch.device, limit: float) -> Measured:
    """Measure the bytes/s of a decode step, including the cache write and the reduction."""
    step = LayerStep(case, torch.bfloat16, device)
    spent = milliseconds(step.attend, device)
    return Measured(case.name, spent, step.decode_bytes / (spent / 1e3), limit)


def prefill_rate(case: Case, device: torch.device) -> Measured:
    """Measure the FLOP/s of a prefill step. The limit is the FLOP/s of torch's fused attention."""
    step = LayerStep(case, torch.bfloat16, device)
    spent = milliseconds(step.attend, device)
    limit = _fused_rate(case.spec, [new for _, new in step.shapes], device)
    return Measured(case.name, spent, step.prefill_flops / (spent / 1e3), limit)


def _fused_rate(spec: LayerSpec, lengths: list[int], device: torch.device) -> float:
    """Return the FLOP/s of torch's fused attention for prompts of these lengths.

    Torch computes each sequence alone. Its keys and values are contiguous and are repeated for all
    query heads before the measurement. Cached tokens are left out, because the fused attention
    cannot read tokens from blocks.
    """

    def random_heads(length: int, dim: int) -> Tensor:
        return torch.randn(1, spec.num_heads, length, dim, dtype=torch.bfloat16, device=device)

    dims = (spec.key_dim, spec.key_dim, spec.value_dim)
    inputs = {length: [random_heads(length, dim) for dim in dims] for length in set(lengths)}

    def attend() -> None:
        for length in lengths:
            query, key, value = inputs[length]
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    flops = _flops(spec, [(0, length) for length in lengths])
    return flops / (milliseconds(attend, device) / 1e3)


def measured_tunings(
    kernel: str, step: LayerStep, tunings: list[Tuning]
) -> Iterator[tuple[Tuning, float]]:
    """Yield each entry of `tunings` whose result is correct, and its milliseconds.

    Entries that fail or return a wrong result are skipped.

    Args:
        kernel: "decode" or "prefill".
        step: a step that has tokens of this kind.
        tunings: the tile sizes to try.
    """
    expected = step.attend()
    batch = gpu_attention.gpu_batch(step.batch)
    call = AttentionCall(
        step.spec, step.cache.keys[0], step.cache.values[0], step.scale, step.sinks
    )
    out = torch.empty_like(expected)
    query, _, _ = step.inputs

    def run(tuning: Tuning) -> None:
        if kernel == "decode":
            assert batch.decodes is not None
            gpu_attention.decode(query, call, batch.decodes, out, tuning)
        else:
            assert batch.prefills is not None
            gpu_attention.prefill(query, call, batch.prefills, out, tuning)

    for tuning in tunings:
        out.zero_()
        try:
            run(tuning)
            if torch.allclose(out, expected, atol=TOLERANCE[step.dtype], rtol=1e-2):
                yield tuning, milliseconds(functools.partial(run, tuning), step.device)
        except Exception as error:  # noqa: BLE001
            # Catch every exception, because tile sizes that need too much shared memory make the
            # compiler or the driver fail.
            print(f"{kernel} {tuning}: {type(error).__name__}", flush=True)
