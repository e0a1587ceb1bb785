"""Measure the speed of attention on a CPU: native kernels, torch reference and 8-bit KV cache.

    python -m loadtest.bench.bench_attention --batch 1 16 --contexts 545 8192 --threads 1 2
    python -m loadtest.bench.bench_attention --texts 32 128 512 2048

The first command measures decode steps with float32 and bfloat16. The table shows the milliseconds
of one layer, the rate at which the kernel reads keys and values, and the share of the machine's
memory bandwidth that this rate reaches. The bandwidth is measured in the same run. The last two
columns show the time of a layer whose KV cache contains 8-bit integers, and how many times faster
this layer is than the layer whose KV cache has the model's dtype.

The second command measures the attention of several texts in one tensor without padding, as an
embedding model computes it. The table compares the kernel for the best instruction set of this
processor with torch's fused attention, and with the kernel for AVX-512 BF16 if the processor
supports a better instruction set.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set
from nereid_backend.attention.cpu.cpu_texts import TextAttention, attend_texts, native_texts
from nereid_backend.attention.cpu.instruction_sets import supported_instruction_sets
from nereid_backend.attention.int8_cache import CpuInt8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.step_batch import BatchBuilder, StepBatch
from torch.nn import functional

from loadtest.bench.markdown_table import print_table
from loadtest.bench.timing import call_times
from loadtest.command_line import Option, parse_command_line

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 4, 64
LAYER = LayerSpec(NUM_HEADS, NUM_KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM)
BLOCK_SIZE = 16
DTYPES = (torch.float32, torch.bfloat16)
# The total number of tokens of all texts.
NUM_TEXT_TOKENS = 4096
# The kernel for the best instruction set is compared with the kernel for this instruction set.
OTHER_INSTRUCTION_SET = "avx512_bf16"
# The keys and values of all layers together have at least this number of bytes, so that the
# processor's cache cannot contain them. The number is twice the share of the last-level cache that
# two cores of a large processor have.
FAR_BYTES = 2**26

_OPTIONS = {
    "--batch": Option([1, 16], "numbers of sequences"),
    "--contexts": Option([545, 8192], "tokens of each sequence"),
    "--threads": Option([2], "numbers of threads"),
    "--texts": Option([], "measure texts of these lengths instead", value_type=int),
    "--repeat": Option(7, "number of measurements, of which the median counts"),
}


@dataclass(frozen=True)
class DecodeShape:
    """The sizes of a decode step of several sequences, each with `context` tokens."""

    num_seqs: int
    context: int
    dtype: torch.dtype

    @property
    def blocks_per_sequence(self) -> int:
        """The number of KV cache blocks of each sequence."""
        return math.ceil(self.context / BLOCK_SIZE)

    def cache_bytes(self, item_bytes: int) -> int:
        """Return the bytes of one layer's keys and values, if a number has `item_bytes` bytes."""
        return LAYER.bytes_per_token(item_bytes) * self.num_seqs * self.context


def main() -> None:
    """Print the tables that the command line selects, for each number of threads."""
    args = parse_command_line(__doc__, _OPTIONS)
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        if args.texts:
            print_text_table(args)
        else:
            print_decode_table(args)
        print()


def median_seconds(work: Callable[[], object], repeat: int) -> float:
    """Call `work` once without measuring, and then `repeat` times. Return the median seconds."""
    work()
    return statistics.median(call_times(work, repeat))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def print_decode_table(args: argparse.Namespace) -> None:
    """Measure decode steps of all shapes, and print a table."""
    values = torch.ones(2**27)
    bandwidth = values.nbytes / median_seconds(values.sum, args.repeat)
    print(f"{torch.get_num_threads()} threads read memory at {bandwidth / 1e9:.0f} GB/s.")
    print(
        f"The layer has {NUM_HEADS} query heads and {NUM_KV_HEADS} key-value heads of "
        f"dimension {HEAD_DIM}. A block has {BLOCK_SIZE} tokens.\n"
    )
    shapes = itertools.starmap(DecodeShape, itertools.product(args.batch, args.contexts, DTYPES))
    head = ["sequences", "context", "dtype", "kernel ms", "GB/s", "share of bandwidth"]
    head += ["reference ms", "reference / kernel", "int8 ms", "kernel / int8"]
    print_table(head, (decode_row(shape, bandwidth, args.repeat) for shape in shapes))


def decode_row(shape: DecodeShape, bandwidth: float, repeat: int) -> list[str]:
    """Measure a layer with each of three KV caches, and return the row of the table.

    `bandwidth` is the memory bandwidth in bytes/s.
    """
    kernel, int8, reference = (
        layer_seconds(cache_type, shape, repeat)
        for cache_type in (CpuKVCache, CpuInt8KVCache, KVCache)
    )
    read_rate = shape.cache_bytes(shape.dtype.itemsize) / kernel
    return [
        str(shape.num_seqs),
        str(shape.context),
        name_of(shape.dtype),
        f"{kernel * 1e3:.3f}",
        f"{read_rate / 1e9:.0f}",
        f"{read_rate / bandwidth:.0%}",
        f"{reference * 1e3:.2f}",
        f"{reference / kernel:.1f}",
        f"{int8 * 1e3:.3f}",
        f"{kernel / int8:.2f}",
    ]


