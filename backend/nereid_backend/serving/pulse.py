# SPDX-License-Identifier: Apache-2.0
"""Whether a process that works beside a stub hangs: the watch over engines and pooling workers."""

import os
import subprocess
import time

# A pause of this process counts as no more than this: the other may have paused with it.
_LONGEST_LOOK_S = 0.5
# A process on the CPU that uses at least so much of one computes, and may take so much longer.
_MIN_LOAD = 0.1
_MOST_PATIENCE = 10
_KILL_TIMEOUT_S = 5.0


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


def kill_if_hung(
    process: subprocess.Popen[bytes],
    pulse: Pulse,
    limit: tuple[float, str],
    *,
    name: str,
    is_working: bool,
    is_on_cpu: bool,
) -> str | None:
    """Kill a process that hangs; call it as often as `Pulse.hangs`, whose arguments these are.

    Args:
        process: that the pulse is of.
        pulse: its signs of life.
        limit: its seconds, and the setting that says so.
        name: what the process is called in errors.
        is_working: whether it has work.
        is_on_cpu: whether it computes on the CPU.

    Returns:
        Why it was killed; None: it was not.
    """
    limit_s, setting = limit
    if not pulse.hangs(limit_s, is_working=is_working, is_on_cpu=is_on_cpu):
        return None
    process.kill()
    process.wait(_KILL_TIMEOUT_S)
    return (
        f"the {name} was at one step for {pulse.silent_s:.0f} s without a sign of life; "
        f"the limit is {limit_s:g} s ({setting}); it was killed"
    )


def _cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far; 0 for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the name, may hold spaces; it ends in the last parenthesis.
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
