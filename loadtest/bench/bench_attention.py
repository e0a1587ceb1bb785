"""Measure attention on this CPU: the native kernels, the torch reference and the int8 cache.

    python -m loadtest.bench.bench_attention --batch 1 16 --contexts 545 8192 --threads 1 2
    python -m loadtest.bench.bench_attention --texts 32 128 512 2048

The first command measures decodes.

For float32 and bfloat16, the table shows the milliseconds of one layer, the rate at which the
kernel reads keys and values, and the share of the machine's memory bandwidth that this rate
reaches. The bandwidth is measured in the same run. The last columns show the time of a cache of
8-bit integers for a model of that dtype, and how many times faster that cache is.

The second command measures the attention of packed texts, as an embedding model computes it. The
table compares the kernel for the best instruction set of this processor with torch's fused
attention, and with the kernel for AVX-512 BF16 if the processor supports a better instruction set.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

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
from nereid_backend.paths.step_batch import BatchBuilder
from torch.nn import functional

from loadtest import command_line

BLOCK = 16
# The number of tokens of all texts together.
NUM_TEXT_TOKENS = 4096
# The instruction set with which the kernel of the best instruction set is compared.
OTHER_INSTRUCTION_SET = "avx512_bf16"
# The keys and values of all layers together have at least this number of bytes, so that the
# processor's cache cannot contain them. The number is twice the part of the last-level cache that
# belongs to two cores of a large processor.
FAR_BYTES = 2**26


def seconds(function: Callable[[], object], repeat: int) -> float:
    """Return the median wall time of a call in seconds, after one call that is not measured."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_rate(repeat: int) -> float:
    """Sum 512 MiB of numbers with all threads, and return the rate of reading in bytes/s."""
    data = torch.ones(2**27)
    return data.numel() * 4 / seconds(data.sum, repeat)


