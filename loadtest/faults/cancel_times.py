# SPDX-License-Identifier: Apache-2.0
"""Measure how soon a cancelled request is gone, for every endpoint and every state of the request.

    python -m loadtest.faults.cancel_times [--repeats 5] [--states queued ...] [--endpoints WORD]

The program serves the demo model with one sequence at a time and a small token budget, so that
requests stay in each state for a while. A measurement ends when the server's metrics show that the
request is gone and its KV cache blocks are free. The metrics are published every 0.1 s, and each
figure includes this delay.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.grpc import InferInput

from loadtest.server.processes import gauges
from loadtest.server.served import Served

Json = dict[str, Any]
# A function that cancels a request. It returns the time at which the request should have ended, or
# None if that is the time of the call.
Close = Callable[[], Awaitable[float | None]]

_SETTINGS = {
    "NEREID_MAX_NUM_SEQS": "1",
    "NEREID_MAX_NUM_BATCHED_TOKENS": "4",
    # The HTTP endpoint of the Triton server notices a closed connection only when it writes.
    "NEREID_KEEPALIVE_MS": "250",
}

_NAME = "demo"
_PREFILL_S = 0.1
_LIMIT_S = 20.0
_TIMEOUT_S = 2.0
_ENDLESS: Json = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
STATES = ("queued", "prefilling", "decoding", "constrained")


def fields_of(state: str) -> Json:
    """Return the prompt and sampling fields of a request that stays in a state for a while."""
    name = f"{random.random()} "
    if state == "prefilling":
        return {"prompt": name + "again and " * 400, **_ENDLESS}
    if state == "constrained":
        return {"prompt": name, **_ENDLESS, "regex": "[a-z ]{2900,3000}"}
    return {"prompt": name + "For ever and", **_ENDLESS}


async def _http(port: int, path: str, body: Json) -> Close:
    """Send an HTTP request; the returned function aborts its connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()

    async def close() -> None:
        writer.transport.abort()

    return close


def _direct(fields: Json, *, stream: bool) -> Json:
    """Return the body or the tensors of a request to the Triton server."""
    sampling = {name: value for name, value in fields.items() if name != "prompt"}
    return {
        "text_input": fields["prompt"],
        "stream": stream,
        "sampling_parameters": json.dumps(sampling),
    }


def _tensor(name: str, value: str | bool) -> InferInput:
    """Return an input tensor of shape [1] that contains `value`."""
    is_flag = isinstance(value, bool)
    tensor = InferInput(name, [1], "BOOL" if is_flag else "BYTES")
    tensor.set_data_from_numpy(np.array([value], np.bool_ if is_flag else np.object_))
    return tensor


async def _open_grpc(url: str, fields: Json, stream: bool) -> tuple[Any, Any, asyncio.Task[None]]:
    """Send a gRPC request; return the client, the call, and the task that reads the responses."""
    inputs = [_tensor(name, value) for name, value in _direct(fields, stream=stream).items()]

    async def requests() -> AsyncIterator[Json]:
        yield {"model_name": "llm", "inputs": inputs}

    client = grpcclient.InferenceServerClient(url)
    call = client.stream_infer(requests())

    async def read() -> None:
        with contextlib.suppress(BaseException):  # the end of a cancelled call does not matter
            async for _ in call:
                pass

    return client, call, asyncio.create_task(read())


async def grpc_cancel(served: Served, fields: Json, stream: bool = True) -> Close:
    """Send a gRPC request that the returned function cancels."""
    client, call, reading = await _open_grpc(served.grpc_url, fields, stream)

    async def close() -> None:
        call.cancel()
        await reading
        await client.close()

    return close


