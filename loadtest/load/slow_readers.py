# SPDX-License-Identifier: Apache-2.0
"""Measure what clients that stop reading cost: memory of the server, and time of other clients.

    python -m loadtest.load.slow_readers [--stalled 8]

The real server runs on a scripted engine that generates 200 tokens per second for each stream. Some
clients open streams through the HTTP or the gRPC endpoint of the Triton server and read nothing. At
the same time, four other clients read as fast as possible. The program prints how much the memory
of each server process grew.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.faults.cancel_times import open_grpc
from loadtest.server.processes import gauges, sizes
from loadtest.server.served import ALONE, Served

_MAX_TOKENS = 3000
_STEP_MS = 5.0
_SECONDS = _MAX_TOKENS * _STEP_MS / 1000
_FIELDS = {"prompt": "Go", "max_tokens": _MAX_TOKENS, "ignore_eos": True}
_SCRIPT = [{"when": "", "token_ids": [300], "delay_ms": _STEP_MS, "ends": False}]


def serve(folder: Path) -> Served:
    """Return a server with the scripted engine, not yet started; its script goes to `folder`."""
    path = folder / "script.json"
    path.write_text(json.dumps(_SCRIPT))
    environment = {"NEREID_ENGINE": "scripted", "NEREID_SCRIPT": str(path)}
    return Served(environment=environment, arguments=["--log-level=warning", *ALONE])


class StalledRelay:
    """A relay to a port that forwards all requests, but only the first bytes of the answers.

    The connection to the server then fills up, as with a client that stops reading.
    """

    def __init__(self, port: int, limit: int = 2000) -> None:
        self._port = port
        self._limit = limit
        self._writers: list[asyncio.StreamWriter] = []
        self.server: asyncio.Server | None = None

    async def start(self) -> int:
        """Start the relay and return the port on which it listens."""
        self.server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        port: int = self.server.sockets[0].getsockname()[1]
        return port

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A small buffer makes the relay stop reading early, like a client with full buffers.
        there, back = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        self._writers += [writer, back]
        await asyncio.gather(_pump(reader, back, None), _pump(there, writer, self._limit))

    def tear(self) -> None:
        """Close the relay and abort its connections."""
        if self.server is not None:
            self.server.close()
        for writer in self._writers:
            writer.transport.abort()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while (limit is None or passed < limit) and (data := await reader.read(1024)):
            passed += len(data)
            writer.write(data)
            await writer.drain()


async def _stall_grpc(served: Served) -> StalledRelay:
    relay = StalledRelay(served.grpc_port)
    await open_grpc(f"127.0.0.1:{await relay.start()}", dict(_FIELDS), stream=True)
    return relay


async def _stall_http(served: Served) -> StalledRelay:
    relay = StalledRelay(served.http_port)
    _, writer = await asyncio.open_connection("127.0.0.1", await relay.start())
    await _send_generate(writer)
    return relay


async def _send_generate(writer: asyncio.StreamWriter) -> None:
    fields = {"max_tokens": _MAX_TOKENS, "ignore_eos": True}
    body = {"text_input": "Go", "stream": True, "sampling_parameters": json.dumps(fields)}
    data = json.dumps(body).encode()
    path = "/v2/models/llm/generate_stream"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


async def _read_whole(served: Served) -> float:
    """Read a whole stream as an ordinary client, and return the seconds that it took."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.http_port)
    await _send_generate(writer)
    while data := await reader.read(65536):
        if data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return time.monotonic() - started


def _memory(served: Served) -> dict[str, float]:
    return {role: size.rss_mib for role, size in sizes(served).items()}


async def measure(served: Served, door: str, num_stalled: int) -> dict[str, Any]:
    """Return the cost of stalled clients of one endpoint: memory, and time of other clients."""
    stall = _stall_grpc if door == "gRPC" else _stall_http
    before = _memory(served)
    relays = [await stall(served) for _ in range(num_stalled)]
    seconds = await asyncio.gather(*(_read_whole(served) for _ in range(4)))
    await asyncio.sleep(1.5)
    after, left = _memory(served), gauges(served).get("num_requests", -1)
    grown = {role: round(after[role] - before.get(role, 0), 1) for role in after}
    for relay in relays:
        relay.tear()
    await asyncio.sleep(2.0)
    return {
        "door": door,
        "stalled": num_stalled,
        "others_s": round(max(seconds), 2),
        "requests_left": left,
        "grown_mib": {role: mib for role, mib in grown.items() if abs(mib) >= 0.5},
    }


async def _measure_all(served: Served, num_stalled: int) -> None:
    print(f"A stream takes at least {_SECONDS:g} s.", flush=True)
    for door, count in (("HTTP", 0), ("HTTP", num_stalled), ("gRPC", num_stalled)):
        print(json.dumps(await measure(served, door, count)), flush=True)


def main() -> int:
    """Print one JSON object for each endpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stalled", type=int, default=8, help="number of clients that stop reading"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as served:
        asyncio.run(_measure_all(served, args.stalled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
