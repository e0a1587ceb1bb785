"""Measure the cost of the Triton server and of the frontend, compared with the engine in process.

    python -m loadtest.bench.bench_serve [--model PATH] [--concurrency 1 8 32] [--rounds 3]

The engine in process, the gRPC endpoint of the ensemble and `/v1/completions` of the frontend get
requests of the same kind: random prompts, greedy sampling and a fixed number of tokens. The three
take turns in each round, so that other work on the machine affects all of them. The ratio is the
median of the rounds' ratios. The figures of the endpoints include the client, which runs on the
same CPUs. The program also measures the time to the first token and the inter-token latency of
each stream, and the CPU time per response of all processes except the engine's. The inter-token
latency is the time from the first to the last response, divided by the number of later tokens. A
second table gives the CPU time of each process.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


class Stream:
    """The times at which one request was sent and at which its responses arrived."""

    def __init__(self) -> None:
        """Begin to measure. The request is sent now."""
        self._sent = time.perf_counter()
        self._first = self._last = 0.0
        self.num_responses = 0
        self.num_tokens = 0

    def record(self, num_tokens: int) -> None:
        """Record a response that has just arrived.

        Args:
            num_tokens: the number of tokens in this and all earlier responses of the request.
        """
        self._last = time.perf_counter()
        if self.num_responses == 0:
            self._first = self._last
        self.num_responses += 1
        self.num_tokens = num_tokens

    @property
    def time_to_first_token(self) -> float:
        """The seconds from the request to the first response."""
        return self._first - self._sent

    @property
    def inter_token_latency(self) -> float:
        """The seconds from the first to the last response, divided by the tokens after the first.

        If the server merges tokens, several tokens arrive in one response.
        """
        return (self._last - self._first) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class Speed:
    """The figures of one endpoint, or of the engine in process, in one round.

    Attributes:
        tokens_per_s: the tokens of all streams, divided by the seconds of the round.
        tokens_per_response: the tokens of all streams, divided by the number of responses.
        time_to_first_token: the median of the streams, in seconds.
        inter_token_latency: the median of the streams, in seconds.
    """

    tokens_per_s: float
    tokens_per_response: float
    time_to_first_token: float
    inter_token_latency: float

    @classmethod
    def of(cls, streams: Sequence[Stream], seconds: float) -> "Speed":
        """Return the figures of all streams of a round that has taken this number of seconds."""
        num_tokens = sum(stream.num_tokens for stream in streams)
        return cls(
            tokens_per_s=num_tokens / seconds,
            tokens_per_response=num_tokens / sum(stream.num_responses for stream in streams),
            time_to_first_token=statistics.median(s.time_to_first_token for s in streams),
            inter_token_latency=statistics.median(s.inter_token_latency for s in streams),
        )


@dataclass(frozen=True)
class Round:
    """The figures of the engine in process and of one endpoint, measured one after the other.

    Attributes:
        in_process: the figures of the engine in process.
        through: the figures of the endpoint.
        cpu_per_response: the CPU seconds of a response in all processes except the engine's.
    """

    in_process: Speed
    through: Speed
    cpu_per_response: float

    @property
    def ratio(self) -> float:
        """The tokens/s through the endpoint, divided by the tokens/s in process."""
        return self.through.tokens_per_s / self.in_process.tokens_per_s


def measure_engine(engine: Engine, prompts: Prompts, max_tokens: int, concurrency: int) -> Speed:
    """Measure the engine in this process, with at most `concurrency` requests at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    waiting = list(enumerate(prompts))
    streams: dict[str, Stream] = {}
    started, num_running = time.perf_counter(), 0
    while waiting or num_running:
        while waiting and num_running < concurrency:
            number, prompt = waiting.pop()
            streams[str(number)] = Stream()
            engine.add_request(str(number), prompt, params)
            num_running += 1
        for update in engine.step():
            stream = streams[update.request_id]
            if update.new_token_ids:
                stream.record(stream.num_tokens + len(update.new_token_ids))
            num_running -= update.finish_reason is not None
    return Speed.of(list(streams.values()), time.perf_counter() - started)


async def _ask(
    client: grpcclient.InferenceServerClient, prompt: Sequence[int], max_tokens: int
) -> Stream:
    """Send one streaming request to the gRPC endpoint."""
    ids = grpcclient.InferInput("input_ids", [len(prompt)], "INT32")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int32))
    stream_input = grpcclient.InferInput("stream", [1], "BOOL")
    stream_input.set_data_from_numpy(np.array([True]))
    sampling = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    sampling.set_data_from_numpy(np.array([json.dumps(fields).encode()], dtype=np.object_))

    async def requests():  # noqa: ANN202 - tritonclient does not export the type
        yield {"model_name": "llm", "inputs": [ids, stream_input, sampling]}

    stream = Stream()
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        stream.record(json.loads(result.as_numpy("delta")[0])["usage"]["completion_tokens"])
    return stream