async def grpc_loss(served: Served, fields: Json) -> Close:
    """Open a gRPC stream through a relay; the returned function aborts the relay's connections.

    The server then sees a lost connection instead of a cancelled call.
    """
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", served.grpc_port)
        writers.extend((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client, _, reading = await _open_grpc(f"127.0.0.1:{port}", fields, stream=True)

    async def close() -> None:
        server.close()
        for writer in writers:
            writer.transport.abort()
        reading.cancel()
        asyncio.get_running_loop().call_later(3, lambda: asyncio.ensure_future(client.close()))

    return close


async def http(served: Served, fields: Json, stream: bool) -> Close:
    """Send a request to the HTTP endpoint of the Triton server."""
    path = "/v2/models/llm/generate_stream" if stream else "/v2/models/llm/generate"
    return await _http(served.http_port, path, _direct(fields, stream=stream))


async def openai(served: Served, fields: Json, stream: bool) -> Close:
    """Send a request to the OpenAI API."""
    body = {"model": _NAME, "stream": stream, **fields}
    return await _http(served.openai_port, "/v1/completions", body)


async def openai_timeout(served: Served, fields: Json) -> Close:
    """Send a request to the OpenAI API that the server itself cancels after a timeout."""
    headers = {"X-Request-Timeout": f"{_TIMEOUT_S:g}"}
    url = f"{served.openai_url}/completions"
    sent = time.monotonic()
    client = httpx.AsyncClient(timeout=_LIMIT_S, trust_env=False, headers=headers)
    task = asyncio.create_task(client.post(url, json={"model": _NAME, **fields}))

    async def close() -> float:
        if (response := await task).status_code != 504:
            raise RuntimeError(
                f"expected status 504, got {response.status_code}: {response.text[:200]}"
            )
        await client.aclose()
        return sent + _TIMEOUT_S

    return close


async def responses_cancel(served: Served, fields: Json) -> Close:
    """Create a background response of the Responses API that the returned function cancels."""
    body = {"input" if name == "prompt" else name: value for name, value in fields.items()}
    body["max_output_tokens"] = body.pop("max_tokens")
    client = httpx.AsyncClient(timeout=_LIMIT_S, trust_env=False, base_url=served.openai_url)
    made = await client.post("/responses", json={"model": _NAME, "background": True, **body})

    async def close() -> None:
        await client.post(f"/responses/{made.json()['id']}/cancel")
        await client.aclose()

    return close


ENDPOINTS: dict[str, Callable[[Served, Json], Awaitable[Close]]] = {
    "gRPC stream cancelled": grpc_cancel,
    "gRPC cancelled, no stream": partial(grpc_cancel, stream=False),
    "gRPC connection lost": grpc_loss,
    "HTTP generate_stream": partial(http, stream=True),
    "HTTP generate": partial(http, stream=False),
    "OpenAI stream": partial(openai, stream=True),
    "OpenAI, no stream": partial(openai, stream=False),
    "OpenAI, X-Request-Timeout": openai_timeout,
    "Responses, cancelled": responses_cancel,
}


async def _until(served: Served, holds: Callable[[dict[str, float]], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds(found := await asyncio.to_thread(gauges, served)):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the request or server is not {what} after {_LIMIT_S:g} s; metrics: {found}"
            )
        await asyncio.sleep(0.005)


def _is_in(state: str, num_others: int) -> Callable[[dict[str, float]], bool]:
    def holds(found: dict[str, float]) -> bool:
        running = found.get("num_requests_running", 0)
        waiting = found.get("num_requests_waiting", 0)
        if found.get("num_requests") != num_others + 1:
            return False
        return waiting == 1 if state == "queued" else running == 1

    return holds


async def measure(served: Served, endpoint: str, state: str) -> float:
    """Return the seconds from the cancellation of a request until its blocks are free."""
    blocker = None  # a request that runs, so that the measured one must wait
    if state == "queued":
        blocker = await grpc_cancel(served, fields_of("decoding"))
        await _until(served, _is_in("decoding", 0), "busy")
    num_others = int(blocker is not None)
    close = await ENDPOINTS[endpoint](served, fields_of(state))
    await _until(served, _is_in(state, num_others), state)
    await asyncio.sleep(_PREFILL_S)
    now = time.monotonic()
    gone = await close() or now
    await _until(
        served,
        lambda found: (
            found.get("num_requests") == num_others
            and found.get("num_requests_waiting") == 0
            and found.get("num_requests_running") == num_others
            and (bool(num_others) or found.get("kv_cache_blocks_used") == 0)
        ),
        "free",
    )
    elapsed_s = time.monotonic() - gone
    if blocker is not None:
        await blocker()
        await _until(served, lambda found: found.get("num_requests") == 0, "idle")
    await asyncio.sleep(0.15)  # until the metrics of the idle server are published
    return elapsed_s


async def measure_all(
    served: Served, repeats: int, states: Sequence[str], endpoints: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each repetition, by endpoint and state."""
    found: dict[tuple[str, str], list[float]] = {}
    for state in states:
        for endpoint in endpoints:
            found[endpoint, state] = [
                await measure(served, endpoint, state) for _ in range(repeats)
            ]
            print(_row(endpoint, state, found[endpoint, state]), flush=True)
    return found


def _row(endpoint: str, state: str, seconds: list[float]) -> str:
    median, worst = statistics.median(seconds) * 1000, max(seconds) * 1000
    return f"| {endpoint} | {state} | {median:.0f} | {worst:.0f} |"


def main() -> int:
    """Print a table. Return 1 if a cancellation took longer than a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="number of measurements for each row")
    add("--states", nargs="*", default=STATES, choices=STATES, help="states to measure")
    add("--endpoints", default="", metavar="WORD", help="measure endpoints with WORD in their name")
    args = parser.parse_args()
    endpoints = [endpoint for endpoint in ENDPOINTS if args.endpoints in endpoint]
    with Served(
        environment=_SETTINGS, arguments=["--log-level=warning", f"--served-model-name={_NAME}"]
    ) as served:
        print("| Endpoint | State | median ms | longest ms |\n|---|---|---|---|", flush=True)
        found = asyncio.run(measure_all(served, args.repeats, args.states, endpoints))
    every = [seconds for row in found.values() for seconds in row]
    median, worst = statistics.median(every) * 1000, max(every) * 1000
    print(f"| all | all | {median:.0f} | {worst:.0f} |")
    return int(max(every) > 1.0)


if __name__ == "__main__":
    sys.exit(main())