def layer_seconds(cache_type: type[KVCache], shape: DecodeShape, repeat: int) -> float:
    """Return the median wall time of one layer of a decode step, in seconds.

    The keys and values of all layers of the step together are larger than the processor's cache.
    Each layer must therefore read its keys and values from memory, as in a real model.
    """
    num_layers = math.ceil(FAR_BYTES / shape.cache_bytes(item_bytes=1))
    cache = random_cache(cache_type, shape, num_layers)
    attention = decode_batch(shape, cache.null_block).attention
    query = torch.randn(1, NUM_HEADS, shape.num_seqs, HEAD_DIM).to(shape.dtype)
    key = torch.randn(1, NUM_KV_HEADS, shape.num_seqs, HEAD_DIM).to(shape.dtype)
    module = torch.nn.Module()

    def step() -> None:
        forward = PagedForward(cache, attention)
        for _ in range(num_layers):
            forward(module, query, key, value=key)

    return median_seconds(step, repeat) / num_layers


def random_cache(cache_type: type[KVCache], shape: DecodeShape, num_layers: int) -> KVCache:
    """Return a KV cache with random keys and values."""
    cache = cache_type(
        [LAYER] * num_layers,
        num_blocks=shape.num_seqs * shape.blocks_per_sequence,
        block_size=BLOCK_SIZE,
        dtype=shape.dtype,
        device=torch.device("cpu"),
    )
    for tensor in cache.tensors():
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.normal_()
    return cache


def decode_batch(shape: DecodeShape, null_block: int) -> StepBatch:
    """Return the batch of a step that computes the last token of each sequence."""
    builder = BatchBuilder(
        max_num_seqs=shape.num_seqs,
        max_model_len=shape.context,
        block_size=BLOCK_SIZE,
        null_block=null_block,
    )
    # The blocks of a sequence are at random positions in the KV cache, as after many requests.
    num_blocks = shape.blocks_per_sequence
    blocks = torch.randperm(shape.num_seqs * num_blocks).tolist()
    chunks = []
    for row in range(shape.num_seqs):
        token_ids = [1] * shape.context
        limit = shape.context + 1
        sequence = Sequence(str(row), token_ids, SamplingParams(), max_total_tokens=limit)
        sequence.row = row
        sequence.block_table = blocks[row * num_blocks : (row + 1) * num_blocks]
        chunk = Chunk(
            sequence, shape.context - 1, num_tokens=1, samples=True, is_first=True, num_logits=1
        )
        chunks.append(chunk)
    return builder.build(StepPlan(chunks, num_tokens=shape.num_seqs), torch.device("cpu"))


def print_text_table(args: argparse.Namespace) -> None:
    """Measure the attention of packed texts, and print a table."""
    best = supported_instruction_sets()[0].name
    print(
        f"{torch.get_num_threads()} threads, {NUM_HEADS} heads of dimension {HEAD_DIM}, "
        f"{NUM_TEXT_TOKENS} tokens in all texts, both directions\n"
    )
    head = ["length of a text", "dtype", f"{best} ms", f"{OTHER_INSTRUCTION_SET} ms", "torch ms"]
    head += [f"{OTHER_INSTRUCTION_SET} / {best}", f"torch / {best}"]
    pairs = itertools.product(args.texts, DTYPES)
    print_table(head, (text_row(length, dtype, args.repeat) for length, dtype in pairs))


def text_row(length: int, dtype: torch.dtype, repeat: int) -> list[str]:
    """Measure texts of one length, and return their row of the table."""
    by_kernel, by_torch = text_functions(length, dtype)
    kernel_s = median_seconds(by_kernel, repeat)
    torch_s = median_seconds(by_torch, repeat)
    other_ms = other_ratio = "–"
    if OTHER_INSTRUCTION_SET in [each.name for each in supported_instruction_sets()[1:]]:
        with forced_instruction_set(OTHER_INSTRUCTION_SET):
            other_s = median_seconds(by_kernel, repeat)
        other_ms, other_ratio = f"{other_s * 1e3:.2f}", f"{other_s / kernel_s:.2f}"
    times = [f"{kernel_s * 1e3:.2f}", other_ms, f"{torch_s * 1e3:.2f}"]
    return [str(length), name_of(dtype), *times, other_ratio, f"{torch_s / kernel_s:.2f}"]


def text_functions(
    length: int, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions that compute the attention of random texts of one length.

    The first function calls the kernel, and the second function calls torch's fused attention.
    """
    num_texts = max(1, NUM_TEXT_TOKENS // length)
    # The heads of a token are adjacent in memory, as in the output of a linear layer.
    query, key, value = (
        torch.randn(num_texts * length, NUM_HEADS, HEAD_DIM).to(dtype).transpose(0, 1)
        for _ in range(3)
    )
    options = TextAttention(HEAD_DIM**-0.5, is_causal=False)
    texts = native_texts([length] * num_texts)
    by_kernel = partial(attend_texts, (query, key, value), texts, options)
    # torch requires [texts, heads, length, dim] instead of [heads, tokens, dim].
    batched = (
        tensor.unflatten(1, (num_texts, length)).transpose(0, 1)  # type: ignore[no-untyped-call]
        for tensor in (query, key, value)
    )
    attention = functional.scaled_dot_product_attention
    return by_kernel, partial(attention, *batched, scale=options.scale)  # type: ignore[misc]


if __name__ == "__main__":
    main()
