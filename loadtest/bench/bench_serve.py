"""Measure the cost of the Triton server and of the frontend, compared with the engine alone.

    python -m loadtest.bench.bench_serve [--model PATH] [--concurrency 1 8 32] [--rounds 3]

An engine in this process, the gRPC endpoint of the ensemble and `/v1/completions` of the frontend
get requests of the same kind: random prompts, greedy sampling and a fixed number of tokens. In each
round, the engine and the endpoints are measured one after the other, so that other work on the
machine affects all of them. The column "ratio" shows the tokens/s of an endpoint divided by the
tokens/s of the engine: the median of the rounds, and the ratio of each round. The client slows down
the endpoints, because it runs on the same CPUs.

The program also measures the time to the first token and the inter-token latency of each stream,
and the CPU time per response of all processes except the engine's. The inter-token latency is the
time from the first to the last response, divided by the number of tokens after the first token. A
second table gives the CPU time of each process.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tritonclient.grpc.aio as grpcclient
from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.bench.markdown_table import table
from loadtest.bench.random_prompts import random_prompt
from loadtest.bench.streams import Speed, Stream, read_stream, run_streams
from loadtest.command_line import Option, parse_command_line
from loadtest.server.processes import roles
from loadtest.server.served import Served

DEMO = Path(__file__).resolve().parents[2] / "demo" / "chat"

ENDPOINTS = {"grpc": "Triton", "openai": "the frontend"}

Prompts = Sequence[list[int]]

_OPTIONS = {
    "--model": Option(DEMO, "folder of the checkpoint (default: the demo)"),
    "--concurrency": Option([1, 8, 32], "requests at a time"),
    "--endpoints": Option(list(ENDPOINTS), "endpoints to measure", list(ENDPOINTS)),
    "--rounds": Option(5, "number of rounds, of which the median counts"),
    "--prompt-tokens": Option(64, "tokens of each prompt"),
    "--output-tokens": Option(128, "tokens of each answer"),
    "--num-threads": Option(None, "threads of each engine", value_type=int),
}


@dataclass(frozen=True)
class Round:
    """The speeds of the engine and of one endpoint, which are measured one after the other."""

    in_process: Speed  # the speed of the engine in this process
    through: Speed  # the speed of the endpoint
    cpu_s: Mapping[str, float]  # the CPU seconds of each process while the endpoint was measured

    @property
    def ratio(self) -> float:
        """The tokens/s of the endpoint, divided by the tokens/s of the engine in this process."""
        return self.through.tokens_per_s / self.in_process.tokens_per_s

    @property
    def cpu_per_response(self) -> float:
        """The CPU seconds per response, summed over all processes except the engine's."""
        return cpu_without_engine(self.cpu_s) / self.through.num_responses


def cpu_without_engine(cpu_s: Mapping[str, float]) -> float:
    """Return the sum of the CPU seconds of all processes except the engine's."""
    return sum(seconds for role, seconds in cpu_s.items() if role != "engine")


def measure_engine(engine: Engine, prompts: Prompts, max_tokens: int, concurrency: int) -> Speed:
    """Measure the engine in this process, with at most `concurrency` requests at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    waiting = {str(number): prompt for number, prompt in enumerate(prompts)}
    streams: dict[str, Stream] = {}
    running: set[str] = set()
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            name, prompt = waiting.popitem()
            streams[name] = Stream()
            engine.add_request(name, prompt, params)
            running.add(name)
        for update in engine.step():
            stream = streams[update.request_id]
            if update.new_token_ids:
                stream.record(stream.num_tokens + len(update.new_token_ids))
            if update.finish_reason is not None:
                running.remove(update.request_id)
    return Speed.of(list(streams.values()), time.perf_counter() - started)


async def _ask(
    client: grpcclient.InferenceServerClient, prompt: Sequence[int], max_tokens: int
) -> Stream:
    """Send one streaming request to the gRPC endpoint, and read all responses."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    inputs = [
        _tensor("input_ids", "INT32", np.array(prompt, np.int32)),
        _tensor("stream", "BOOL", np.array([True])),
        _tensor("sampling_parameters", "BYTES", np.array([json.dumps(sampling).encode()], object)),
    ]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "llm", "inputs": inputs}

    stream = Stream()
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        stream.record(json.loads(result.as_numpy("delta")[0])["usage"]["completion_tokens"])
    return stream


def _tensor(name: str, datatype: str, values: "np.ndarray[Any, Any]") -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, values.shape, datatype)
    tensor.set_data_from_numpy(values)
    return tensor


async def measure_endpoint(
    endpoint: str, served: Served, prompts: Prompts, max_tokens: int, concurrency: int
) -> Speed:
    """Send all prompts to an endpoint, at most `concurrency` at a time, and return the speed.

    `endpoint` is a key of ENDPOINTS. Each answer has `max_tokens` tokens.
    """
    if endpoint == "grpc":
        async with grpcclient.InferenceServerClient(served.grpc_url) as client:
            asks = [partial(_ask, client, prompt, max_tokens) for prompt in prompts]
            return await run_streams(asks, concurrency)
    model = httpx.get(f"{served.openai_url}/models").json()["data"][0]["id"]
    bodies = [{"model": model, "prompt": prompt, "max_tokens": max_tokens} for prompt in prompts]
    reads = [partial(read_stream, served.openai_port, "/v1/completions", body) for body in bodies]
    return await run_streams(reads, concurrency)


