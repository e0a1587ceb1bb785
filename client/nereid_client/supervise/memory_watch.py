"""Kills a process of the server if the process uses too much memory.

When the memory of the machine is exhausted, the kernel chooses the process to kill. It may choose
the Triton server or this supervisor. The memory watch instead kills the process that uses the most
memory. A model restarts its own engine or worker process, and `nereid serve` restarts all other
processes.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid_client.supervise.child_processes import command_line, descendants_of

_CHECK_EVERY_S = 1.0
# A process may exceed its budget for a moment, for example while it reads a large request.
_TOLERATED_S = 5.0
# By default, one process may use at most this fraction of the memory.
_DEFAULT_SHARE = 0.8
# The memory watch keeps some memory in reserve. If less memory than this reserve is available, the
# memory watch kills the largest process. The reserve is this fraction of the total memory, but at
# most _MAX_RESERVE bytes.
_RESERVE_SHARE = 0.04
_MAX_RESERVE = 2**30
# If memory is low, only processes that use at least this many bytes are killed.
_SMALLEST_VICTIM = 64 * 2**20
_MIB = 2**20


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        pid: the process id.
        name: a description for messages, such as "the engine process".
        num_bytes: the resident memory in bytes. The cached pages of files are not counted, because
            the kernel can free these pages.
    """

    pid: int
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory of the machine, or of the container if the container's limit is smaller.

    Attributes:
        total: the number of bytes.
        available: the number of bytes that are free or can be freed at once.
    """

    total: int
    available: int


def read_processes() -> list[ProcessMemory]:
    """Return the memory of all descendants of this process."""
    found = []
    for process in descendants_of(os.getpid()):
        with contextlib.suppress(OSError):  # the process has ended
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
            num_bytes = 1024 * sum(map(int, sizes))
            found.append(ProcessMemory(process.pid, _describe(process.pid), num_bytes))
    return found


def read_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return the memory of the machine, or of the container if the container's limit is smaller.

    Args:
        proc: the folder with the state of the kernel.
        cgroup: the folder with the limits of the container (its control group).
    """
    meminfo = _numbers((proc / "meminfo").read_text(), r"^(\w+):\s+(\d+) kB")
    total = 1024 * meminfo["MemTotal"]
    available = 1024 * meminfo["MemAvailable"]
    # The kernel has two versions of control groups, whose files have different names. The used
    # bytes include cached pages of files. If such a page is inactive, the kernel can free it at
    # once.
    version_2 = _container_memory(
        cgroup, limit_file="memory.max", used_file="memory.current", freeable="inactive_file"
    )
    version_1 = _container_memory(
        cgroup / "memory",
        limit_file="memory.limit_in_bytes",
        used_file="memory.usage_in_bytes",
        freeable="total_inactive_file",
    )
    for container in (version_2, version_1):
        if container is not None and container.total < total:
            total = container.total
            available = min(available, container.available)
    return Memory(total, available)


def _container_memory(
    folder: Path, *, limit_file: str, used_file: str, freeable: str
) -> Memory | None:
    """Return the memory of a container, or None if it has no limit.

    Version 1 of control groups has no special value for "no limit". The limit is then a number that
    is larger than the memory of any machine.
    """
    try:
        # Outside of a container, the file with the limit does not exist. With version 2 of control
        # groups, the file contains "max" if the container has no limit.
        limit_bytes = int((folder / limit_file).read_text())
        used_bytes = int((folder / used_file).read_text())
        stat = _numbers((folder / "memory.stat").read_text(), r"^(\w+) (\d+)$")
    except (OSError, ValueError):
        return None
    return Memory(limit_bytes, limit_bytes - used_bytes + stat.get(freeable, 0))


