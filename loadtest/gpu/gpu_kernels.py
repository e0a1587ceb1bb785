"""Check, measure and tune the attention kernels alone, for kernel_parts.py.

Every step runs through `gpu_attention.attend`, as in a layer of a model.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from nereid_backend.attention import reference
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
# If a value of the reference is v, the allowed difference is this number times (1 + |v|). The
# reference computes in float32. In float32, the difference comes from the hardware's exponential
# function, and from the softcap, which subtracts two numbers near one.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-5}

# The seconds for which a graph is replayed before it is measured.
_WARM_UP_S = 0.1

Shapes = list[tuple[int, int]]

REAL_SPECS = {
    "32/8 heads of 128": LayerSpec(32, 8, 128, 128),
    "64/8 heads of 64, window 128, sinks": LayerSpec(
        64, 8, 64, 64, LayerWindow(size=128), None, True
    ),
    "64/8 heads of 64, sinks": LayerSpec(64, 8, 64, 64, has_sinks=True),
    "16/8 heads of 256, window 4096, softcap": LayerSpec(
        16, 8, 256, 256, LayerWindow(size=4096), 50.0
    ),
    "16/16 heads, keys 192, values 128": LayerSpec(16, 16, 192, 128),
    "32/32 heads of 80": LayerSpec(32, 32, 80, 80),
    "32/32 heads of 96": LayerSpec(32, 32, 96, 96),
    "40/8 heads of 128, chunks of 8192": LayerSpec(40, 8, 128, 128, LayerWindow(chunk=8192)),
    "71/1 heads of 64": LayerSpec(71, 1, 64, 64),
}
# The numbers of (cached, new) tokens of each sequence in one step. The step contains decodes of all
# lengths, and prompts that are whole, continued or tiny.
REAL_SHAPES: Shapes = [
    *[(9000, 1), (20000, 1), (17, 1), (0, 1)],
    *[(131 * i, 1) for i in range(20)],
    *[(0, 2000), (5000, 300), (0, 17), (12000, 5)],
]
TINY_SPECS = {
    "4/2 heads of 16, window 21, sinks": LayerSpec(4, 2, 16, 16, LayerWindow(size=21), None, True),
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

    @property
    def share(self) -> float:
        """The measured rate, divided by the limit."""
        return self.rate / self.limit


class LayerStep:
    """One layer of one packed step over a KV cache of random numbers."""

    def __init__(
        self,
        spec: LayerSpec,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        kind: type[GpuKVCache] = GpuKVCache,
    ) -> None:
        """Create sequences with these (cached, new) tokens, and assign blocks in random order."""
        self.spec, self.shapes, self.dtype, self.device = spec, shapes, dtype, device
        self.shapes = sorted(shapes, key=lambda shape: shape[1] > 1)
        counts = [-(-(cached + new) // BLOCK) for cached, new in self.shapes]
        self.cache = self._make_cache(kind, sum(counts), dtype)
        self._fill()
        free = iter(torch.randperm(sum(counts)).tolist())
        builder = BatchBuilder(
            max_num_seqs=len(self.shapes),
            max_model_len=max(counts) * BLOCK,
            block_size=BLOCK,
            null_block=self.cache.null_block,
        )
        chunks = []
        for row, ((cached, new), count) in enumerate(zip(self.shapes, counts, strict=True)):
            sequence = Sequence(
                str(row), [1] * (cached + new), SamplingParams(), max_total_tokens=2**40
            )
            sequence.row, sequence.block_table = row, list(itertools.islice(free, count))
            chunks.append(Chunk(sequence, cached, new, True, True, 1))
        num_tokens = sum(new for _, new in self.shapes)
        self.batch = builder.build(StepPlan(chunks, num_tokens), device).attention
        self.inputs = tuple(
            torch.randn(num_tokens, heads, dim, dtype=dtype, device=device).transpose(0, 1)
            for heads, dim in (
                (spec.num_heads, spec.key_dim),
                (spec.num_kv_heads, spec.key_dim),
                (spec.num_kv_heads, spec.value_dim),
            )
        )
        self.sinks = torch.randn(spec.num_heads, device=device) if spec.has_sinks else None
        self.scale = spec.key_dim**-0.5

    def attend(self) -> Tensor:
        """Return the output of the kernels, [num_tokens, num_heads, value_dim]."""
        query, key, value = self.inputs
        return gpu_attention.attend(
            (query, key, value),
            0,
            self.cache,
            self.batch,
            scale=self.scale,
            sinks=self.sinks,
        )

    def expected(self) -> tuple[Tensor, KVCache]:
        """Return the output of the reference in float32, and the cache that it read.

        Call this method before the kernels run. Exception: if the cache has 8 bits, call this
        method after the kernels, because the reference reads the numbers that the kernels wrote.
        """
        cache = self._make_cache(KVCache, self.cache.null_block, torch.float32)
        query, key, value = (tensor.float() for tensor in self.inputs)
        rows = self.batch.store_rows(self.spec.num_kv_heads)
        if isinstance(self.cache, ScaledKVCache):
            key, value = self._restore(self.cache, cache, rows)
        else:
            cache.keys[0].copy_(self.cache.keys[0])
            cache.values[0].copy_(self.cache.values[0])
            cache.store(0, key.transpose(0, 1), value.transpose(0, 1), rows)
        out = reference.attend(
            (query, key, value),
            0,
            cache,
            self.batch,
            scale=self.scale,
            sinks=self.sinks,
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
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in self.shapes if new > 1)
        return 2 * pairs * self.spec.num_heads * (self.spec.key_dim + self.spec.value_dim)

    def _restore(
        self, cache: ScaledKVCache, reference_cache: KVCache, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill the reference's cache from an 8-bit cache. Return the keys and values of this step.

        Raises:
            KernelError: the numbers that the step wrote differ by more than the rounding.
        """
        found = []
        pairs = (
            (reference_cache.keys[0], cache.keys[0], cache.key_scales[0], self.inputs[1]),
            (reference_cache.values[0], cache.values[0], cache.value_scales[0], self.inputs[2]),
        )
        for target, kept, scales, given in pairs:
            for part in _slices(len(kept)):
                target[part] = cache.restored(kept[part], scales[part])
            stored = target.view(-1, target.shape[3])[rows].view(
                given.shape[1], -1, target.shape[3]
            )
            stored, wanted = stored.transpose(0, 1), given.float()
            largest = wanted.abs().amax(-1, keepdim=True)
            if isinstance(cache, Float8KVCache):
                allowed = wanted.abs() * (1.01 / 16) + largest * 2.0**-17
            else:
                # A rounding error is at most half a step of the integers. The remaining 0.01 is a
                # safety margin.
                allowed = largest * (0.51 / 127)
            if not bool(((stored - wanted).abs() <= allowed).all()):
                raise KernelError("the 8-bit cache write differs by more than the rounding")
            found.append(stored)
        return found[0], found[1]

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
                drawn = torch.randn(tensor[part].shape, device=self.device)
                tensor[part], scales[part] = cache.rounded(drawn)

    def _make_cache(self, kind: type[Any], num_blocks: int, dtype: torch.dtype) -> Any:  # noqa: ANN401
        return kind(
            [self.spec], num_blocks=num_blocks, block_size=BLOCK, dtype=dtype, device=self.device
        )


