"""The processes, memory, open files and metrics of a running `nereid serve`."""

import http.client
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.server import gauges as metrics_page
from loadtest.server.served import Served

_NUMBER = re.compile(r"\d{3,}")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Size:
    """The memory and open files of a process.

    Attributes:
        pid: the process id.
        rss_mib: the resident memory in MiB.
        descriptors: the number of open file descriptors of each kind of file.
    """

    pid: int
    rss_mib: float
    descriptors: Mapping[str, int]

    @property
    def num_fds(self) -> int:
        """The number of open file descriptors."""
        return sum(self.descriptors.values())


def roles(served: Served) -> dict[str, psutil.Process]:
    """Return the server's processes by role: `supervisor`, `tritonserver`, `NAME stub` and so on.

    The worker of a pooling model is named after its model, such as `embedding worker`.
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
            if role == "worker":  # the last argument is "worker of the model NAME"
                role = f"{words[-1].split()[-1]} worker"
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
        # The engine starts the process that tests grammars when the first slow grammar arrives.
        kinds = {
            "nereid_client": "frontend",
            "nereid_backend.serving.process.forking.fork_server": "fork server",
            "nereid_backend.grammar.trial_process": "grammar trials",
        }
        return kinds.get(module, "worker" if module.endswith("pooling_worker") else "engine")
    return program


def sizes(served: Served) -> dict[str, Size]:
    """Return the current memory and open files of each process, by role."""
    found = {}
    for role, process in roles(served).items():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            rss = process.memory_info().rss / 2**20
            found[role] = Size(process.pid, rss, _descriptors(served, process))
    return found


def gauges(served: Served) -> dict[str, float]:
    """Return Nereid's metrics by name, or an empty dictionary if the server does not answer."""
    try:
        return metrics_page.read(f"http://127.0.0.1:{served.metrics_port}/metrics")
    except OSError:
        return {}


def num_in_frontend(served: Served) -> int | None:
    """Return the number of requests in the frontend, or None if it does not answer."""
    url = f"http://127.0.0.1:{served.openai_port}/health/ready"
    try:
        with _DIRECT.open(url, timeout=10) as page:
            return int(json.load(page)["num_requests"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None


def what_is_busy(served: Served) -> str | None:
    """Return the values that must be 0 on an idle server but are not; None for an idle server."""
    found = gauges(served)
    busy = [metrics_page.what_is_busy(found) if found else "the metrics page cannot be read"]
    in_frontend = num_in_frontend(served)
    if in_frontend != 0:
        busy.append(f"requests in the frontend: {in_frontend}")
    return ", ".join(filter(None, busy)) or None


def shared_memory(served: Served) -> list[str]:
    """Return the names of the server's shared-memory files."""
    return [path.name for path in _shared_memory(served)]


def shared_memory_mib(served: Served) -> float:
    """Return the memory that the server's shared-memory files use, in MiB."""
    sizes = (path.stat().st_blocks * 512 for path in _shared_memory(served))
    return sum(sizes) / 2**20


def _shared_memory(served: Served) -> list[Path]:
    assert served.process is not None
    return list(Path("/dev/shm").glob(f"nereid_{served.process.pid}_*"))


def zombies(served: Served) -> list[str]:
    """Return the names and ids of the server's zombie processes."""
    assert served.process is not None
    found = []
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(f"{process.name()} {process.pid}")
    return found


def _descriptors(served: Served, process: psutil.Process) -> Counter[str]:
    """Return the number of open file descriptors of each kind of file."""
    endpoints = {
        served.http_port: "HTTP endpoint",
        served.grpc_port: "gRPC endpoint",
        served.metrics_port: "metrics endpoint",
        served.openai_port: "OpenAI API",
    }
    sockets = {one.fd: _socket(one, endpoints) for one in process.net_connections("inet")}
    kinds = Counter[str]()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):  # the file was closed in the meantime
            kind = _NUMBER.sub("N", link.readlink().as_posix())
            kinds[sockets.get(int(link.name), kind)] += 1
    return kinds


def _socket(connection: Any, endpoints: Mapping[int, str]) -> str:  # noqa: ANN401 - psutil's tuple
    if not connection.raddr:
        endpoint = endpoints.get(connection.laddr.port, "another port")
        return f"listening socket of the {endpoint}"
    if connection.laddr.port in endpoints:
        return f"client of the {endpoints[connection.laddr.port]}, {connection.status}"
    endpoint = endpoints.get(connection.raddr.port, "another server")
    return f"connection to the {endpoint}, {connection.status}"
