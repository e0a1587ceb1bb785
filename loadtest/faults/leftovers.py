"""Check that an idle server has released everything that it used during the traffic.

Before each check, clients close their idle connections, because each open connection is a file
descriptor of the server. The number of open files of a process is compared with the number at the
first idle check. If a process was restarted, its number of open files is compared with the number
of the first process in the same role. The memory of a process is compared with the memory at its
second idle check, which is the first check after traffic.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from loadtest.client.traffic import Asker
from loadtest.server import processes
from loadtest.server.processes import Size
from loadtest.server.served import Served

_IDLE_LIMIT_S = 15.0
_CLOSED_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.1
_PUBLISHED_S = 0.3  # the server publishes gauges every tenth of a second
_MAX_MORE_FDS = 2
_MAX_MORE_MIB = 32.0
_MAX_MORE_SHARED_MIB = 1.0


class IdleChecks:
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
        self._first_of_role: dict[str, Size] = {}
        self._after_traffic: dict[str, Size] = {}
        self._num_shared_files = 0
        self.first: dict[str, Size] = {}
        self.last: dict[str, Size] = {}
        self.took_s: list[float] = []
        self.shared_mib: list[float] = []

    async def check(self, when: str) -> list[str]:
        """Wait until the server is idle, and describe what is still in use or has grown.

        Args:
            when: the beginning of each description, such as "after 1000 requests".
        """
        broken = await self._wait_until_idle()
        await self._asker.hang_up()
        broken += await self._measure_growth()
        self._remember_sizes()
        broken += self._shared_memory_faults()
        return [f"{when}: {description}" for description in broken]

    async def _wait_until_idle(self) -> list[str]:
        """Wait until the server is idle. Describe what stays in use, and zombie processes."""
        started = time.monotonic()
        await asyncio.sleep(_PUBLISHED_S)
        broken = []
        while busy := await asyncio.to_thread(processes.what_is_busy, self._served):
            if time.monotonic() - started > _IDLE_LIMIT_S:
                broken.append(f"the server is not idle after {_IDLE_LIMIT_S:g} s: {busy}")
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self.took_s.append(time.monotonic() - started)
        zombies = await asyncio.to_thread(processes.zombies, self._served)
        return broken + [f"{name} is a zombie process" for name in zombies]

    async def _measure_growth(self) -> list[str]:
        """Measure the processes until none has grown. After a time limit, describe their growth.

        The server needs a moment to notice that its clients have closed their connections.
        """
        deadline = time.monotonic() + _CLOSED_LIMIT_S
        while True:
            self.last = await asyncio.to_thread(processes.sizes, self._served)
            grown = [text for role in self.last for text in self._growth(role)]
            if not grown or time.monotonic() > deadline:
                return grown
            await asyncio.sleep(_LOOK_EVERY_S)

    def _growth(self, role: str) -> Iterator[str]:
        """Yield descriptions of too many open files, and of too much memory, of one process."""
        size, first = self.last[role], self.first.get(role)
        # A restarted process is compared with the first process of its role.
        before = first if _is_same_process(first, size) else self._first_of_role.get(role)
        if before is not None and size.num_fds > before.num_fds + _MAX_MORE_FDS:
            more = _more(size.descriptors, before.descriptors)
            counts = f"{size.num_fds} open files, but had {before.num_fds} at first"
            yield f"{role} has {counts}; the additional files are: {more}"
        warm = self._after_traffic.get(role)
        if _is_same_process(warm, size) and size.rss_mib > warm.rss_mib + _MAX_MORE_MIB:
            sizes = f"{size.rss_mib:.0f} MiB, but used {warm.rss_mib:.0f} MiB"
            yield f"{role} uses {sizes} after its first traffic"

    def _remember_sizes(self) -> None:
        """Store the sizes of each process at its first two checks, for later comparisons."""
        for role, size in self.last.items():
            self._first_of_role.setdefault(role, size)
            if not _is_same_process(self.first.get(role), size):
                self.first[role] = size
            elif not _is_same_process(self._after_traffic.get(role), size):
                self._after_traffic[role] = size

    def _shared_memory_faults(self) -> list[str]:
        """Return descriptions of shared memory that has grown since the first check."""
        num_files = len(processes.shared_memory(self._served))
        self._num_shared_files = self._num_shared_files or num_files
        self.shared_mib.append(processes.shared_memory_mib(self._served))
        broken = []
        if num_files > self._num_shared_files:
            broken.append(
                f"there are {num_files} shared-memory files, but there were "
                f"{self._num_shared_files} at first"
            )
        more_mib = self.shared_mib[-1] - self.shared_mib[0]
        if more_mib > _MAX_MORE_SHARED_MIB:
            broken.append(f"files in /dev/shm take {more_mib:.1f} MiB more than at first")
        return broken


def stop(served: Served) -> list[str]:
    """Stop a server, and describe the faults of its end."""
    code = served.stop()
    broken = [f"nereid serve ended with exit code {code}"] if code else []
    files = processes.shared_memory(served)
    return broken + [f"the shared-memory file {path.name} was not removed" for path in files]


def _is_same_process(known: Size | None, size: Size) -> TypeGuard[Size]:
    """Return whether `known` exists and belongs to the same process as `size`."""
    return known is not None and known.pid == size.pid


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> str:
    """Return the kinds whose count has grown, such as "2 x /dev/null, 1 x /tmp/log-N"."""
    more = {kind: count - before.get(kind, 0) for kind, count in now.items()}
    return ", ".join(f"{count} x {kind}" for kind, count in more.items() if count > 0)
