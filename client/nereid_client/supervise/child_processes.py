"""Starts, observes and ends the child processes of `nereid serve`, with all their descendants.

If a Triton server is killed, its Python stub processes and their children continue to run. When
the parent of such a process ends, `nereid serve` therefore becomes the new parent
(`adopt_orphans`). `nereid serve` can then find and end all of its descendants.
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

from nereid_client.console import complain

MESSAGE_PREFIX = "nereid:"
"""The prefix of log lines that `nereid serve` also prints in the terminal."""
ERROR_PREFIX = "nereid: error:"
"""A model writes a log line with this prefix if it rejects a setting or the checkpoint, or if it
has stopped."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TABLE_LINE_PREFIXES = ("|", "+-")
"""The beginnings of the lines of a table, such as the server's list of models."""
_STOP_CHECK_EVERY_S = 0.05
_KILL_CHECK_EVERY_S = 0.02
_MAX_KILL_S = 30.0
"""The longest wait after SIGKILL. A process that waits for a device driver ends only afterwards."""
_NUM_ERROR_LINES = 5
_NUM_LAST_LINES = 15
# The line "PATH/tritonserver: unrecognized option '--x'" comes before hundreds of lines of usage.
_ERROR_LINE = re.compile(r"E\d{4} |error: |.*tritonserver: ")
_CRASH_LINE = re.compile(r"Signal \((4|6|7|8|11)\) received")
# The Triton server logs a message with these words if a stub process has died, or if a stub process
# has received no CPU time for a second.
_STUB_DIED = "is not healthy"
_CRASH_CODES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_LIBC = ctypes.CDLL(None, use_errno=True)
_NUM_THREADS_INDEX = 15
"""The position of the number of threads in /proc/PID/stat, counted from the field after the
parent's process id."""


