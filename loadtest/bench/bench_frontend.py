"""Measure the CPU time that each layer of the frontend needs for one streamed response.

    python -m loadtest.bench.bench_frontend

A gRPC server in another process sends the same response to each stream every few milliseconds. The
layers are measured one after the other, each with the layers below it. The CPU time includes the
threads of gRPC.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

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
from loadtest.server.served import free_ports

_DELTA = {"index": 0, "content": " the lake was calm and", "token_ids": [5, 9, 2, 7]}
_CHAT = '{"messages": [{"role": "user", "content": "hi"}]}'
_Stream = Callable[[int], Awaitable[None]]


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
        """Return no limits."""
        return _response("envelope", b"{}").infer_response

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        """Send the responses of a stream. The last one has a finish reason."""
        usual = _response("delta", json.dumps(_DELTA).encode())
        last = _response("delta", json.dumps({**_DELTA, "finish_reason": "stop"}).encode())
        async for _ in requests:
            for _ in range(self._num_responses - 1):
                yield usual
                await asyncio.sleep(self._interval_s)
            yield last


def _response(name: str, content: bytes) -> Any:  # noqa: ANN401 - a protobuf message
    """Return a response of the Triton server with one BYTES tensor of one element."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
    raw = content if name == "envelope" else len(content).to_bytes(4, "little") + content
    response.infer_response.raw_output_contents.append(raw)
    return response


async def serve(num_responses: int, interval_s: float) -> None:
    """Run the gRPC server, and print its port."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        Replay(num_responses, interval_s), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def _layers(url: str) -> dict[str, _Stream]:
    """Return a function for each layer of this process. The function reads one stream."""
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

    return {
        "gRPC for Python (`grpc.aio`)": read_grpc,
        "+ a task for each stream (`grpc_calls.py`)": read_calls,
        "+ decoded deltas (`triton_backend.py`)": read_deltas,
        "+ encoded events (`streaming/`)": read_events,
    }


async def _read_http(port: int) -> None:
    """Read one stream of the frontend."""
    body = {"stream": True, **json.loads(_CHAT)}
    async with posted(port, "/v1/chat/completions", body) as answer:
        await answer.text()


async def _measure(read: _Stream, num_streams: int, cpu_s: Callable[[], float]) -> float:
    """Read several streams at the same time, and return the CPU time in seconds."""
    before = cpu_s()
    await asyncio.gather(*(read(number) for number in range(num_streams)))
    return cpu_s() - before


async def _run(args: argparse.Namespace, grpc_port: int) -> None:
    url = f"127.0.0.1:{grpc_port}"
    (port,) = free_ports(1)
    words = ["--port", str(port), "--grpc-url", url, "--log-level", "error"]
    frontend = subprocess.Popen([sys.executable, "-m", "nereid_client", *words])
    process = psutil.Process(frontend.pid)
    layers: dict[str, tuple[_Stream, Callable[[], float]]] = {
        name: (read, time.process_time) for name, read in _layers(url).items()
    }
    layers["the whole frontend (routes, middleware, uvicorn, sockets)"] = (
        lambda _: _read_http(port),
        lambda: sum(process.cpu_times()[:2]),
    )
    try:
        for _ in range(200):
            try:
                await _read_http(port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        rounds = []
        for _ in range(args.rounds):
            rounds.append(
                {
                    name: await _measure(read, args.streams, cpu_s)
                    for name, (read, cpu_s) in layers.items()
                }
            )
    finally:
        frontend.terminate()
        frontend.wait()
    num_responses = args.streams * args.responses
    rows = []
    for name in layers:
        times = sorted(round_[name] / num_responses * 1e6 for round_ in rounds)
        rows.append([name, f"{times[len(times) // 2]:.0f}", f"{times[0]:.0f} to {times[-1]:.0f}"])
    sys.stdout.write(table(["layer", "CPU time of a response, µs", "range"], rows) + "\n")


def main() -> None:
    """Run the measurement, or the gRPC server for it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between responses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        asyncio.run(serve(args.responses, args.interval))
        return
    words = ["--responses", str(args.responses), "--interval", str(args.interval), "--server"]
    command = [sys.executable, "-m", "loadtest.bench.bench_frontend", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            uvloop.run(_run(args, int(server.stdout.readline())))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
