"""Measure the CPU time that each layer of the frontend needs for one streamed response.

    python -m loadtest.bench.bench_frontend

A gRPC server in another process sends the same response on each stream every few milliseconds. The
layers are measured one after the other. The CPU time of a layer includes the layers below it and
the threads of gRPC.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import grpc
import psutil
import uvloop
from nereid_client.grpc_calls import InputTensor, TritonCalls, infer_request
from nereid_client.language_model.backend import Generation
from nereid_client.language_model.triton_backend import TritonBackend
from nereid_client.streaming.chat_stream import chat_events
from nereid_client.streaming.completion_frame import CompletionFrame
from nereid_client.streaming.deltas import merged
from nereid_client.streaming.reasoning_view import ReasoningView
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.bench.markdown_table import table
from loadtest.client.light_client import posted
from loadtest.command_line import Option, parse_command_line
from loadtest.server.served import free_ports

_DELTA = {"index": 0, "content": " the lake was calm and", "token_ids": [5, 9, 2, 7]}
_CHAT = '{"messages": [{"role": "user", "content": "hi"}]}'
_OPTIONS = {
    "--streams": Option(32, "streams at the same time"),
    "--responses": Option(64, "responses of each stream"),
    "--interval": Option(0.02, "seconds between responses"),
    "--rounds": Option(5, "number of rounds, of which the median counts"),
}

# A function that reads one stream. The argument is the number of the stream.
ReadStream = Callable[[int], Awaitable[None]]


class Layer(NamedTuple):
    """A layer of the frontend, together with the layers below it."""

    name: str
    read: ReadStream
    cpu_s: Callable[[], float]  # returns the CPU seconds that the layer's process has used so far


class Replay(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A gRPC server that sends a fixed number of responses on each stream."""

    def __init__(self, num_responses: int, interval_s: float) -> None:
        """Store the number of responses of a stream, and the seconds between two responses."""
        self._num_responses = num_responses
        self._interval_s = interval_s

    async def ModelReady(self, *_: object) -> Any:  # noqa: ANN401 - a protobuf message
        """Return a response that reports a model as ready."""
        return service_pb2.ModelReadyResponse(ready=True)

    async def ModelInfer(self, *_: object) -> Any:  # noqa: ANN401 - a protobuf message
        """Answer a request for the engine's limits with an empty JSON object."""
        return _response("envelope", b"{}").infer_response

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        """Send the responses of a stream. The last response has a finish reason."""
        delta = _delta_response(_DELTA)
        last = _delta_response({**_DELTA, "finish_reason": "stop"})
        async for _ in requests:
            for _ in range(self._num_responses - 1):
                yield delta
                await asyncio.sleep(self._interval_s)
            yield last


def _delta_response(delta: Mapping[str, object]) -> Any:  # noqa: ANN401 - a protobuf message
    """Return a response with one delta. As in every BYTES tensor, the length precedes the text."""
    content = json.dumps(delta).encode()
    return _response("delta", len(content).to_bytes(4, "little") + content)


