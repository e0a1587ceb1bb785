# SPDX-License-Identifier: Apache-2.0
"""Whether a process that works beside a stub hangs: the watch over engines and pooling workers."""

import os
import time

# A pause of this process counts as no more than this: the other may have paused with it.
_LONGEST_LOOK_S = 0.5
# A process on the CPU that uses at least so much of one computes, and may take so much longer.
_MIN_LOAD = 0.1
_MOST_PATIENCE = 10


class Pulse:
    """Counts the seconds for which one process has had work and given no sign of life.

    Args:
        pid: of the process.

    Attributes:
        silent_s: that many.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.silent_s = 0.0
        self._last_look = time.monotonic()
        self._cpu_before_s: float | None = None

    def beat(self) -> None:
        """Note a sign of life."""
        self.silent_s = 0.0

    def hangs(self, limit_s: float, *, is_working: bool, is_on_cpu: bool) -> bool:
        """Look at it; call it several times a second.

        Args:
            limit_s: a process with work gives a sign of life at least this often; 0 is no limit.
            is_working: whether it has work.
            is_on_cpu: whether it computes on the CPU. A large model's step may well take minutes
                there, but it uses the CPU meanwhile, and then gets ten times as long. One that
                waits for a GPU may burn a CPU, too, so that says nothing.
        """
        now = time.monotonic()
        passed_s, self._last_look = min(now - self._last_look, _LONGEST_LOOK_S), now
        self.silent_s = self.silent_s + passed_s if is_working else 0.0
        if not limit_s:
            return False
        if self.silent_s <= limit_s / 2:
            self._cpu_before_s = None
            return False
        if self._cpu_before_s is None:
            self._cpu_before_s = _cpu_seconds(self._pid)
        if self.silent_s <= limit_s:
            return False
        used_s = _cpu_seconds(self._pid) - self._cpu_before_s
        computes = used_s > _MIN_LOAD * (self.silent_s - limit_s / 2)
        return not (is_on_cpu and computes) or self.silent_s > _MOST_PATIENCE * limit_s


def _cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far; 0 for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the name, may hold spaces; it ends in the last parenthesis.
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