def _slices(count: int) -> list[slice]:
    """Return slices of 4096 blocks, because all blocks in float32 would need too much memory."""
    return [slice(i, min(i + 4096, count)) for i in range(0, count, 4096)]


def check(
    name: str,
    spec: LayerSpec,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    kind: type[GpuKVCache] = GpuKVCache,
) -> float:
    """Return the largest difference between the kernels and the reference in one step.

    Raises:
        KernelError: the difference is larger than rounding explains.
    """
    step = LayerStep(spec, shapes, dtype, device, kind)
    if kind is GpuKVCache:
        expected, cache = step.expected()
        found = step.attend()
        for ours, theirs in ((step.cache.keys, cache.keys), (step.cache.values, cache.values)):
            if not torch.equal(ours[0].float(), theirs[0]):
                raise KernelError(f"{name}, {dtype}: the cache write differs from its reference")
    else:
        found = step.attend()
        expected, _ = step.expected()
    difference = (found.float() - expected).abs()
    allowed = TOLERANCE[dtype] * (1 + expected.abs())
    if not bool((difference <= allowed).all()):
        worst = difference.nan_to_num(float("inf")).max().item()
        raise KernelError(f"{name}, {dtype}: attention differs from its reference by {worst:.3g}")
    return float(difference.max())


