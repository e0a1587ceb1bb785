# SPDX-License-Identifier: Apache-2.0
"""Detects a child process that hangs. Such a process has work, but sends no message."""

import os
import time
from collections.abc import Callable

# `measure` is called several times a second. If two calls are further apart than
# `_LONGEST_INTERVAL_S` seconds, the parent process was probably paused. The child process may have
# been paused, too, and could then send no message. Therefore only the first `_LONGEST_INTERVAL_S`
# seconds between two calls count as time without a message.
_LONGEST_INTERVAL_S = 0.5
# A process is considered busy if its CPU load exceeds `_MIN_CPU_LOAD`. If the model runs on a CPU,
# the time limit of a busy process is `_BUSY_LIMIT_FACTOR` times the usual time limit.
_MIN_CPU_LOAD = 0.1
_BUSY_LIMIT_FACTOR = 10
# In /proc/PID/stat, the user time and the system time are the 12th and the 13th field after the
# name of the program.
_CPU_TIMES = slice(11, 13)


class HangWatch:
    """Measures the time during which a process has work but sends no message.

    Call `measure` several times a second, and then `is_hanging`.

    Attributes:
        silent_s: the number of seconds since the last message. Time without work does not count.
    """

    def __init__(
        self,
        limit_s: float,
        cpu_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch a process that has just started.

        Args:
            limit_s: the longest time in seconds that a process with work may send no message; 0
                means no limit.
            cpu_seconds: returns the CPU time that the process has used, in seconds.
            clock: returns the time in seconds.
        """
        self._limit_s = limit_s
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self.silent_s = 0.0
        self._last_measured = clock()
        # The CPU time that the process had used when it had sent no message for half of the time
        # limit. The value is None until then. At the end of the time limit, the increase of the CPU
        # time shows whether the process is busy or hangs.
        self._cpu_at_half_limit_s: float | None = None

    def note_message(self) -> None:
        """Record that the process has sent a message."""
        self.silent_s = 0.0

    def measure(self, *, is_working: bool) -> None:
        """Update `silent_s`, the time for which the process has had work but sent no message.

        Call this method several times a second. If more than `_LONGEST_INTERVAL_S` seconds have
        passed since the last call, only `_LONGEST_INTERVAL_S` is added, because both processes were
        probably paused. At half of the time limit, also store the CPU time of the process for
        `is_hanging`.

        Args:
            is_working: whether the process has work. If False, `silent_s` becomes 0.
        """
        now = self._clock()
        passed_s = min(now - self._last_measured, _LONGEST_INTERVAL_S)
        self._last_measured = now
        if is_working:
            self.silent_s += passed_s
        else:
            self.silent_s = 0.0
        self._store_cpu_at_half_limit()

    def is_hanging(self, *, is_on_cpu: bool) -> bool:
        """Return whether the process has work, but has sent no message for too long.

        On a CPU, one step of a large model can take minutes. The limit is therefore ten times as
        long while a process on the CPU is busy. Example: with a limit of 60 s, a busy process on
        the CPU hangs after 600 s without a message, and every other process hangs after 60 s.

        Args:
            is_on_cpu: whether the process computes on the CPU. A process with a GPU can use the CPU
                while it only waits, so its CPU use is ignored.
        """
        has_limit = self._limit_s != 0
        if not has_limit or self.silent_s <= self._limit_s:
            return False
        if is_on_cpu and self._is_busy():
            return self.silent_s > _BUSY_LIMIT_FACTOR * self._limit_s
        return True

    def _store_cpu_at_half_limit(self) -> None:
        """When half of the time limit has passed, store how much CPU time the process has used.

        Until then, store None.
        """
        if not self._limit_s or self.silent_s <= self._limit_s / 2:
            self._cpu_at_half_limit_s = None
        elif self._cpu_at_half_limit_s is None:
            self._cpu_at_half_limit_s = self._cpu_seconds()

    def _is_busy(self) -> bool:
        """Return whether the CPU load of the process exceeds `_MIN_CPU_LOAD`.

        The load is measured from the time at which the process had sent no message for half of the
        time limit.
        """
        assert self._cpu_at_half_limit_s is not None, "half of the limit has passed"
        used_cpu_s = self._cpu_seconds() - self._cpu_at_half_limit_s
        measured_s = self.silent_s - self._limit_s / 2
        return used_cpu_s > _MIN_CPU_LOAD * measured_s


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field of /proc/PID/stat is the name of the program in parentheses. The name
            # can contain spaces.
            _, _, fields_after_name = file.read().rpartition(")")
            user, system = fields_after_name.split()[_CPU_TIMES]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
