"""Child processes of `nereid serve`: started, listened to, and ended with all they started.

A Triton server that is killed leaves its Python stubs behind, and a stub may have children of its
own. So this process declares itself the reaper of its orphaned descendants: whatever happens in
between, everything that was started here stays below us in the process tree and can be ended.
"""

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

MARK = "nereid:"
REFUSAL_MARK = "nereid: error:"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ERROR_LINES = 5
_TAIL_LINES = 15
_ERROR_LINE = re.compile(r"E\d{4} |error: ")
_CRASH_LINE = re.compile(r"Signal \((4|6|7|8|11)\) received")
# Of a stub that died, or that had no processor for a second.
_SICK_STUB = "is not healthy"
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_LIBC = ctypes.CDLL(None, use_errno=True)


class Waiter(Protocol):
    """Waits for up to so many seconds; true means: don't wait any more. An Event's `wait`."""

    def __call__(self, timeout: float) -> bool:
        """Wait."""
        ...


class Child:
    """A program whose output goes to a log file, line by line.

    Lines that start with `nereid:` are passed to `on_line` too.

    Attributes:
        name: for messages.
        errors: the last lines that a Triton server marks as errors.
        refusals: what our models said of the settings or the checkpoint when they refused them,
            or when they gave up.
        refused_at: when the first of them came, by time.monotonic.
        tail: the last lines it wrote, tables left out.
        crash: the line in which a Triton server tells of its crash. Version 2.51 can hang in its
            handler of that signal, for ever and with its ports open, instead of ending.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[str],
        on_line: Callable[[str], None],
    ) -> None:
        """Start it in a session of its own, where the terminal's Ctrl-C does not reach it."""
        self.name = name
        self.errors: collections.deque[str] = collections.deque(maxlen=_ERROR_LINES)
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.refusals: list[str] = []
        self.refused_at = float("inf")
        self.crash: str | None = None
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._relay, args=(log, on_line), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id; nobody else's before `stop` has returned."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def has_crashed(self) -> bool:
        """Whether it ended in a way that no program chooses, and nobody from outside."""
        is_sick = any(_SICK_STUB in line for line in self.errors)
        return self.crash is not None or self.exit_code in _CRASHES or is_sick

    def describe_end(self) -> str:
        """How it ended, for a message."""
        code = self._process.poll()
        if code is None:
            return f"{self.name} runs"
        self._reader.join(timeout=1)  # the last lines tell why
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self._process.kill()
        self._process.wait()

    def stop(self, grace_s: float, hurry: Waiter) -> None:
        """Ask it to end, wait, and kill it when it takes longer than `grace_s` or in a hurry."""
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + grace_s
        while self._process.poll() is None and time.monotonic() < deadline:
            if hurry(0.05):
                break
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _relay(self, log: IO[str], on_line: Callable[[str], None]) -> None:
        output = self._process.stdout
        if output is None:
            return
        for raw in output:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if _ERROR_LINE.match(line):
                self.errors.append(line)
            elif line and not line.startswith(("|", "+-")):
                self.tail.append(line)
            with contextlib.suppress(ValueError, OSError):  # closed, or the disk is full
                log.write(line + "\n")
            if _CRASH_LINE.match(line):
                self.crash = line
            if line.startswith(REFUSAL_MARK):
                self._refuse(line.removeprefix(REFUSAL_MARK).strip())
            elif line.startswith(MARK):
                on_line(line)

    def _refuse(self, reason: str) -> None:
        # Each of the models says it of a wrong setting.
        if reason not in self.refusals:
            self.refused_at = min(self.refused_at, time.monotonic())
            self.refusals.append(reason)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float, hurry: Waiter, keep: Collection[int] = ()) -> list[str]:
    """End every process below this one; the result names those that were still there.

    Args:
        grace_s: so long after SIGTERM comes SIGKILL.
        hurry: true ends that wait.
        keep: process ids that are left alone, with all that is below them.
    """
    found = _descendants(keep)
    names = [f"{_command(pid)} ({pid})" for pid in found]
    _signal_all(found, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (found := _descendants(keep)) and time.monotonic() < deadline:
        if hurry(0.05):
            break
    while found := _descendants(keep):  # a process may have started another one meanwhile
        _signal_all(found, signal.SIGKILL)
        time.sleep(0.02)
    return names


@dataclass(frozen=True)
class Process:
    """One process as the kernel shows it.

    Attributes:
        pid: its id.
        parent: its parent's.
        name: the first 15 characters of its program's name.
        state: a letter: R, S, D, T, and Z for one that has ended and was not waited for.
        exit_status: how one with a Z has ended, as waitpid tells it.
    """

    pid: int
    parent: int
    name: str
    state: str
    exit_status: int

    @property
    def has_crashed(self) -> bool:
        """Whether it ended in a way that no program chooses, and nobody from outside."""
        return self.state == "Z" and -os.WTERMSIG(self.exit_status) in _CRASHES


def process_of(pid: int) -> Process | None:
    """A process; None when it is gone."""
    return _process(Path(f"/proc/{pid}"))


def is_waiting_for_a_child(pid: int) -> bool:
    """Whether one of its threads waits for the end of a child process, as far as we may know."""
    for thread in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with contextlib.suppress(OSError):
            if thread.read_text() == "do_wait":
                return True
    return False


def children_of(pid: int) -> list[Process]:
    """The direct children of a process, dead ones that it did not wait for among them."""
    return [process for process in _processes() if process.parent == pid]


def command_line(pid: int) -> list[str]:
    """Its arguments; empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the parent ends, even if it was killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(keep: Collection[int] = ()) -> list[int]:
    """Processes below this one that still run, parents first; reaps those that don't."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for process in _processes():
        children[process.parent].append(process.pid)
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        for pid in children[waiting.pop()]:
            if pid in keep:
                continue
            waiting.append(pid)
            if not _reap(pid):
                found.append(pid)
    return found


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (process := _process(entry)):
            yield process


def _process(entry: Path) -> Process | None:
    try:
        status = (entry / "stat").read_text(errors="replace")
    except OSError:  # ended meanwhile
        return None
    head, _, rest = status.rpartition(")")  # the name may hold anything
    fields = rest.split()
    name, parent = head.partition("(")[2], int(fields[1])
    return Process(int(entry.name), parent, name, fields[0], int(fields[-1]))


def _reap(pid: int) -> bool:
    """Whether the process has ended; true also for a zombie that another process must reap."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    process = process_of(pid)
    return process is None or process.state == "Z"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
