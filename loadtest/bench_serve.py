# SPDX-License-Identifier: Apache-2.0
"""What the Triton server costs: tokens/s over gRPC on the ensemble against the engine in process.

    python loadtest/bench_serve.py [--model PATH] [--concurrency 1 8 32] [--rounds 3]

Both run the same requests (random prompts, greedy, a fixed number of tokens) on the same machine in
turns, round by round, so that noise from elsewhere falls on both; the ratio is the median of the
rounds' ratios. The gRPC figure includes the client, which runs on the same CPUs. The first text of
each stream is timed too, and so is the CPU time of every process but the engine's, a response: what
merging tokens saves.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc.aio as grpcclient
from nereid_backend import Engine, EngineConfig, SamplingParams
from served import Served

DEMO = Path(__file__).resolve().parent.parent / "demo" / "chat"

Prompts = Sequence[Sequence[int]]


def in_process(engine: Engine, prompts: Prompts, max_tokens: int, concurrency: int) -> float:
    """Tokens/s of the engine alone, with at most `concurrency` requests in work."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    waiting = list(enumerate(prompts))
    started, running, tokens = time.perf_counter(), 0, 0
    while waiting or running:
        while waiting and running < concurrency:
            number, prompt = waiting.pop()
            engine.add_request(str(number), prompt, params)
            running += 1
        for update in engine.step():
            tokens += len(update.new_token_ids)
            running -= update.finish_reason is not None
    return tokens / (time.perf_counter() - started)


async def _ask(
    client: grpcclient.InferenceServerClient, prompt: Sequence[int], max_tokens: int
) -> tuple[int, int, float]:
    """One streaming request: tokens, responses, seconds to the first response."""
    ids = grpcclient.InferInput("input_ids", [len(prompt)], "INT32")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int32))
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    sampling = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    sampling.set_data_from_numpy(np.array([json.dumps(fields).encode()], dtype=np.object_))

    async def requests():  # noqa: ANN202 - the client's own shape
        yield {"model_name": "llm", "inputs": [ids, stream, sampling]}

    started, first, responses, tokens = time.perf_counter(), 0.0, 0, 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        responses += 1
        first = first or time.perf_counter() - started
        tokens = json.loads(result.as_numpy("delta")[0])["usage"]["completion_tokens"]
    return tokens, responses, first


async def through_triton(
    url: str, prompts: Prompts, max_tokens: int, concurrency: int
) -> tuple[float, float, float]:
    """Tokens/s, tokens a response, and median seconds to the first response, over gRPC."""
    limit = asyncio.Semaphore(concurrency)
    async with grpcclient.InferenceServerClient(url) as client:

        async def one(prompt: Sequence[int]) -> tuple[int, int, float]:
            async with limit:
                return await _ask(client, prompt, max_tokens)

        started = time.perf_counter()
        rows = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - started
    tokens = sum(row[0] for row in rows)
    responses = sum(row[1] for row in rows)
    return tokens / seconds, tokens / responses, statistics.median(row[2] for row in rows)


def cpu_beside_engine(served: Served) -> float:
    """Seconds of CPU used so far by server, stubs, frontend and this client, not the engine."""
    assert served.process is not None
    children = psutil.Process(served.process.pid).children(recursive=True)
    beside = [p for p in children if not any("engine_process" in word for word in p.cmdline())]
    return sum(sum(p.cpu_times()[:2]) for p in [psutil.Process(), *beside])


def main() -> None:
    """Print the table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", type=Path, default=DEMO)
    flags.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--prompt-tokens", type=int, default=64)
    flags.add_argument("--output-tokens", type=int, default=128)
    flags.add_argument("--num-threads", type=int, help="of the engine, in both ways")
    flags.add_argument("--json", type=Path, help="also write the figures there")
    args = flags.parse_args()
    rng = random.Random(0)
    print("loading the engine in process, then the server", flush=True)
    engine = Engine(EngineConfig(model=str(args.model), num_threads=args.num_threads))
    rows = []
    threads = {"NEREID_NUM_THREADS": str(args.num_threads)} if args.num_threads else {}
    with Served(args.model, threads) as served:
        for concurrency in args.concurrency:
            rounds = []
            for _ in range(args.rounds):
                prompts = [
                    [rng.randrange(engine.info.vocab_size) for _ in range(args.prompt_tokens)]
                    for _ in range(max(2 * concurrency, 4))
                ]
                work = (prompts, args.output_tokens, concurrency)
                alone = in_process(engine, *work)
                before = cpu_beside_engine(served)
                served_rate, merged, first = asyncio.run(through_triton(served.grpc_url, *work))
                responses = len(prompts) * args.output_tokens / merged
                cost = (cpu_beside_engine(served) - before) / responses
                rounds.append((served_rate / alone, alone, served_rate, merged, first, cost))
            middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
            rows.append({"concurrency": concurrency, "rounds": rounds, "median": middle})
            ratio, alone, served_rate, merged, first, cost = middle
            print(
                f"concurrency {concurrency:3}: in process {alone:7.0f} tokens/s, "
                f"through Triton {served_rate:7.0f}, ratio {ratio:.2f} "
                f"(rounds {', '.join(f'{row[0]:.2f}' for row in rounds)}); "
                f"{merged:.1f} tokens a response, first after {first * 1000:.0f} ms; "
                f"{cost * 1000:.2f} ms of CPU a response beside the engine",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
