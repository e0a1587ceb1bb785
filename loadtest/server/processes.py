# SPDX-License-Identifier: Apache-2.0
"""A running `nereid serve` from outside: its processes, what each holds, and its gauges."""

import http.client
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.server.served import Served

_GAUGE = re.compile(r"^nereid:(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_REASON = re.compile(r'finished_reason="(\w+)"')
_NUMBER = re.compile(r"\d{3,}")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BUSY = ("num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")


@dataclass(frozen=True)
class Size:
    """What a process holds.

    Attributes:
        pid: its id.
        rss_mib: resident memory.
        descriptors: kind of file -> how many of it are open.
    """

    pid: int
    rss_mib: float
    descriptors: Mapping[str, int]

    @property
    def num_fds(self) -> int:
        """Open file descriptors."""
        return sum(self.descriptors.values())


def roles(served: Served) -> dict[str, psutil.Process]:
    """Role -> process: `supervisor`, `tritonserver`, `frontend`, `engine`, `NAME stub` ...

    A pooling model's worker has its stub's name: `embedding worker`.
    """
    assert served.process is not None
    root = psutil.Process(served.process.pid)
    found = {"supervisor": root}
    for process in root.children(recursive=True):
        try:
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE or not words:
                continue
            role = _role(words)
            if role == "worker" and (stub := process.parent()) is not None:
                role = _role(stub.cmdline() or words).replace("stub", "worker")
        except psutil.NoSuchProcess:
            continue
        name, number = role, 2
        while role in found:
            role = f"{name} {number}"
            number += 1
        found[role] = process
    return found


def _role(words: list[str]) -> str:
    program = Path(words[0]).name
    if program == "triton_python_backend_stub":
        return f"{Path(words[1]).parent.parent.name} stub"
    if "-m" in words:
        module = words[words.index("-m") + 1]
        kinds = {"nereid_client": "frontend"}
        return kinds.get(module, "worker" if module.endswith("pooling_worker") else "engine")
    return program


def sizes(served: Served) -> dict[str, Size]:
    """Role -> what that process holds now."""
    return dict(_sizes(served))


def _sizes(served: Served) -> Iterator[tuple[str, Size]]:
    for role, process in roles(served).items():
        try:
            rss = process.memory_info().rss / 2**20
            yield role, Size(process.pid, rss, _descriptors(served, process))
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue


def gauges(served: Served) -> dict[str, float]:
    """Nereid's own metrics; nothing while the server does not answer.

    A number that is counted by how an answer ended has that behind its name:
    `request_success_total stop`.
    """
    try:
        with _DIRECT.open(f"http://127.0.0.1:{served.metrics_port}/metrics", timeout=10) as page:
            text = page.read().decode()
    except (OSError, http.client.HTTPException):
        return {}
    found = {}
    for name, labels, value in _GAUGE.findall(text):
        reason = _REASON.search(labels)
        found[f"{name} {reason[1]}" if reason else name] = float(value)
    return found


def num_in_frontend(served: Served) -> int | None:
    """Requests that the frontend has in work; None while it does not answer."""
    url = f"http://127.0.0.1:{served.openai_port}/health/ready"
    try:
        with _DIRECT.open(url, timeout=10) as page:
            return int(json.load(page)["num_requests"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None


def what_is_busy(served: Served) -> str | None:
    """Which gauge is not 0, and what it says; None for a server at rest."""
    found = gauges(served)
    if not found:
        return "the metrics can't be read"
    busy = [f"{name} {found[name]:g}" for name in _BUSY if found.get(name)]
    in_frontend = num_in_frontend(served)
    if in_frontend != 0:
        busy.append(f"requests in the frontend: {in_frontend}")
    return ", ".join(busy) or None


def shared_memory(served: Served) -> list[str]:
    """Names of the server's shared-memory files."""
    return [path.name for path in _shared_memory(served)]


def shared_memory_mib(served: Served) -> float:
    """Memory that these files take."""
    sizes = (path.stat().st_blocks * 512 for path in _shared_memory(served))
    return sum(sizes) / 2**20


def _shared_memory(served: Served) -> list[Path]:
    assert served.process is not None
    return list(Path("/dev/shm").glob(f"nereid_{served.process.pid}_*"))


def zombies(served: Served) -> list[str]:
    """Descendants that have ended and that nobody has waited for."""
    assert served.process is not None
    found = []
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(f"{process.name()} {process.pid}")
    return found


def _descriptors(served: Served, process: psutil.Process) -> Counter[str]:
    """Kind of file -> how many of it the process holds open."""
    doors = {
        served.http_port: "HTTP door",
        served.grpc_port: "gRPC door",
        served.metrics_port: "metrics",
        served.openai_port: "OpenAI API",
    }
    sockets = {one.fd: _socket(one, doors) for one in process.net_connections("inet")}
    kinds = Counter[str]()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            kind = _NUMBER.sub("N", link.readlink().as_posix())
            kinds[sockets.get(int(link.name), kind)] += 1
    return kinds


def _socket(connection: Any, doors: Mapping[int, str]) -> str:  # noqa: ANN401 - psutil's tuple
    if not connection.raddr:
        return f"listens: {doors.get(connection.laddr.port, 'another port')}"
    if connection.laddr.port in doors:
        return f"client of the {doors[connection.laddr.port]}, {connection.status}"
    return f"to the {doors.get(connection.raddr.port, 'outside')}, {connection.status}"
