# SPDX-License-Identifier: Apache-2.0
"""Detects a child process that hangs. Such a process has work, but sends no message."""

import os
import time
from collections.abc import Callable

# If more than `_LONGEST_INTERVAL_S` seconds pass between two calls of `is_hanging`, this process
# was probably paused. The child process may have been paused, too. Therefore at most
# `_LONGEST_INTERVAL_S` seconds count as time without a message.
_LONGEST_INTERVAL_S = 0.5
# A process whose CPU load is at least `_MIN_CPU_LOAD` is considered busy. If the model runs on a
# CPU, the time limit for a busy process is `_BUSY_LIMIT_FACTOR` times as long.
_MIN_CPU_LOAD = 0.1
_BUSY_LIMIT_FACTOR = 10
# In /proc/PID/stat, the user time and the system time are the 12th and the 13th field after the
# name of the program.
_CPU_TIMES = slice(11, 13)


class HangWatch:
    """Measures the time during which a process has work but sends no message.

    Attributes:
        silent_s: the number of seconds since the last message. Time without work does not count.
    """

    def __init__(
        self,
        limit_s: float,
        cpu_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments. The watched process must have just started.

        Args:
            limit_s: the longest time in seconds that a process with work may send no message; 0
                means no limit.
            cpu_seconds: returns the CPU time that the process has used, in seconds.
            clock: returns the time in seconds.
        """
        self.silent_s = 0.0
        self._limit_s = limit_s
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        # The time of the last call of `is_hanging`.
        self._last_checked = clock()
        # The CPU time that the process had used when half of the time limit had passed without a
        # message. None means that less than half of the time limit has passed.
        self._cpu_before_s: float | None = None

    def note_message(self) -> None:
        """Record that the process has sent a message."""
        self.silent_s = 0.0

    def is_hanging(self, *, is_working: bool, is_on_cpu: bool) -> bool:
        """Return whether the process hangs.

        This method also measures the time without a message, so it must be called several times a
        second.

        Example: the limit is 60 s, and a process with work sends no message for 61 s. If the model
        runs on a GPU, the process hangs. If the model runs on the CPU, the process hangs only if it
        has used less than 10 % of a CPU during the last 31 s. If the process has used more, it
        hangs after 600 s without a message.

        Args:
            is_working: whether the process has work.
            is_on_cpu: whether the process computes on the CPU. On a CPU, a step of a large model
                can take minutes. So the limit is ten times as long for a process that uses the CPU.
                A process with a GPU can use the CPU while it only waits, so its CPU use is ignored.
        """
        self._measure_silence(is_working=is_working)
        limit_s = self._limit_s
        # The CPU time is measured only after half of `limit_s` has passed without a message.
        measuring_from_s = limit_s / 2
        if not limit_s or self.silent_s <= measuring_from_s:
            self._cpu_before_s = None
            return False
        if self._cpu_before_s is None:
            self._cpu_before_s = self._cpu_seconds()
        if self.silent_s <= limit_s:
            return False
        busy_limit_s = _BUSY_LIMIT_FACTOR * limit_s
        if not is_on_cpu or self.silent_s > busy_limit_s:
            return True
        used_cpu_s = self._cpu_seconds() - self._cpu_before_s
        measured_s = self.silent_s - measuring_from_s
        is_busy = used_cpu_s > _MIN_CPU_LOAD * measured_s
        return not is_busy

    def _measure_silence(self, *, is_working: bool) -> None:
        """Add the time since the last call to `silent_s`. Without work, set `silent_s` to 0."""
        now = self._clock()
        passed_s = min(now - self._last_checked, _LONGEST_INTERVAL_S)
        self._last_checked = now
        self.silent_s = self.silent_s + passed_s if is_working else 0.0


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
