# SPDX-License-Identifier: Apache-2.0
"""What a server may still hold when nobody asks anything of it: nothing but what it held before.

Rests are compared like with like. Clients hang up first, because a connection that is kept alive is
a descriptor in the server for as long as its client likes. A process's files are compared with its
own first rest, those of a new process with the first rest of the first process in that role; its
memory with its own second rest, the first one with traffic behind it.
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
_PUBLISHED_S = 0.3  # gauges are published every tenth of a second
_CLOSED_S = 5.0
_MAX_MORE_FDS = 2
_MAX_MORE_MIB = 32.0
_MAX_MORE_SHARED_MIB = 1.0


class Rests:
    """Follows one server from rest to rest.

    Args:
        served: the server.
        asker: the client whose idle connections are given up.

    Attributes:
        first, last: role -> what its process held at its first and at the latest rest.
        took_s: of each rest, how long it took until nothing was in use any more.
        shared_mib: of each rest, the memory that files in /dev/shm take.
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
        """Wait for rest; what is in use all the same, or has grown, in words."""
        broken = await self._wait(when)
        await self._asker.hang_up()
        deadline = time.monotonic() + _CLOSED_S
        while True:
            # The server may need a moment to see that its clients have hung up.
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
                broken.append(f"{when}, not at rest after {_LIMIT_S:g} s: {busy}")
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self.took_s.append(time.monotonic() - started)
        zombies = await asyncio.to_thread(processes.zombies, self._served)
        return broken + [f"{when}: {name} has ended, and nobody waits for it" for name in zombies]

    def _grown(self, when: str) -> list[str]:
        broken = []
        for role, size in self.last.items():
            first, settled = self.first.get(role), self._settled.get(role)
            like = first if _is_same(first, size) else self._beginnings.get(role)
            if like is not None and size.num_fds > like.num_fds + _MAX_MORE_FDS:
                more = _difference(size.descriptors, like.descriptors)
                told = f"{size.num_fds} files open, {like.num_fds} at first; more: {more}"
                broken.append(f"{when}: {role} has {told}")
            if _is_same(settled, size) and size.rss_mib > settled.rss_mib + _MAX_MORE_MIB:
                told = f"{size.rss_mib:.0f} MiB, {settled.rss_mib:.0f} after its first traffic"
                broken.append(f"{when}: {role} holds {told}")
        return broken

    def _shared(self, when: str) -> list[str]:
        files = processes.shared_memory(self._served)
        self._num_shared = self._num_shared or len(files)
        self.shared_mib.append(processes.shared_memory_mib(self._served))
        broken = []
        if len(files) > self._num_shared:
            broken.append(f"{when}: {len(files)} shared-memory files, {self._num_shared} at first")
        more = self.shared_mib[-1] - self.shared_mib[0]
        if more > _MAX_MORE_SHARED_MIB:
            broken.append(f"{when}: files in /dev/shm take {more:.1f} MiB more than at first")
        return broken


def _is_same(known: Size | None, size: Size) -> TypeGuard[Size]:
    """Whether it is known, and of the same process."""
    return known is not None and known.pid == size.pid


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> str:
    more = {kind: count - before.get(kind, 0) for kind, count in now.items()}
    return ", ".join(f"{count} x {kind}" for kind, count in more.items() if count > 0)