async def _complete(port: int, model: str, prompt: Sequence[int], max_tokens: int) -> Stream:
    """Send one streaming request to `/v1/completions`."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    stream = Stream()
    async with posted(port, "/v1/completions", body) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for event in answer.events():
            if "error" in event:
                raise RuntimeError(event["error"])
            if event["choices"]:  # The last event has no choices, only the usage.
                stream.record(event["usage"]["completion_tokens"])
    return stream


async def measure_endpoint(
    endpoint: str, served: Served, prompts: Prompts, max_tokens: int, concurrency: int
) -> Speed:
    """Send all prompts to one endpoint.

    Args:
        endpoint: the name of the endpoint, a key of ENDPOINTS.
        served: the running server.
        prompts: token ids of the prompts.
        max_tokens: tokens of each answer.
        concurrency: the number of requests at a time.
    """
    limit = asyncio.Semaphore(concurrency)
    model = httpx.get(f"{served.openai_url}/models").json()["data"][0]["id"]
    async with grpcclient.InferenceServerClient(served.grpc_url) as client:

        async def one(prompt: Sequence[int]) -> Stream:
            async with limit:
                if endpoint == "openai":
                    return await _complete(served.openai_port, model, prompt, max_tokens)
                return await _ask(client, prompt, max_tokens)

        started = time.perf_counter()
        streams = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return Speed.of(streams, time.perf_counter() - started)


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


def speed_table(concurrency: int, rounds_by_endpoint: Mapping[str, Sequence[Round]]) -> str:
    """Return a Markdown table with the medians of the rounds, for one number of streams."""

    def row(name: str, speeds: Sequence[Speed], ratio: str, cpu_per_response: str) -> list[str]:
        return [
            name,
            f"{statistics.median(speed.tokens_per_s for speed in speeds):,.0f}",
            ratio,
            f"{1000 * statistics.median(speed.time_to_first_token for speed in speeds):.0f} ms",
            f"{1000 * statistics.median(speed.inter_token_latency for speed in speeds):.1f} ms",
            f"{statistics.median(speed.tokens_per_response for speed in speeds):.1f}",
            cpu_per_response,
        ]

    alone = [round_.in_process for rounds in rounds_by_endpoint.values() for round_ in rounds]
    rows = [row("in process", alone, "", "")]
    for endpoint, rounds in rounds_by_endpoint.items():
        ratios = [round_.ratio for round_ in rounds]
        all_ratios = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cpu_ms = 1000 * statistics.median(round_.cpu_per_response for round_ in rounds)
        speeds = [round_.through for round_ in rounds]
        ratio = f"{statistics.median(ratios):.2f} ({all_ratios})"
        rows.append(row(ENDPOINTS[endpoint], speeds, ratio, f"{cpu_ms:.2f} ms"))
    header = [
        f"{concurrency} streams" if concurrency > 1 else "1 stream",
        *("tokens/s", "ratio (rounds)", "time to first token", "inter-token latency"),
        *("tokens in a response", "CPU time of a response"),
    ]
    return table(header, rows)


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
    """Measure each concurrency and each endpoint, and print tables for each concurrency."""
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
            num_requests = max(2 * concurrency, 4)
            rounds: dict[str, list[Round]] = {endpoint: [] for endpoint in args.endpoints}
            spent: dict[str, list[dict[str, float]]] = {name: [] for name in args.endpoints}
            num_responses = dict.fromkeys(args.endpoints, 0.0)
            for _ in range(args.rounds):

                def prompts(num_requests: int = num_requests) -> Prompts:
                    # Each call creates new prompts, so that the prefix cache does not contain them.
                    return [
                        [rng.randrange(engine.info.vocab_size) for _ in range(args.prompt_tokens)]
                        for _ in range(num_requests)
                    ]

                alone = measure_engine(engine, prompts(), args.output_tokens, concurrency)
                for endpoint in args.endpoints:
                    asked, before = prompts(), cpu_by_process(served)
                    speed = asyncio.run(
                        measure_endpoint(endpoint, served, asked, args.output_tokens, concurrency)
                    )
                    responses = num_requests * args.output_tokens / speed.tokens_per_response
                    used = {
                        role: seconds - before.get(role, 0.0)
                        for role, seconds in cpu_by_process(served).items()
                    }
                    spent[endpoint].append(used)
                    num_responses[endpoint] += responses
                    cost = (sum(used.values()) - used.get("engine", 0.0)) / responses
                    rounds[endpoint].append(Round(alone, speed, cost))
            print(speed_table(concurrency, rounds), flush=True)
            for endpoint, measured in rounds.items():
                figures = [asdict(round_) for round_ in measured]
                rows.append({"concurrency": concurrency, "endpoint": endpoint, "rounds": figures})
                print(f"\nCPU time by process, through {ENDPOINTS[endpoint]}:\n")
                num_asked = args.rounds * num_requests
                print(process_table(spent[endpoint], num_responses[endpoint], num_asked))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
