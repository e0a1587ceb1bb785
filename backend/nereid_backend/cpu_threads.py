# SPDX-License-Identifier: Apache-2.0
"""Sets the number of CPU threads of torch and of Nereid's kernels.

The threads of a step wait for each other after every layer. If another program uses the CPU of one
thread, all threads wait for this thread, and a step takes two to three times as long. Therefore the
engine uses fewer threads while other programs use its CPUs.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

# The number of threads changes at most once in this number of seconds. The kernel counts CPU time
# in ticks of 1 to 10 ms, so a much shorter time would not be measured precisely. After a pause that
# is longer than this number of seconds, earlier measurements are ignored.
_WINDOW_S = 1.0


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, within the quota of the container."""
    num_cpus = len(_allowed_cpus())
    try:
        # The file contains two numbers of microseconds, such as "200000 100000" for two CPUs.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        num_quota_cpus = max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return num_cpus  # Without the file, or with the text "max", there is no quota.
    return min(num_cpus, num_quota_cpus)


def set_cpu_threads(num_threads: int | None) -> "CpuThreads":
    """Set the number of threads of tensor operations, and return an object that adjusts it later.

    The object reduces the number of threads while other processes use the CPUs.

    Args:
        num_threads: the largest number of threads; None to leave one CPU to other processes.
    """
    max_threads = num_threads or max(1, usable_cpus() - 1)
    torch.set_num_threads(max_threads)
    return _adjustable_threads(max_threads)


def _adjustable_threads(max_threads: int) -> "CpuThreads":
    """Return an object that uses at most `max_threads` threads, and measures other processes."""
    # Measure other processes on all allowed CPUs, even if the quota of the container is smaller. A
    # quota limits the CPU time of the threads, but they may run on every allowed CPU.
    cpus = _allowed_cpus()
    return CpuThreads(max_threads, len(cpus), partial(cpu_time_of_others, cpus))