def cpu_by_process(served: Served) -> dict[str, float]:
    """Return the CPU seconds that this client and each process of the server have used so far."""
    times = {
        role: process.cpu_times()
        for role, process in {"client": psutil.Process(), **roles(served)}.items()
    }
    return {role: each.user + each.system for role, each in times.items()}


def measure_rounds(
    engine: Engine,
    served: Served,
    concurrency: int,
    rng: random.Random,
    args: argparse.Namespace,
) -> dict[str, list[Round]]:
    """Measure all rounds with `concurrency` streams at a time. Return each endpoint's rounds."""

    def new_prompts() -> Prompts:
        # Each measurement needs new prompts, because the prefix cache contains the earlier prompts.
        vocab_size = engine.info.vocab_size
        count = num_requests(concurrency)
        return [random_prompt(rng, vocab_size, args.prompt_tokens) for _ in range(count)]

    rounds: dict[str, list[Round]] = {endpoint: [] for endpoint in args.endpoints}
    for _ in range(args.rounds):
        in_process = measure_engine(engine, new_prompts(), args.output_tokens, concurrency)
        for endpoint, rounds_of_endpoint in rounds.items():
            prompts, before = new_prompts(), cpu_by_process(served)
            through = asyncio.run(
                measure_endpoint(endpoint, served, prompts, args.output_tokens, concurrency)
            )
            after = cpu_by_process(served)
            used = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
            rounds_of_endpoint.append(Round(in_process, through, used))
    return rounds


def num_requests(concurrency: int) -> int:
    """Return the number of requests that an endpoint gets in one round."""
    return max(2 * concurrency, 4)


_SPEED_COLUMNS = (
    "tokens/s", "ratio (rounds)", "time to first token", "inter-token latency",
    "tokens in a response", "CPU time of a response",
)  # fmt: skip


def speed_table(concurrency: int, rounds_by_endpoint: Mapping[str, Sequence[Round]]) -> str:
    """Return a Markdown table with the medians of the rounds, for one number of streams."""
    in_process = [each.in_process for rounds in rounds_by_endpoint.values() for each in rounds]
    rows = [["in process", *speed_cells(in_process, ratio="", cpu_time="")]]
    for endpoint, rounds in rounds_by_endpoint.items():
        ratios = [each.ratio for each in rounds]
        all_ratios = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cpu_ms = 1000 * statistics.median(each.cpu_per_response for each in rounds)
        cells = speed_cells(
            [each.through for each in rounds],
            ratio=f"{statistics.median(ratios):.2f} ({all_ratios})",
            cpu_time=f"{cpu_ms:.2f} ms",
        )
        rows.append([ENDPOINTS[endpoint], *cells])
    num_streams = f"{concurrency} streams" if concurrency > 1 else "1 stream"
    return table([num_streams, *_SPEED_COLUMNS], rows)


def speed_cells(speeds: Sequence[Speed], ratio: str, cpu_time: str) -> list[str]:
    """Return the cells of `_SPEED_COLUMNS` with the medians of `speeds`.

    `ratio` and `cpu_time` are the texts of the cells in the columns of the same names.
    """
    tokens_per_s = statistics.median(speed.tokens_per_s for speed in speeds)
    first_token_ms = 1000 * statistics.median(speed.time_to_first_token for speed in speeds)
    latency_ms = 1000 * statistics.median(speed.inter_token_latency for speed in speeds)
    tokens_per_response = statistics.median(speed.tokens_per_response for speed in speeds)
    return [
        f"{tokens_per_s:,.0f}",
        ratio,
        f"{first_token_ms:.0f} ms",
        f"{latency_ms:.1f} ms",
        f"{tokens_per_response:.1f}",
        cpu_time,
    ]


def process_table(rounds: Sequence[Round], concurrency: int) -> str:
    """Return a Markdown table with the CPU time of each process, and the sum without the engine."""
    cpu_s: dict[str, float] = defaultdict(float)
    for each in rounds:
        for role, seconds in each.cpu_s.items():
            cpu_s[role] += seconds
    cpu_s["all except the engine"] = cpu_without_engine(cpu_s)
    responses = sum(each.through.num_responses for each in rounds)
    requests = len(rounds) * num_requests(concurrency)
    rows = [
        [role, f"{seconds / responses * 1e6:.0f}", f"{seconds / requests * 1e6:.0f}"]
        for role, seconds in sorted(cpu_s.items(), key=itemgetter(1), reverse=True)
    ]
    return table(["process", "CPU time of a response, µs", "of a request, µs"], rows)


def main() -> None:
    """Measure each concurrency and each endpoint, and print tables for each concurrency."""
    args = parse_command_line(__doc__, _OPTIONS)
    rng = random.Random(0)
    print("The engine is loaded in this process, then the server starts.", flush=True)
    # Without speculative decoding, all runs generate the same number of tokens in each step.
    config = EngineConfig(str(args.model), num_threads=args.num_threads, num_speculative_tokens=0)
    engine = Engine(config)
    settings = {"NEREID_NUM_SPECULATIVE_TOKENS": "0"}
    if args.num_threads:
        settings["NEREID_NUM_THREADS"] = str(args.num_threads)
    with Served(args.model, settings) as served:
        for concurrency in args.concurrency:
            rounds_by_endpoint = measure_rounds(engine, served, concurrency, rng, args)
            print(speed_table(concurrency, rounds_by_endpoint), flush=True)
            for endpoint, rounds in rounds_by_endpoint.items():
                print(f"\nCPU time by process, through {ENDPOINTS[endpoint]}:\n")
                print(process_table(rounds, concurrency))


if __name__ == "__main__":
    main()
