# SPDX-License-Identifier: Apache-2.0
"""What the Triton server and the frontend cost: tokens/s against the engine in process.

    python -m loadtest.bench.bench_serve [--model PATH] [--concurrency 1 8 32] [--rounds 3]

All run the same requests (random prompts, greedy, a fixed number of tokens) on the same machine in
turns, round by round, so that noise from elsewhere falls on all; the ratio is the median of the
rounds' ratios. The doors are gRPC on the ensemble, and `/v1/completions` of the frontend, which
goes through the former. Their figures include the client, which runs on the same CPUs. The first
text of each stream is timed too, and so is the CPU time of every process but the engine's, a
response: what merging tokens saves.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import psutil
import tritonclient.grpc.aio as grpcclient
from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.client.light_client import posted
from loadtest.server.served import Served

DEMO = Path(__file__).resolve().parents[2] / "demo" / "chat"

DOORS = {"grpc": "Triton", "openai": "the frontend"}

Prompts = Sequence[Sequence[int]]
# Ratio, tokens/s alone and through a door, tokens a response, seconds to the first one, and CPU
# seconds a response.
Figures = tuple[float, float, float, float, float, float]


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


async def _complete(
    port: int, model: str, prompt: Sequence[int], max_tokens: int
) -> tuple[int, int, float]:
    """The same over the OpenAI API."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, responses, tokens = time.perf_counter(), 0.0, 0, 0
    async with posted(port, "/v1/completions", body) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for event in answer.events():
            if "error" in event:
                raise RuntimeError(event["error"])
            responses += bool(event["choices"])
            first = first or time.perf_counter() - started
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return tokens, responses, first


async def through(
    door: str, served: Served, prompts: Prompts, max_tokens: int, concurrency: int
) -> tuple[float, float, float]:
    """Tokens/s, tokens a response, and median seconds to the first response."""
    limit = asyncio.Semaphore(concurrency)
    model = httpx.get(f"{served.openai_url}/models").json()["data"][0]["id"]
    async with grpcclient.InferenceServerClient(served.grpc_url) as client:

        async def one(prompt: Sequence[int]) -> tuple[int, int, float]:
            async with limit:
                if door == "openai":
                    return await _complete(served.openai_port, model, prompt, max_tokens)
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


def line_of(concurrency: int, door: str, rounds: Sequence[Figures]) -> str:
    """Medians of the rounds, in words."""
    ratio, alone, rate, merged, first, cost = (
        statistics.median(column) for column in zip(*rounds, strict=True)
    )
    return (
        f"concurrency {concurrency:3}: in process {alone:7.0f} tokens/s, "
        f"through {DOORS[door]} {rate:7.0f}, ratio {ratio:.2f} "
        f"(rounds {', '.join(f'{row[0]:.2f}' for row in rounds)}); "
        f"{merged:.1f} tokens a response, first after {first * 1000:.0f} ms; "
        f"{cost * 1000:.2f} ms of CPU a response beside the engine"
    )


def main() -> None:
    """Print the table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", type=Path, default=DEMO)
    flags.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    flags.add_argument("--doors", nargs="+", choices=list(DOORS), default=list(DOORS))
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
            rounds: dict[str, list[Figures]] = {door: [] for door in args.doors}
            for _ in range(args.rounds):

                def prompts(concurrency: int = concurrency) -> Prompts:
                    # Fresh ones each time, which no cache of prefixes knows.
                    return [
                        [rng.randrange(engine.info.vocab_size) for _ in range(args.prompt_tokens)]
                        for _ in range(max(2 * concurrency, 4))
                    ]

                alone = in_process(engine, prompts(), args.output_tokens, concurrency)
                for door in args.doors:
                    before, asked = cpu_beside_engine(served), prompts()
                    rate, merged, first = asyncio.run(
                        through(door, served, asked, args.output_tokens, concurrency)
                    )
                    responses = len(asked) * args.output_tokens / merged
                    cost = (cpu_beside_engine(served) - before) / responses
                    rounds[door].append((rate / alone, alone, rate, merged, first, cost))
            for door, figures in rounds.items():
                rows.append({"concurrency": concurrency, "door": door, "rounds": figures})
                print(line_of(concurrency, door, figures), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
