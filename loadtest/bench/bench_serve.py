"""Measure the cost of the Triton server and of the frontend, compared with the engine in process.

    python -m loadtest.bench.bench_serve [--model PATH] [--concurrency 1 8 32] [--rounds 3]

The engine in process, the gRPC endpoint of the ensemble and `/v1/completions` of the frontend get
requests of the same kind: random prompts, greedy sampling and a fixed number of tokens. The three
take turns in each round, so that other work on the machine affects all of them. The ratio is the
median of the rounds' ratios. The figures of the endpoints include the client, which runs on the
same CPUs. The program also measures the time to the first text of each stream, and the CPU time
per response of all processes except the engine's. That CPU time shows what it saves to merge
several tokens into one response. A table then gives the CPU time of each process.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import psutil
import tritonclient.grpc.aio as grpcclient
from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.client.light_client import posted
from loadtest.server.processes import roles
from loadtest.server.served import Served

DEMO = Path(__file__).resolve().parents[2] / "demo" / "chat"

ENDPOINTS = {"grpc": "Triton", "openai": "the frontend"}

Prompts = Sequence[Sequence[int]]
# The ratio, the tokens/s of the engine and of the endpoint, the tokens per response, the seconds
# until the first response, and the CPU seconds per response.
Figures = tuple[float, float, float, float, float, float]


def in_process(engine: Engine, prompts: Prompts, max_tokens: int, concurrency: int) -> float:
    """Return the tokens/s of the engine alone, with at most `concurrency` requests at a time."""
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
    """Send one streaming request to the gRPC endpoint.

    Returns:
        The number of tokens, the number of responses, and the seconds until the first response.
    """
    ids = grpcclient.InferInput("input_ids", [len(prompt)], "INT32")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int32))
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    sampling = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    sampling.set_data_from_numpy(np.array([json.dumps(fields).encode()], dtype=np.object_))

    async def requests():  # noqa: ANN202 - tritonclient does not export the type
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
    """Send one streaming request to `/v1/completions`, and return the same figures as `_ask`."""
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
    endpoint: str, served: Served, prompts: Prompts, max_tokens: int, concurrency: int
) -> tuple[float, float, float]:
    """Send all prompts to one endpoint.

    Args:
        endpoint: the name of the endpoint, a key of ENDPOINTS.
        served: the running server.
        prompts: token ids of the prompts.
        max_tokens: tokens of each answer.
        concurrency: the number of requests at a time.

    Returns:
        Tokens/s, tokens per response, and the median seconds until the first response.
    """
    limit = asyncio.Semaphore(concurrency)
    model = httpx.get(f"{served.openai_url}/models").json()["data"][0]["id"]
    async with grpcclient.InferenceServerClient(served.grpc_url) as client:

        async def one(prompt: Sequence[int]) -> tuple[int, int, float]:
            async with limit:
                if endpoint == "openai":
                    return await _complete(served.openai_port, model, prompt, max_tokens)
                return await _ask(client, prompt, max_tokens)

        started = time.perf_counter()
        rows = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - started
    tokens = sum(row[0] for row in rows)
    responses = sum(row[1] for row in rows)
    return tokens / seconds, tokens / responses, statistics.median(row[2] for row in rows)


def cpu_by_process(served: Served) -> dict[str, float]:
    """Return the CPU seconds that this client and each process of the server have used so far."""
    found = {"client": psutil.Process(), **roles(served)}
    return {role: sum(process.cpu_times()[:2]) for role, process in found.items()}


def process_table(spent: Sequence[Mapping[str, float]], responses: float, requests: int) -> str:
    """Return a Markdown table with the CPU time of each process, and of all except the engine.

    Args:
        spent: the CPU seconds of each process in each round.
        responses: the number of responses in all rounds.
        requests: the number of requests in all rounds.
    """
    totals = {role: sum(round_.get(role, 0.0) for round_ in spent) for role in spent[0]}
    totals["all except the engine"] = sum(totals.values()) - totals.get("engine", 0.0)
    rows = [
        [role, f"{total / responses * 1e6:.0f}", f"{total / requests * 1e6:.0f}"]
        for role, total in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return table(["process", "CPU time of a response, µs", "of a request, µs"], rows)


def line_of(concurrency: int, endpoint: str, rounds: Sequence[Figures]) -> str:
    """Return one line of text with the medians of the rounds."""
    ratio, alone, rate, merged, first, cost = (
        statistics.median(column) for column in zip(*rounds, strict=True)
    )
    return (
        f"concurrency {concurrency:3}: {alone:7.0f} tokens/s in process, "
        f"{rate:7.0f} tokens/s through {ENDPOINTS[endpoint]}, ratio {ratio:.2f} "
        f"(rounds: {', '.join(f'{row[0]:.2f}' for row in rounds)}); "
        f"{merged:.1f} tokens per response; first response after {first * 1000:.0f} ms; "
        f"{cost * 1000:.2f} ms of CPU time per response outside the engine"
    )


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = command_line.parser(__doc__)
    add = flags.add_argument
    names = list(ENDPOINTS)
    add("--model", type=Path, default=DEMO, help="folder of the checkpoint (default: the demo)")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    add("--endpoints", nargs="+", choices=names, default=names, help="endpoints to measure")
    add("--rounds", type=int, default=5, help="number of rounds, of which the median counts")
    add("--prompt-tokens", type=int, default=64, help="tokens of each prompt")
    add("--output-tokens", type=int, default=128, help="tokens of each answer")
    add("--num-threads", type=int, help="threads of the engine, in process and in the server")
    add("--json", type=Path, help="also write the figures to this JSON file")
    return flags


def main() -> None:
    """Measure each concurrency and each endpoint, and print one line for each."""
    args = arguments().parse_args()
    rng = random.Random(0)
    print("The engine is loaded in this process, then the server starts.", flush=True)
    # Without speculative decoding, all runs compute equally many tokens in each step.
    config = EngineConfig(str(args.model), num_threads=args.num_threads, num_speculative_tokens=0)
    engine = Engine(config)
    rows = []
    settings = {"NEREID_NUM_SPECULATIVE_TOKENS": "0"}
    if args.num_threads:
        settings["NEREID_NUM_THREADS"] = str(args.num_threads)
    with Served(args.model, settings) as served:
        for concurrency in args.concurrency:
            rounds: dict[str, list[Figures]] = {endpoint: [] for endpoint in args.endpoints}
            spent: dict[str, list[dict[str, float]]] = {name: [] for name in args.endpoints}
            num_responses = dict.fromkeys(args.endpoints, 0.0)
            for _ in range(args.rounds):

                def prompts(concurrency: int = concurrency) -> Prompts:
                    # Each call creates new prompts, so that the prefix cache does not contain them.
                    return [
                        [rng.randrange(engine.info.vocab_size) for _ in range(args.prompt_tokens)]
                        for _ in range(max(2 * concurrency, 4))
                    ]

                alone = in_process(engine, prompts(), args.output_tokens, concurrency)
                for endpoint in args.endpoints:
                    asked, before = prompts(), cpu_by_process(served)
                    rate, merged, first = asyncio.run(
                        through(endpoint, served, asked, args.output_tokens, concurrency)
                    )
                    responses = len(asked) * args.output_tokens / merged
                    used = {
                        role: seconds - before.get(role, 0.0)
                        for role, seconds in cpu_by_process(served).items()
                    }
                    spent[endpoint].append(used)
                    num_responses[endpoint] += responses
                    cost = (sum(used.values()) - used.get("engine", 0.0)) / responses
                    rounds[endpoint].append((rate / alone, alone, rate, merged, first, cost))
            for endpoint, figures in rounds.items():
                rows.append({"concurrency": concurrency, "endpoint": endpoint, "rounds": figures})
                num_requests = args.rounds * max(2 * concurrency, 4)
                print(line_of(concurrency, endpoint, figures))
                print(process_table(spent[endpoint], num_responses[endpoint], num_requests))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
