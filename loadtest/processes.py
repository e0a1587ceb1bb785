# SPDX-License-Identifier: Apache-2.0
"""The processes of a running `nereid serve`: which is which, how large each is, and its gauges."""

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from served import Served

_GAUGE = re.compile(r"^nereid:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_BUSY = ("num_requests", "num_requests_running", "num_requests_waiting", "kv_cache_blocks_used")


@dataclass(frozen=True)
class Size:
    """What a process holds.

    Attributes:
        pid: its id.
        rss_mib: resident memory.
        num_fds: open file descriptors.
    """

    pid: int
    rss_mib: float
    num_fds: int


def roles(served: Served) -> dict[str, psutil.Process]:
    """Role -> process: `supervisor`, `tritonserver`, `frontend`, `engine`, `NAME stub` ..."""
    assert served.process is not None
    root = psutil.Process(served.process.pid)
    found = {"supervisor": root}
    for process in root.children(recursive=True):
        try:
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE or not words:
                continue
        except psutil.NoSuchProcess:
            continue
        role = _role(words)
        number = 2
        while role in found:
            role = f"{_role(words)} {number}"
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
        return kinds.get(module, "worker" if module.endswith("pooling.worker") else "engine")
    return program


def sizes(served: Served) -> dict[str, Size]:
    """Role -> what that process holds now."""
    return dict(_sizes(served))


def _sizes(served: Served) -> Iterator[tuple[str, Size]]:
    for role, process in roles(served).items():
        try:
            rss = process.memory_info().rss / 2**20
            yield role, Size(process.pid, rss, process.num_fds())
        except psutil.NoSuchProcess:
            continue


def gauges(served: Served) -> dict[str, float]:
    """Nereid's own metrics; nothing while the server does not answer."""
    url = f"http://127.0.0.1:{served.metrics_port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
    except OSError:
        return {}
    return {name: float(value) for name, value in _GAUGE.findall(text)}


def what_is_busy(served: Served) -> str | None:
    """Which gauge is not 0, and what it says; None for a server at rest."""
    found = gauges(served)
    if not found:
        return "the metrics can't be read"
    busy = [f"{name} {found[name]:g}" for name in _BUSY if found.get(name)]
    return ", ".join(busy) or None


def shared_memory(served: Served) -> list[str]:
    """Names of the server's shared-memory files."""
    assert served.process is not None
    return [path.name for path in Path("/dev/shm").glob(f"nereid_{served.process.pid}_*")]