def decode_call(
    cache_type: type[KVCache],
    args: argparse.Namespace,
    num_seqs: int,
    context: int,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], int]:
    """Return a function that runs a decode step over a random cache, and the number of layers.

    There are so many layers that their keys and values exceed the processor's cache. Each layer
    must then read its keys and values from memory, as in a real model.
    """
    spec = LayerSpec(args.heads, args.kv_heads, args.dim, args.dim)
    width = -(-context // BLOCK)
    size = spec.bytes_per_token(1) * num_seqs * context
    num_layers = -(-FAR_BYTES // size)
    device = torch.device("cpu")
    cache = cache_type(
        [spec] * num_layers,
        num_blocks=num_seqs * width,
        block_size=BLOCK,
        dtype=dtype,
        device=device,
    )
    for tensor in cache.tensors():
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.normal_()
    builder = BatchBuilder(
        max_num_seqs=num_seqs,
        max_model_len=context,
        block_size=BLOCK,
        null_block=cache.null_block,
    )
    blocks = torch.randperm(num_seqs * width).tolist()
    chunks = []
    for row in range(num_seqs):
        sequence = Sequence(str(row), [1] * context, SamplingParams(), max_total_tokens=context + 1)
        sequence.row, sequence.block_table = row, blocks[row * width : (row + 1) * width]
        chunks.append(Chunk(sequence, context - 1, 1, True, True, 1))
    batch = builder.build(StepPlan(chunks, num_seqs), device)
    query = torch.randn(1, args.heads, num_seqs, args.dim).to(dtype)
    key = torch.randn(1, args.kv_heads, num_seqs, args.dim).to(dtype)
    module = torch.nn.Module()

    def step() -> None:
        forward = PagedForward(cache, batch.attention)
        for _ in range(num_layers):
            forward(module, query, key, key)

    return step, num_layers


def layer_seconds(
    cache_type: type[KVCache],
    args: argparse.Namespace,
    num_seqs: int,
    context: int,
    dtype: torch.dtype,
) -> float:
    """Return the median wall time of one layer of a decode step, in seconds."""
    step, num_layers = decode_call(cache_type, args, num_seqs, context, dtype)
    return seconds(step, args.repeat) / num_layers


def main() -> None:
    """Measure all combinations of the arguments, and print one table for each number of threads."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 16], help="numbers of sequences")
    add("--contexts", type=int, nargs="+", default=[545, 8192], help="tokens of each sequence")
    add("--heads", type=int, default=12, help="number of query heads")
    add("--kv-heads", type=int, default=4, help="number of key-value heads")
    add("--dim", type=int, default=64, help="head dimension")
    add("--threads", type=int, nargs="+", default=[2], help="numbers of threads")
    add("--texts", type=int, nargs="+", default=[], help="measure texts of these lengths instead")
    add("--repeat", type=int, default=7, help="number of measurements, of which the median counts")
    args = parser.parse_args()
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        if args.texts:
            print_text_table(args)
            continue
        rate = read_rate(args.repeat)
        print(f"{threads} threads read memory at {rate / 1e9:.0f} GB/s.")
        print(
            f"The layer has {args.heads} query heads and {args.kv_heads} key-value heads of "
            f"dimension {args.dim}. A block has {BLOCK} tokens.\n"
        )
        print(
            "| sequences | context | dtype | kernel ms | GB/s | share of bandwidth "
            "| reference ms | reference / kernel | int8 ms | kernel / int8 |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for num_seqs, context in itertools.product(args.batch, args.contexts):
            for dtype in (torch.float32, torch.bfloat16):
                print(row(args, num_seqs, context, dtype, rate), flush=True)
        print()


def row(
    args: argparse.Namespace, num_seqs: int, context: int, dtype: torch.dtype, rate: float
) -> str:
    """Measure one shape, and return its row of the table."""
    shape = (args, num_seqs, context, dtype)
    size = 2 * num_seqs * context * args.kv_heads * args.dim * dtype.itemsize
    ours, integers, reference = (
        layer_seconds(kind, *shape) for kind in (CpuKVCache, CpuInt8KVCache, KVCache)
    )
    return (
        f"| {num_seqs} | {context} | {str(dtype).removeprefix('torch.')} | {ours * 1e3:.3f} "
        f"| {size / ours / 1e9:.0f} | {size / ours / rate:.0%} "
        f"| {reference * 1e3:.2f} | {reference / ours:.1f} "
        f"| {integers * 1e3:.3f} | {ours / integers:.2f} |"
    )


def print_text_table(args: argparse.Namespace) -> None:
    """Measure the attention of packed texts, and print a table."""
    best = supported_instruction_sets()[0].name
    print(
        f"{torch.get_num_threads()} threads, {args.heads} heads of dimension {args.dim}, "
        f"{NUM_TEXT_TOKENS} tokens in all texts, both directions\n"
    )
    print(
        f"| length of a text | dtype | {best} ms | {OTHER_INSTRUCTION_SET} ms | torch ms "
        f"| {OTHER_INSTRUCTION_SET} / {best} | torch / {best} |"
    )
    print("|---|---|---|---|---|---|---|")
    for length in args.texts:
        for dtype in (torch.float32, torch.bfloat16):
            print(text_row(args, length, dtype), flush=True)
    print()


def text_row(args: argparse.Namespace, length: int, dtype: torch.dtype) -> str:
    """Measure texts of one length, and return their row of the table."""
    num_texts = max(1, NUM_TEXT_TOKENS // length)
    lens = [length] * num_texts
    # The heads of a token are neighbours in memory, as after a linear layer.
    packed = [
        torch.randn(sum(lens), args.heads, args.dim).to(dtype).transpose(0, 1) for _ in range(3)
    ]
    query, key, value = packed
    batched = [tensor.unflatten(1, (num_texts, length)).transpose(0, 1) for tensor in packed]
    options = TextAttention(args.dim**-0.5, is_causal=False)
    texts = native_texts(lens)

    def kernel() -> object:
        return attend_texts((query, key, value), texts, options)

    def fused() -> object:
        return functional.scaled_dot_product_attention(*batched, scale=options.scale)

    ours = seconds(kernel, args.repeat)
    by_torch = seconds(fused, args.repeat)
    cells = ["–", f"{by_torch * 1e3:.2f}", "–", f"{by_torch / ours:.2f}"]
    other_names = [each.name for each in supported_instruction_sets()[1:]]
    if OTHER_INSTRUCTION_SET in other_names:
        with forced_instruction_set(OTHER_INSTRUCTION_SET):
            other = seconds(kernel, args.repeat)
        cells[0], cells[2] = f"{other * 1e3:.2f}", f"{other / ours:.2f}"
    name = str(dtype).removeprefix("torch.")
    return f"| {length} | {name} | {ours * 1e3:.2f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
