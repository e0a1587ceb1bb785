# SPDX-License-Identifier: Apache-2.0
"""Decode attention on this CPU: the native kernel, the torch reference, and the memory's speed.

    python loadtest/bench_attention.py --batch 16 --contexts 1024 8192

Prints, for float32 and bfloat16, milliseconds a layer and the rate at which keys and values were
read, beside the rate at which this machine reads memory in the same run, and how many times as fast
a cache of 8-bit integers is under a model of that dtype.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from nereid_backend.attention.cpu import CpuKVCache
from nereid_backend.attention.int8_cache import CpuInt8KVCache
from nereid_backend.attention.interface import PagedForward
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.params import SamplingParams
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.execution.batch import BatchBuilder

BLOCK = 16


def seconds(function: Callable[[], object], repeat: int) -> float:
    """Median wall time of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_rate(repeat: int) -> float:
    """Bytes per second at which all threads together read memory: a sum over 512 MiB."""
    data = torch.ones(2**27)
    return data.numel() * 4 / seconds(data.sum, repeat)


def decode_call(
    cache_type: type[KVCache], args: argparse.Namespace, context: int, dtype: torch.dtype
) -> Callable[[], object]:
    """A decode step of one layer over a cache of random keys and values."""
    spec = LayerSpec(args.heads, args.kv_heads, args.dim, args.dim)
    width = -(-context // BLOCK)
    device = torch.device("cpu")
    cache = cache_type(
        [spec], num_blocks=args.batch * width, block_size=BLOCK, dtype=dtype, device=device
    )
    for tensor in cache.tensors():
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.normal_()
    builder = BatchBuilder(
        max_num_seqs=args.batch,
        max_model_len=context,
        block_size=BLOCK,
        null_block=cache.null_block,
    )
    blocks = torch.randperm(args.batch * width).tolist()
    chunks = []
    for row in range(args.batch):
        request = Request(str(row), [1] * context, SamplingParams(), max_total_tokens=context + 1)
        request.row, request.block_table = row, blocks[row * width : (row + 1) * width]
        chunks.append(Chunk(request, context - 1, 1, True, True, 1))
    batch = builder.build(StepPlan(chunks, args.batch), device)
    query = torch.randn(1, args.heads, args.batch, args.dim).to(dtype)
    key = torch.randn(1, args.kv_heads, args.batch, args.dim).to(dtype)
    return lambda: PagedForward([spec], cache, batch.attention)(torch.nn.Module(), query, key, key)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rate = read_rate(args.repeat)
    print(f"{args.threads} threads read memory at {rate / 1e9:.0f} GB/s")
    print(
        f"batch {args.batch}, {args.heads}/{args.kv_heads} heads of {args.dim}, blocks of {BLOCK}\n"
    )
    print(
        "| context | dtype | kernel ms | GB/s | share of memory | reference ms | ratio "
        "| int8 ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for context in args.contexts:
        for dtype in (torch.float32, torch.bfloat16):
            size = 2 * args.batch * context * args.kv_heads * args.dim * dtype.itemsize
            ours = seconds(decode_call(CpuKVCache, args, context, dtype), args.repeat)
            integers = seconds(decode_call(CpuInt8KVCache, args, context, dtype), args.repeat)
            reference = seconds(
                decode_call(KVCache, args, context, dtype), max(3, args.repeat // 3)
            )
            print(
                f"| {context} | {str(dtype).removeprefix('torch.')} | {ours * 1e3:.2f} "
                f"| {size / ours / 1e9:.0f} | {size / ours / rate:.0%} "
                f"| {reference * 1e3:.1f} | {reference / ours:.1f} "
                f"| {integers * 1e3:.2f} | {ours / integers:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
