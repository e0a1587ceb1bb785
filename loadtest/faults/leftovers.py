"""Check that an idle server has released everything that it used during the traffic.

Before each check, clients close their idle connections, because each open connection is a file
descriptor of the server. The number of open files of a process is compared with the number at the
first idle check. If a process was restarted, its number of open files is compared with the number
of the first process in the same role. The memory of a process is compared with the memory at its
second idle check, which is the first check after traffic.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import TypeGuard

from loadtest.client.traffic import Asker
from loadtest.server import processes
from loadtest.server.processes import Size
from loadtest.server.served import Served

_LIMIT_S = 15.0
_LOOK_EVERY_S = 0.1
_PUBLISHED_S = 0.3  # the server publishes gauges every tenth of a second
_CLOSED_S = 5.0
_MAX_MORE_FDS = 2
_MAX_MORE_MIB = 32.0
_MAX_MORE_SHARED_MIB = 1.0


class Rests:
    """The idle checks of one server.

    Args:
        served: the server.
        asker: the client whose idle connections are closed before each check.

    Attributes:
        first: the size of each process at its first check, by role.
        last: the size of each process at the latest check, by role.
        took_s: for each check, the seconds until the server was idle.
        shared_mib: for each check, the memory of the server's files in /dev/shm, in MiB.
    """

    def __init__(self, served: Served, asker: Asker) -> None:
        self._served = served
        self._asker = asker
        self._beginnings: dict[str, Size] = {}
        self._settled: dict[str, Size] = {}
        self._num_shared = 0
        self.first: dict[str, Size] = {}
        self.last: dict[str, Size] = {}
        self.took_s: list[float] = []
        self.shared_mib: list[float] = []

    async def check(self, when: str) -> list[str]:
        """Wait until the server is idle, and describe what is still in use or has grown."""
        broken = await self._wait(when)
        await self._asker.hang_up()
        deadline = time.monotonic() + _CLOSED_S
        while True:
            # The server may need a moment to notice that its clients have closed connections.
            self.last = await asyncio.to_thread(processes.sizes, self._served)
            grown = self._grown(when)
            if not grown or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        for role, size in self.last.items():
            self._beginnings.setdefault(role, size)
            if not _is_same(self.first.get(role), size):
                self.first[role] = size
            elif not _is_same(self._settled.get(role), size):
                self._settled[role] = size
        return broken + grown + self._shared(when)

    async def _wait(self, when: str) -> list[str]:
        started = time.monotonic()
        await asyncio.sleep(_PUBLISHED_S)
        broken = []
        while busy := await asyncio.to_thread(processes.what_is_busy, self._served):
            if time.monotonic() - started > _LIMIT_S:
                broken.append(f"{when}: the server is not idle after {_LIMIT_S:g} s: {busy}")
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self.took_s.append(time.monotonic() - started)
        zombies = await asyncio.to_thread(processes.zombies, self._served)
        return broken + [f"{when}: {name} is a zombie process" for name in zombies]

    def _grown(self, when: str) -> list[str]:
        broken = []
        for role, size in self.last.items():
            first, settled = self.first.get(role), self._settled.get(role)
            like = first if _is_same(first, size) else self._beginnings.get(role)
            if like is not None and size.num_fds > like.num_fds + _MAX_MORE_FDS:
                more = _difference(size.descriptors, like.descriptors)
                counts = f"{size.num_fds} open files, but had {like.num_fds} at first"
                broken.append(f"{when}: {role} has {counts}; the additional files are: {more}")
            if _is_same(settled, size) and size.rss_mib > settled.rss_mib + _MAX_MORE_MIB:
                sizes = f"{size.rss_mib:.0f} MiB, but used {settled.rss_mib:.0f} MiB"
                broken.append(f"{when}: {role} uses {sizes} after its first traffic")
        return broken

    def _shared(self, when: str) -> list[str]:
        files = processes.shared_memory(self._served)
        self._num_shared = self._num_shared or len(files)
        self.shared_mib.append(processes.shared_memory_mib(self._served))
        broken = []
        if len(files) > self._num_shared:
            counts = f"{len(files)} shared-memory files, but there were {self._num_shared} at first"
            broken.append(f"{when}: there are {counts}")
        more = self.shared_mib[-1] - self.shared_mib[0]
        if more > _MAX_MORE_SHARED_MIB:
            broken.append(f"{when}: files in /dev/shm take {more:.1f} MiB more than at first")
        return broken


def _is_same(known: Size | None, size: Size) -> TypeGuard[Size]:
    """Return whether `known` exists and belongs to the same process as `size`."""
    return known is not None and known.pid == size.pid


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> str:
    more = {kind: count - before.get(kind, 0) for kind, count in now.items()}
    return ", ".join(f"{count} x {kind}" for kind, count in more.items() if count > 0)