class CpuThreads:
    """Reduces the number of threads while other processes use the CPUs of this process."""

    def __init__(
        self,
        max_threads: int,
        num_cpus: int,
        cpu_time_of_others: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an object that has measured nothing yet.

        Args:
            max_threads: the number of threads if other processes leave enough CPUs.
            num_cpus: the number of CPUs that this process may use.
            cpu_time_of_others: returns the CPU time in seconds that other processes have used on
                these CPUs, since an arbitrary start; None if the time is unknown.
            clock: returns the present time in seconds.
        """
        self._max_threads = max_threads
        self._num_cpus = num_cpus
        self._meter = _LoadMeter(cpu_time_of_others, clock)

    def adjust(self) -> None:
        """Set the number of threads with which a step is expected to be fastest.

        The thread that computes the steps calls this method before each step. Most calls return
        immediately, because other processes are measured for a second before the number of threads
        changes. If the CPU time of other processes is unknown, the number of threads does not
        change. The CPU time during pauses does not count (see `pause`). After a pause of more than
        a second, the largest number of threads is used until other processes have been measured for
        a second.
        """
        meter = self._meter
        if not meter.is_running:
            if meter.seconds_since_stop() > _WINDOW_S:
                meter.reset()  # The measurements before a long pause no longer count.
                _change_num_threads(self._max_threads)
            meter.start()
        elif meter.measured_seconds() >= _WINDOW_S:
            meter.stop()
            load = meter.mean_load()
            if load is not None:
                _change_num_threads(suitable_threads(self._max_threads, self._num_cpus, load))
            meter.restart()

    def pause(self) -> None:
        """Stop measuring other processes until the next call of `adjust`.

        The engine calls this method when no request is waiting. Other processes do not delay the
        engine while the engine has no work, so their CPU time during a pause must not count.
        """
        if self._meter.is_running:
            self._meter.stop()


class _LoadMeter:
    """Measures the CPU time of other processes in periods, each from `start` to `stop`."""

    def __init__(
        self, cpu_time_of_others: Callable[[], float | None], clock: Callable[[], float]
    ) -> None:
        """Create a meter that is not running. `CpuThreads` describes the arguments."""
        self._cpu_time_of_others = cpu_time_of_others
        self._clock = clock
        # The time, and the CPU time of other processes, at the start of the present period. None if
        # the meter is not running.
        self._start: tuple[float, float | None] | None = None
        self._stop_time = clock()
        self.reset()

    @property
    def is_running(self) -> bool:
        """Whether a period has started and not ended."""
        return self._start is not None

    def start(self) -> None:
        """Begin a period."""
        self._start = (self._clock(), self._cpu_time_of_others())

    def stop(self) -> None:
        """End the present period. The period does not count if the CPU time is unknown."""
        assert self._start is not None
        start_time, start_cpu_time = self._start
        self._start = None
        self._stop_time = self._clock()
        cpu_time = self._cpu_time_of_others()
        if cpu_time is not None and start_cpu_time is not None:
            self._seconds += self._stop_time - start_time
            self._cpu_seconds += cpu_time - start_cpu_time

    def reset(self) -> None:
        """Discard the measurements of the periods that have ended."""
        self._seconds = 0.0
        self._cpu_seconds = 0.0

    def restart(self) -> None:
        """Discard the measurements of all earlier periods, and begin a new period."""
        self.reset()
        self.start()

    def seconds_since_stop(self) -> float:
        """Return the time since the end of the last period, in seconds."""
        return self._clock() - self._stop_time

    def measured_seconds(self) -> float:
        """Return the total length of the periods since the last reset, in seconds.

        The present period is included.
        """
        present = 0.0 if self._start is None else self._clock() - self._start[0]
        return self._seconds + present

    def mean_load(self) -> float | None:
        """Return how many CPUs other processes used on average; None without a measured period.

        Only periods that have ended since the last reset count.
        """
        return self._cpu_seconds / self._seconds if self._seconds > 0.0 else None


def _change_num_threads(num_threads: int) -> None:
    """Set the number of threads of torch if it differs from the present number."""
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def suitable_threads(max_threads: int, num_cpus: int, used_by_others: float) -> int:
    """Return the number of threads with which a step is expected to be fastest.

    All threads of a step get the same amount of work, so the slowest thread determines the time of
    the step. Examples for four CPUs and `max_threads` 4: if other processes use 0.1 CPUs, four
    threads run at 0.9 of their speed, which is better than three threads. If other processes use
    0.7 CPUs, three threads are better.

    Args:
        max_threads: the largest possible result.
        num_cpus: the number of CPUs that this process may use.
        used_by_others: the number of these CPUs that other processes use on average. Example: two
            processes that each run half of the time use 1.0 CPUs.
    """

    def expected_speed(num_threads: int) -> float:
        # Other processes first use the CPUs on which no thread runs. If these CPUs do not suffice,
        # the other processes take CPU time from one of the threads. All threads then take longer,
        # because they wait for each other at the end of each operation.
        taken_from_threads = used_by_others - (num_cpus - num_threads)
        return num_threads * (1 - min(1.0, max(0.0, taken_from_threads)))

    return max(range(1, max_threads + 1), key=expected_speed)


def cpu_time_of_others(cpus: frozenset[int]) -> float | None:
    """Return the CPU time in seconds that other processes have used since the system's start.

    The result leaves out processes of low priority (with a positive nice value), because they
    hardly delay the threads of this process.

    Args:
        cpus: the numbers of the CPUs whose time is added. This process must not run on any other
            CPU, because its whole CPU time is subtracted.

    Returns:
        The CPU time, or None if the system has no readable file /proc/stat.
    """
    try:
        with open("/proc/stat", encoding="ascii") as file:
            # The first lines of the file describe the CPUs.
            lines = takewhile(lambda line: line.startswith("cpu"), file)
            total_ticks = sum(_ticks_of_line(line, cpus) for line in lines)
    except (OSError, ValueError):
        return None
    return total_ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _ticks_of_line(line: str, cpus: frozenset[int]) -> int:
    """Return the time in clock ticks during which a CPU ran processes of normal priority.

    Args:
        line: a line of /proc/stat, such as "cpu0 763916 119878 61013 ...".
        cpus: the CPUs that count. For another CPU, and for the first line "cpu  1563478 ...", which
            has the sum of all CPUs, the result is 0.
    """
    name, *ticks = line.split()
    number = name.removeprefix("cpu")
    if not number or int(number) not in cpus:
        return 0
    user, _low_priority, system = map(int, ticks[:3])
    return user + system


def _allowed_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
