"""The processes, memory, open files and metrics of a running `nereid serve`."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.server import gauges as metrics_page
from loadtest.server.served import Served

_NUMBER = re.compile(r"\d{3,}")
_ROLES = {
    "nereid_client": "frontend",
    "nereid_backend.serving.process.forking.fork_server": "fork server",
    # The engine starts this process when the first slow grammar arrives.
    "nereid_backend.grammar.trials.trial_process": "grammar trials",
}
"""Module that a process runs -> role of the process. The other modules run in the engine."""


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
    """Return the server's processes by role, such as `supervisor`, `tritonserver` or `llm stub`.

    The worker of a pooling model is named after its model, such as `embedding worker`. A second
    process with the role `engine` is named `engine 2`.
    """
    supervisor = _supervisor(served)
    by_role = {"supervisor": supervisor}
    for process in supervisor.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has just ended
            command = process.cmdline()
            if command and process.status() != psutil.STATUS_ZOMBIE:
                by_role[_unused_name(_role(command), by_role)] = process
    return by_role


def _supervisor(served: Served) -> psutil.Process:
    assert served.process is not None
    return psutil.Process(served.process.pid)


def _unused_name(name: str, used: Container[str]) -> str:
    """Return `name`, or a name such as "engine 2" if `name` is already taken."""
    names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    return next(one for one in names if one not in used)


def _role(command: list[str]) -> str:
    """Return the role of a process with this command line.

    Example: `["/opt/triton_python_backend_stub", "/models/llm/1/model.py"]` returns `"llm stub"`.
    """
    program = Path(command[0]).name
    if program == "triton_python_backend_stub":
        model_folder = Path(command[1]).parents[1]
        return f"{model_folder.name} stub"
    if "-m" not in command:
        return program
    module = command[command.index("-m") + 1]
    if module.endswith("pooling_worker"):
        model = command[-1].split()[-1]  # the last argument is "worker of the model NAME"
        return f"{model} worker"
    return _ROLES.get(module, "engine")


def pids(served: Served) -> dict[str, int]:
    """Return the current process id of each role."""
    return {role: process.pid for role, process in roles(served).items()}


def replaced(before: Mapping[str, int], served: Served) -> list[str]:
    """Return the roles whose process has ended or was restarted.

    `before` is an earlier result of `pids`.
    """
    after = pids(served)
    return [role for role, pid in before.items() if after.get(role) != pid]


def sizes(served: Served) -> dict[str, Size]:
    """Return the current memory and open files of each process, by role."""
    by_role = {}
    for role, process in roles(served).items():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # the process has just ended
            rss_mib = process.memory_info().rss / 2**20
            by_role[role] = Size(process.pid, rss_mib, _descriptors(served, process))
    return by_role


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
        return int(json.loads(metrics_page.read_page(url))["num_requests"])
    except (OSError, ValueError, KeyError):
        return None


def what_is_busy(served: Served) -> str | None:
    """Return the values that must be 0 on an idle server but are not; None for an idle server."""
    metrics = gauges(served)
    busy = [metrics_page.what_is_busy(metrics) if metrics else "the metrics page cannot be read"]
    in_frontend = num_in_frontend(served)
    if in_frontend != 0:
        busy.append(f"requests in the frontend: {in_frontend}")
    return ", ".join(filter(None, busy)) or None


def shared_memory(served: Served) -> list[Path]:
    """Return the paths of the server's shared-memory files."""
    assert served.process is not None
    return list(Path("/dev/shm").glob(f"nereid_{served.process.pid}_*"))


def shared_memory_mib(served: Served) -> float:
    """Return the memory that the server's shared-memory files use, in MiB."""
    block_bytes = 512  # the unit of st_blocks
    return sum(path.stat().st_blocks * block_bytes for path in shared_memory(served)) / 2**20


def zombies(served: Served) -> list[str]:
    """Return the names and ids of the server's zombie processes."""
    names = []
    for process in _supervisor(served).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                names.append(f"{process.name()} {process.pid}")
    return names


def _descriptors(served: Served, process: psutil.Process) -> Counter[str]:
    """Return the number of open file descriptors of each kind of file.

    A file is described by its path, in which N replaces long numbers: `/tmp/log-123` is
    `/tmp/log-N`. A socket is described by the endpoint of the server that uses the socket.
    """
    endpoints = {
        served.http_port: "HTTP endpoint",
        served.grpc_port: "gRPC endpoint",
        served.metrics_port: "metrics endpoint",
        served.openai_port: "OpenAI API",
    }
    sockets = {
        connection.fd: _socket(connection, endpoints)
        for connection in process.net_connections("inet")
    }
    kinds = Counter[str]()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):  # the file was closed in the meantime
            path = _NUMBER.sub("N", link.readlink().as_posix())
            kinds[sockets.get(int(link.name), path)] += 1
    return kinds


def _socket(connection: Any, endpoints: Mapping[int, str]) -> str:  # noqa: ANN401 - psutil's tuple
    """Return a description of a socket, such as `client of the OpenAI API, ESTABLISHED`."""
    local_port = connection.laddr.port
    if not connection.raddr:
        return f"listening socket of the {endpoints.get(local_port, 'another port')}"
    if local_port in endpoints:
        return f"client of the {endpoints[local_port]}, {connection.status}"
    remote = endpoints.get(connection.raddr.port, "another server")
    return f"connection to the {remote}, {connection.status}"