def milliseconds(work: Callable[[], object], device: torch.device, repeat: int = 20) -> float:
    """Return the median milliseconds of a call on the device, without the time of launching it.

    On a GPU, the call is captured once as a CUDA graph and replayed, because launching a kernel
    from Python takes 80 to 100 microseconds, longer than a small kernel runs. An idle GPU lowers
    its clock, so replays of at least 100 ms come before the measurement.

    Args:
        work: launches kernels on the current stream. It must not wait for the device.
        device: the device.
        repeat: the number of measured replays.
    """
    if device.type != "cuda":
        work()
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
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


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


def decode_rate(
    name: str,
    spec: LayerSpec,
    shapes: Shapes,
    device: torch.device,
    limit: float,
    kind: type[GpuKVCache] = GpuKVCache,
) -> Measured:
    """Measure the bytes/s of a decode step, including the cache write and the reduction."""
    step = LayerStep(spec, shapes, torch.bfloat16, device, kind)
    spent = milliseconds(step.attend, device)
    return Measured(name, spent, step.decode_bytes / (spent / 1e3), limit)


def prefill_rate(name: str, spec: LayerSpec, shapes: Shapes, device: torch.device) -> Measured:
    """Measure the FLOP/s of a prefill step. The limit is the FLOP/s of torch's fused attention.

    Torch computes each sequence alone. Its keys and values are contiguous and are repeated for all
    query heads before the measurement. Cached tokens are left out, because the fused attention
    cannot read tokens from blocks.
    """
    step = LayerStep(spec, shapes, torch.bfloat16, device)
    spent = milliseconds(step.attend, device)
    new = [n for _, n in step.shapes]

    def inputs(length: int) -> list[Tensor]:
        return [
            torch.randn(1, spec.num_heads, length, dim, dtype=torch.bfloat16, device=device)
            for dim in (spec.key_dim, spec.key_dim, spec.value_dim)
        ]

    made = {length: inputs(length) for length in set(new)}

    def fused() -> None:
        for length in new:
            functional.scaled_dot_product_attention(*made[length], is_causal=True)

    pairs = sum(n * (n + 1) // 2 for n in new)
    flops = 2 * pairs * spec.num_heads * (spec.key_dim + spec.value_dim)
    theirs = flops / (milliseconds(fused, device) / 1e3)
    return Measured(name, spent, step.prefill_flops / (spent / 1e3), theirs)


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
    rows = gpu_attention.gpu_batch(step.batch)
    call = AttentionCall(
        step.spec, step.cache.keys[0], step.cache.values[0], step.scale, step.sinks
    )
    found = torch.empty_like(expected)

    def run(tuning: Tuning) -> None:
        if kernel == "decode" and rows.decodes is not None:
            gpu_attention.decode(step.inputs[0], call, rows.decodes, found, tuning)
        elif kernel == "prefill" and rows.prefills is not None:
            gpu_attention.prefill(step.inputs[0], call, rows.prefills, found, tuning)

    for tuning in tunings:
        found.zero_()
        try:
            run(tuning)
            if torch.allclose(found, expected, atol=TOLERANCE[step.dtype], rtol=1e-2):
                yield tuning, milliseconds(functools.partial(run, tuning), step.device)
        except Exception as error:  # noqa: BLE001
            # Catch every exception, because tile sizes that need too much shared memory make the
            # compiler or the driver fail.
            print(f"{kernel} {tuning}: {type(error).__name__}", flush=True)