class Waiter(Protocol):
    """A function that waits for a given time. If it returns True, the caller sends SIGKILL at once.

    Example: `threading.Event.wait`.
    """

    def __call__(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds."""
        ...


class ChildProcess:
    """A program that runs in a child process. Its output goes to a log file, line by line.

    The program starts in a separate session, so that Ctrl-C in the terminal does not reach it.

    Attributes:
        error_lines: the last lines that a Triton server marked as errors.
        last_lines: the last lines of the output, without errors and tables.
        model_errors: the reasons in the lines that start with `nereid: error:`. A model writes such
            a line if it rejects a setting or the checkpoint, or if it has stopped.
        first_model_error_at: the time of time.monotonic() at which the first of these lines
            arrived. None if there is no such line.
        crash_line: the line with which a Triton server reports its crash, or None. Version 2.51 can
            hang in its signal handler instead of ending, and then keeps its ports open.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[str],
        on_line: Callable[[str], None],
        files: Sequence[int] = (),
    ) -> None:
        """Start the program, and a thread that reads its output.

        Args:
            name: the name of the program, for messages.
            command: the command with its arguments.
            environment: all environment variables of the program.
            log: the log file.
            on_line: a function that is called with each line of the output that starts with
                `nereid:`, except errors.
            files: the file descriptors that the program inherits.

        Raises: OSError if the program cannot be started.
        """
        self.name = name
        # `_record_for_diagnosis` fills these attributes from the output of the program.
        self.error_lines: collections.deque[str] = collections.deque(maxlen=_NUM_ERROR_LINES)
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self.model_errors: list[str] = []  # why models reject a setting or have stopped
        self.first_model_error_at: float | None = None
        self.crash_line: str | None = None  # the line with which a Triton server reports its crash

        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal does not reach the program
            preexec_fn=_die_with_parent,
            pass_fds=files,
        )
        self._reader = threading.Thread(target=self._relay, args=(log, on_line), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id. Until `stop` or `kill` returns, no other process gets this id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the program runs."""
        return self._process.poll()

    @property
    def has_crashed(self) -> bool:
        """Whether the program crashed.

        The result is True if a signal such as SIGSEGV ended the program, or if one of its stub
        processes died. The result is False if the program exited or was killed with SIGKILL.
        """
        is_stub_dead = any(_STUB_DIED in line for line in self.error_lines)
        return self.crash_line is not None or self.exit_code in _CRASH_CODES or is_stub_dead

    def describe_end(self) -> str:
        """Describe how the program ended. Example: "NAME ended with exit code 1"."""
        code = self._process.poll()
        if code is None:
            return f"{self.name} is still running"
        self._reader.join(timeout=1)  # the last lines usually contain the reason
        return f"{self.name} {describe_exit_code(code)}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program and wait for its end."""
        self._process.kill()
        self._process.wait()

    def stop(self, grace_s: float, wait: Waiter) -> None:
        """End the program with SIGTERM, or with SIGKILL if it still runs after `grace_s` seconds.

        Args:
            grace_s: the seconds between SIGTERM and SIGKILL.
            wait: a function that waits between two checks. If the function returns True, the
                program is killed at once.
        """
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + grace_s
        while self._process.poll() is None and time.monotonic() < deadline:
            must_hurry = wait(_STOP_CHECK_EVERY_S)
            if must_hurry:
                break
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _relay(self, log: IO[str], on_line: Callable[[str], None]) -> None:
        """Copy the program's output to the log. Also store the errors and the last lines.

        Call `on_line` with the lines that the user should see: the lines that start with `nereid:`,
        except errors.
        """
        output = self._process.stdout
        assert output is not None  # because of stdout=PIPE in the constructor
        with contextlib.closing(output):
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\r\n")
                # An error means that the log is closed or that the disk is full.
                with contextlib.suppress(ValueError, OSError):
                    log.write(line + "\n")
                self._record_for_diagnosis(line)
                if line.startswith(MESSAGE_PREFIX) and not line.startswith(ERROR_PREFIX):
                    on_line(line)

    def _record_for_diagnosis(self, line: str) -> None:
        """Store a line of the program's output, so that the line can be shown if the program fails.

        An error is added to `error_lines`, and another line to `last_lines`. Empty lines and the
        lines of tables, such as the server's list of models, are left out. If the line reports a
        crash, it also becomes the `crash_line`. If the line is an error of a model, such as a wrong
        setting, the reason is also added to `model_errors`.
        """
        if _ERROR_LINE.match(line):
            self.error_lines.append(line)
        elif line and not line.startswith(_TABLE_LINE_PREFIXES):
            self.last_lines.append(line)
        if _CRASH_LINE.match(line):
            self.crash_line = line
        if line.startswith(ERROR_PREFIX):
            self._record_model_error(line.removeprefix(ERROR_PREFIX).strip())

    def _record_model_error(self, reason: str) -> None:
        """Add `reason` to `model_errors`. For the first error, also set `first_model_error_at`.

        Several models can reject the same setting. The reason is then stored only once.
        """
        if not self.model_errors:
            self.first_model_error_at = time.monotonic()
        if reason not in self.model_errors:
            self.model_errors.append(reason)


def describe_exit_code(code: int) -> str:
    """Describe how a process has ended: "ended with exit code 3", or "was ended by SIGKILL".

    If a signal has killed the process, the code is the negative number of the signal.
    """
    if code < 0:
        with contextlib.suppress(ValueError):  # most real-time signals have no name
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by the signal {-code}"
    return f"ended with exit code {code}"


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent process ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float, wait: Waiter, keep: Collection[int] = ()) -> list[str]:
    """End all descendants of this process: first with SIGTERM, and then with SIGKILL.

    Args:
        grace_s: the seconds between SIGTERM and SIGKILL.
        wait: a function that waits between two checks. If the function returns True, SIGKILL is
            sent at once.
        keep: the ids of processes that continue to run, with their descendants.

    Returns: the names and ids of the processes that were running, such as "python3 (17)".
    """
    running = _descendants(keep)
    names = [_name_and_id(pid) for pid in running]
    _signal_all(running, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _descendants(keep) and time.monotonic() < deadline:
        must_hurry = wait(_STOP_CHECK_EVERY_S)
        if must_hurry:
            break
    _kill_descendants(keep)
    return names


def _kill_descendants(keep: Collection[int]) -> None:
    """Kill all descendants of this process, except the processes in `keep` and their descendants.

    A process may start another process before it is killed, so the loop runs until no process is
    left. If processes remain after `_MAX_KILL_S` seconds, print their names.
    """
    deadline = time.monotonic() + _MAX_KILL_S
    while remaining := _descendants(keep):
        if time.monotonic() > deadline:
            names = ", ".join(_name_and_id(pid) for pid in remaining)
            complain(f"nereid: these processes did not end after SIGKILL: {names}")
            break
        _signal_all(remaining, signal.SIGKILL)
        time.sleep(_KILL_CHECK_EVERY_S)


@dataclass(frozen=True)
class Process:
    """The state of a process, from the file /proc/PID/stat.

    Attributes:
        pid: the id of the process.
        parent: the id of its parent.
        name: the first 15 characters of the program's name.
        is_zombie: whether the process has ended, but its parent has not waited for it.
        exit_status: the exit status of a zombie, in the format of os.waitpid.
    """

    pid: int
    parent: int
    name: str
    is_zombie: bool
    exit_status: int

    @property
    def has_crashed(self) -> bool:
        """Whether the process is a zombie that ended because of a signal such as SIGSEGV."""
        return self.is_zombie and -os.WTERMSIG(self.exit_status) in _CRASH_CODES


def process_of(pid: int) -> Process | None:
    """Return the state of a process, or None if the process does not exist."""
    return _process(Path(f"/proc/{pid}"))


def is_waiting_for_a_child(pid: int) -> bool:
    """Return whether a thread of the process waits for the end of a child process.

    Return False if the kernel does not allow this process to read the state of the threads.
    """
    for thread in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with contextlib.suppress(OSError):
            if thread.read_text() == "do_wait":
                return True
    return False


def children_of(pid: int) -> list[Process]:
    """Return the direct children of a process, zombies included."""
    return [process for process in _processes() if process.parent == pid]


def descendants_of(pid: int) -> list[Process]:
    """Return the running descendants of a process. Parents come before their children."""
    children = _children_by_parent()
    descendants: list[Process] = []
    unvisited = [pid]
    while unvisited:
        running = [child for child in children.get(unvisited.pop(), []) if not child.is_zombie]
        descendants += running
        unvisited += [child.pid for child in running]
    return descendants


def command_line(pid: int) -> list[str]:
    """Return the command line of a process, or an empty list if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this child process when the parent process ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(keep: Collection[int] = ()) -> list[int]:
    """Return the ids of the running descendants of this process, parents first.

    Direct children that have ended are reaped, which removes them from the kernel's list of
    processes. Only the parent of a process can reap it.
    """
    children = _children_by_parent()
    running: list[int] = []
    unvisited = [os.getpid()]
    while unvisited:
        for child in children.get(unvisited.pop(), []):
            if child.pid in keep:
                continue
            unvisited.append(child.pid)
            has_ended = _reap_if_ended(child.pid)
            if not has_ended:
                running.append(child.pid)
    return running


def _children_by_parent() -> dict[int, list[Process]]:
    """Return a dict that maps the id of each parent process to the list of its children."""
    children: dict[int, list[Process]] = collections.defaultdict(list)
    for process in _processes():
        children[process.parent].append(process)
    return children


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (process := _process(entry)):
            yield process


def _process(entry: Path) -> Process | None:
    """Return the state of a process from the folder /proc/PID, or None if the process has ended."""
    try:
        status = (entry / "stat").read_text(errors="replace")
    except OSError:  # the process has ended
        return None
    head, _, rest = status.rpartition(")")  # the name may contain spaces and parentheses
    # The first fields after the name are the state and the parent's process id. The last field is
    # the exit status.
    state, parent, *others, exit_status = rest.split()
    num_threads = int(others[_NUM_THREADS_INDEX])
    name = head.partition("(")[2]
    # The state Z is the state of the main thread. If other threads have not ended yet, the kernel
    # may still need a second to free their memory. Until then, the parent cannot reap the process.
    is_zombie = state == "Z" and num_threads <= 1
    return Process(int(entry.name), int(parent), name, is_zombie, int(exit_status))


def _reap_if_ended(pid: int) -> bool:
    """Return whether a process has ended. If it has ended and is a child of this process, reap it.

    Return True also for a zombie that another process must reap.
    """
    with contextlib.suppress(ChildProcessError):  # raised if the process is not a direct child
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    process = process_of(pid)
    return process is None or process.is_zombie


def _name_and_id(pid: int) -> str:
    """Return the name and the id of a process, such as "python3 (17)".

    If the process has ended, the name is "?".
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "?"
    return f"{name} ({pid})"