def _numbers(text: str, pattern: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def _describe(pid: int) -> str:
    """Describe a process by its command line.

    Example: ["python", "-m", "nereid_backend.serving.executor.engine_process"] returns "the process
    engine_process".
    """
    words = command_line(pid)
    if not words:
        return f"process {pid}"
    program, *arguments = words
    if "-m" in arguments[:-1]:  # the next argument is the name of a Python module
        module = arguments[arguments.index("-m") + 1]
        return f"the process {module.rpartition('.')[2]}"
    if arguments and program.endswith("triton_python_backend_stub"):
        model_file = Path(arguments[0])  # the path ends with MODEL/VERSION/model.py
        return f"the process of the model {model_file.parent.parent.name}"
    return f"the process {Path(program).name}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class MemoryWatch:
    """Checks the memory of all descendants of this process once a second."""

    def __init__(
        self,
        budget: int,
        complain: Callable[[str], None],
        *,
        processes: Callable[[], Sequence[ProcessMemory]] = read_processes,
        memory: Callable[[], Memory] = read_memory,
        kill: Callable[[int], None] = _kill,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compute the limits from the total memory. Only tests replace the default functions.

        Args:
            budget: the largest number of bytes of one process. 0 means 80 % of the memory.
            complain: a function that prints a message for the user.
            processes: a function that returns the memory of each process.
            memory: a function that returns the memory of the machine.
            kill: a function that kills a process.
            clock: a function that returns a time in seconds. The time never decreases.
        """
        self._complain = complain
        self._read_processes = processes
        self._read_memory = memory
        self._kill = kill
        self._clock = clock

        # The limits in bytes.
        total_bytes = memory().total
        self._budget = budget or int(total_bytes * _DEFAULT_SHARE)
        # The largest process is killed if fewer than this number of bytes are available.
        self._reserve = min(int(total_bytes * _RESERVE_SHARE), _MAX_RESERVE)

        # The state of `check`. Maps the id of each process above the budget to the time at which
        # `check` first found that the process uses too much memory.
        self._over_since: dict[int, float] = {}
        self._check_due = 0.0  # the time of the next check

    def check(self) -> None:
        """Kill a process that uses too much memory. Read the memory at most once a second.

        A process above the budget is killed only after `_TOLERATED_S` seconds. The first check that
        finds such a process prints a warning. If no process is killed for this reason, but the
        memory of the machine is nearly exhausted, the largest process is killed.

        Mutates: `_over_since`, which contains the processes above the budget, and `_check_due`.
        """
        now = self._clock()
        if now < self._check_due:
            return
        self._check_due = now + _CHECK_EVERY_S
        processes = self._read_processes()
        over_budget = [process for process in processes if process.num_bytes > self._budget]
        over_before = self._over_since  # the processes that the last check found above the budget
        self._over_since = {
            process.pid: over_before.get(process.pid, now) for process in over_budget
        }
        for process in over_budget:
            if process.pid not in over_before:
                self._warn(process)
            elif now - over_before[process.pid] >= _TOLERATED_S:
                self._kill_for_restart(process, "it has exceeded its budget for too long")
                return
        self._kill_largest_if_memory_is_low(processes)

    def _warn(self, process: ProcessMemory) -> None:
        """Print a warning that a process exceeds its memory budget."""
        self._complain(
            f"nereid: {process.name} uses {process.num_bytes // _MIB} MiB of memory, but the "
            f"budget of a process is {self._budget // _MIB} MiB (--max-process-memory)"
        )

    def _kill_largest_if_memory_is_low(self, processes: Sequence[ProcessMemory]) -> None:
        """If the available memory is less than the reserve, kill the largest process.

        If even the largest process is small, no process is killed, because other programs use the
        memory.
        """
        available = self._read_memory().available
        largest = max(processes, key=lambda process: process.num_bytes, default=None)
        is_memory_low = available < self._reserve
        if not is_memory_low or largest is None or largest.num_bytes < _SMALLEST_VICTIM:
            return
        self._kill_for_restart(largest, f"only {available // _MIB} MiB of memory are available")

    def _kill_for_restart(self, process: ProcessMemory, reason: str) -> None:
        """Kill a process, and print the reason. The parent process then starts it again."""
        self._complain(
            f"nereid: {process.name} (process {process.pid}) uses {process.num_bytes // _MIB} MiB "
            f"of memory and is restarted, because {reason}"
        )
        self._over_since.pop(process.pid, None)
        self._kill(process.pid)
        # The next check waits, because the kernel needs time to free the memory.
        self._check_due = self._clock() + _TOLERATED_S