def _response(name: str, raw: bytes) -> Any:  # noqa: ANN401 - a protobuf message
    """Return a response of the Triton server with one tensor, whose content is `raw`."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
    response.infer_response.raw_output_contents.append(raw)
    return response


def serve(num_responses: int, interval_s: float, ports: "Queue[int]") -> None:
    """Run the gRPC server, and put its port into `ports`."""

    async def run() -> None:
        server = grpc.aio.server()
        replay = Replay(num_responses, interval_s)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(replay, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ports.put(port)
        await server.wait_for_termination()

    asyncio.run(run())


def _layers_in_process(url: str) -> list[Layer]:
    """Return the layers of the frontend that can be measured without an HTTP server.

    Each layer is a function that sends a request to the gRPC server at the address `url`.
    """
    calls, backend = TritonCalls(url), TritonBackend(url, "llm")
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.aio.insecure_channel(url))
    chat_request = InputTensor("chat_request", "BYTES", [_CHAT.encode()])
    request = infer_request("llm", "a", [chat_request], ["delta"])

    async def requests() -> AsyncIterator[Any]:
        yield request

    async def read_grpc(_: int) -> None:
        async for _response in stub.ModelStreamInfer(requests()):
            pass

    async def read_calls(_: int) -> None:
        stream = calls.stream(request)
        while await stream.read() is not None:
            pass

    async def read_deltas(number: int) -> None:
        async for _delta in backend.generate(Generation(str(number), chat_request=_CHAT)):
            pass

    async def read_events(number: int) -> None:
        deltas = merged(backend.generate(Generation(str(number), chat_request=_CHAT)))
        frame = CompletionFrame("chatcmpl-1", "chat", 0)
        view = ReasoningView(streams_reasoning=True)
        async for _event in chat_events(frame, view, await anext(deltas), deltas):
            pass

    return [
        Layer("gRPC for Python (`grpc.aio`)", read_grpc, time.process_time),
        Layer("+ a task for each stream (`grpc_calls.py`)", read_calls, time.process_time),
        Layer("+ decoded deltas (`triton_backend.py`)", read_deltas, time.process_time),
        Layer("+ encoded events (`streaming/`)", read_events, time.process_time),
    ]


@asynccontextmanager
async def _whole_frontend(url: str) -> AsyncIterator[Layer]:
    """Run the frontend in a process of its own, and yield the whole frontend as a layer."""
    (port,) = free_ports(1)
    options = ["--port", str(port), "--grpc-url", url, "--log-level", "error"]
    frontend = subprocess.Popen([sys.executable, "-m", "nereid_client", *options])
    process = psutil.Process(frontend.pid)
    body = {"stream": True, **json.loads(_CHAT)}

    async def read_http(_: int) -> None:
        async with posted(port, "/v1/chat/completions", body) as answer:
            await answer.text()

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    try:
        await _wait_until_readable(read_http)
        name = "the whole frontend (routes, middleware, uvicorn, sockets)"
        yield Layer(name, read_http, cpu_s)
    finally:
        frontend.terminate()
        frontend.wait()


async def _wait_until_readable(read: ReadStream) -> None:
    """Call `read` until the frontend accepts the connection, for at most 20 seconds."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            await read(0)
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the frontend did not start within 20 seconds")


async def _measure(layer: Layer, num_streams: int) -> float:
    """Read several streams at the same time, and return the CPU seconds of the layer's process."""
    before = layer.cpu_s()
    await asyncio.gather(*(layer.read(number) for number in range(num_streams)))
    return layer.cpu_s() - before


async def _run(args: argparse.Namespace, grpc_port: int) -> None:
    """Measure the layers of the frontend in turn, and print a table.

    Each measurement includes one more layer than the measurement before.
    """
    url = f"127.0.0.1:{grpc_port}"
    num_responses = args.streams * args.responses
    response_us: dict[str, list[float]] = defaultdict(list)
    async with _whole_frontend(url) as frontend:
        layers = [*_layers_in_process(url), frontend]
        for _ in range(args.rounds):
            for layer in layers:
                cpu_s = await _measure(layer, args.streams)
                response_us[layer.name].append(cpu_s / num_responses * 1e6)
    rows = [
        [name, f"{statistics.median(costs):.0f}", f"{min(costs):.0f} to {max(costs):.0f}"]
        for name, costs in response_us.items()
    ]
    print(table(["layer", "CPU time of a response, µs", "range"], rows))


def main() -> None:
    """Start the gRPC server in a new process, and run the measurement."""
    args = parse_command_line(__doc__, _OPTIONS)
    # The process is spawned, because a forked process could not use gRPC.
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    server = spawn.Process(target=serve, args=(args.responses, args.interval, ports))
    server.start()
    try:
        uvloop.run(_run(args, grpc_port=ports.get(timeout=60)))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
