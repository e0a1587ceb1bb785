"""Measure how much memory and delay clients that stop reading cause.

    python -m loadtest.load.slow_readers [--stalled 8]

The program starts a real server. Its engine is replaced by a script that generates 200 tokens per
second for each stream. Some clients open streams through the HTTP or the gRPC endpoint of the
Triton server and stop reading after the first chunk. At the same time, four other clients read as
fast as possible. The program prints how much the memory of each server process grew.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.client.ask import Ask, generate_stream, grpc_stream
from loadtest.client.traffic import Asker
from loadtest.command_line import Option, parse_command_line
from loadtest.load.scripted_server import scripted_server
from loadtest.server.processes import gauges, sizes
from loadtest.server.served import Served

_MAX_TOKENS = 3000
_STEP_MS = 5.0
_STREAM_S = _MAX_TOKENS * _STEP_MS / 1000
_NUM_READERS = 4
# The server publishes its gauges every 0.1 s.
_GAUGE_DELAY_S = 1.5
_FIELDS = {"max_tokens": _MAX_TOKENS, "ignore_eos": True}
_SCRIPT = [{"when": "", "token_ids": [300], "delay_ms": _STEP_MS, "ends": False}]
ENDPOINTS = {"HTTP": generate_stream("Go", _FIELDS), "gRPC": grpc_stream("Go", _FIELDS)}


def stalled(ask: Ask) -> Ask:
    """Return a request from a client that reads one chunk, waits, and closes the connection."""
    stay_s = _STREAM_S + 3.0  # until the measurement has ended
    return replace(ask, pause_s=stay_s, cancel_after_s=stay_s)


async def measure(served: Served, endpoint: str, num_stalled: int) -> dict[str, Any]:
    """Return the cost of stalled clients of one endpoint: memory, and time of other clients.

    Args:
        served: the server.
        endpoint: a key of ENDPOINTS.
        num_stalled: the number of clients that stop reading.
    """
    asker = Asker(served.openai_url, served.http_url, served.grpc_url)
    stalled_ask = stalled(ENDPOINTS[endpoint])
    memory_before = _memory(served)
    stalled_clients = [asyncio.create_task(asker.ask(stalled_ask)) for _ in range(num_stalled)]
    readers = await asyncio.gather(*(asker.ask(ENDPOINTS["HTTP"]) for _ in range(_NUM_READERS)))
    await asyncio.sleep(_GAUGE_DELAY_S)
    memory_after, requests_left = _memory(served), gauges(served).get("num_requests", -1)
    await asyncio.gather(*stalled_clients)
    await asker.close()
    growth = {role: mib - memory_before.get(role, 0) for role, mib in memory_after.items()}
    return {
        "endpoint": endpoint,
        "stalled": num_stalled,
        "others_s": round(max(one.reply.ended - one.reply.started for one in readers), 2),
        "requests_left": requests_left,
        "grown_mib": {role: round(mib, 1) for role, mib in growth.items() if abs(mib) >= 0.5},
    }


def _memory(served: Served) -> dict[str, float]:
    """Return the resident memory of each server process in MiB."""
    return {role: size.rss_mib for role, size in sizes(served).items()}


async def _measure_all(served: Served, num_stalled: int) -> None:
    """Print the cost of stalled clients as one JSON object for each endpoint."""
    print(f"A stream takes at least {_STREAM_S:g} s.", flush=True)
    for endpoint, count in (("HTTP", 0), ("HTTP", num_stalled), ("gRPC", num_stalled)):
        print(json.dumps(await measure(served, endpoint, count)), flush=True)


def main() -> int:
    """Start a server and measure clients that stop reading."""
    options = {"--stalled": Option(8, "number of clients that stop reading")}
    args = parse_command_line(__doc__, options)
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_server(Path(folder), _SCRIPT) as served,
    ):
        asyncio.run(_measure_all(served, args.stalled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
