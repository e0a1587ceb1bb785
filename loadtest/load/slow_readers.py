"""Measure what clients that stop reading cost: memory of the server, and time of other clients.

    python -m loadtest.load.slow_readers [--stalled 8]

The real server runs on a scripted engine that generates 200 tokens per second for each stream. Some
clients open streams through the HTTP or the gRPC endpoint of the Triton server and stop reading
after the first chunk. At the same time, four other clients read as fast as possible. The program
prints how much the memory of each server process grew.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest import command_line
from loadtest.client.ask import Ask, generate_stream, grpc_stream
from loadtest.client.traffic import Asker
from loadtest.server.processes import gauges, sizes
from loadtest.server.served import ALONE, Served

_MAX_TOKENS = 3000
_STEP_MS = 5.0
_SECONDS = _MAX_TOKENS * _STEP_MS / 1000
_FIELDS = {"max_tokens": _MAX_TOKENS, "ignore_eos": True}
_SCRIPT = [{"when": "", "token_ids": [300], "delay_ms": _STEP_MS, "ends": False}]
ENDPOINTS = {"HTTP": generate_stream("Go", _FIELDS), "gRPC": grpc_stream("Go", _FIELDS)}


def serve(folder: Path) -> Served:
    """Create a server with the scripted engine, but do not start it. Its script is in `folder`."""
    path = folder / "script.json"
    path.write_text(json.dumps(_SCRIPT))
    environment = {"NEREID_ENGINE": "scripted", "NEREID_SCRIPT": str(path)}
    return Served(environment=environment, arguments=["--log-level=warning", *ALONE])


def stalled(ask: Ask) -> Ask:
    """Return a request from a client that reads one chunk, waits, and closes the connection."""
    stay_s = _SECONDS + 3.0  # until the measurement has ended
    return replace(ask, pause_s=stay_s, cancel_after_s=stay_s)


async def measure(served: Served, name: str, num_stalled: int) -> dict[str, Any]:
    """Return the cost of stalled clients of one endpoint: memory, and time of other clients.

    Args:
        served: the server.
        name: the name of the endpoint, a key of ENDPOINTS.
        num_stalled: the number of clients that stop reading.
    """
    asker = Asker(served.openai_url, served.http_url, served.grpc_url)
    before = _memory(served)
    waiting = [asyncio.create_task(asker.ask(stalled(ENDPOINTS[name]))) for _ in range(num_stalled)]
    others = await asyncio.gather(*(asker.ask(ENDPOINTS["HTTP"]) for _ in range(4)))
    await asyncio.sleep(1.5)  # the gauges are published every 0.1 s
    after, left = _memory(served), gauges(served).get("num_requests", -1)
    await asyncio.gather(*waiting)
    await asker.close()
    grown = {role: round(after[role] - before.get(role, 0), 1) for role in after}
    return {
        "endpoint": name,
        "stalled": num_stalled,
        "others_s": round(max(other.reply.ended - other.reply.started for other in others), 2),
        "requests_left": left,
        "grown_mib": {role: mib for role, mib in grown.items() if abs(mib) >= 0.5},
    }


def _memory(served: Served) -> dict[str, float]:
    return {role: size.rss_mib for role, size in sizes(served).items()}


async def _measure_all(served: Served, num_stalled: int) -> None:
    print(f"A stream takes at least {_SECONDS:g} s.", flush=True)
    for name, count in (("HTTP", 0), ("HTTP", num_stalled), ("gRPC", num_stalled)):
        print(json.dumps(await measure(served, name, count)), flush=True)


def main() -> int:
    """Print one JSON object for each endpoint."""
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--stalled", type=int, default=8, help="number of clients that stop reading"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as served:
        asyncio.run(_measure_all(served, args.stalled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
