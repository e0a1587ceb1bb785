"""Functions that run a program with a time limit and return the JSON object that it prints.

The benchmarks use them to run each compared engine in a process of its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import Any

Report = dict[str, Any]

# The number of seconds within which a program should end after it has printed its result.
_ENDING_S = 5
_POLL_S = 0.1
_MAX_LINE_LENGTH = 200


def outcome(command: list[str], limit_s: float, environment: dict[str, str]) -> Report:
    """Run a program and return the JSON object that it prints, or {"error": ...} if it prints none.

    The function returns soon after the program has printed its result, even if threads of the
    program keep it alive. A program that does not end is killed together with its process group, so
    that its child processes end, too. `limit_s` is the time limit for the result in seconds.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=output, stderr=log, env=environment, start_new_session=True
        )
        try:
            report = wait_for_report(process, output.fileno(), limit_s)
            if report is None:
                return {"error": _error(process.poll(), limit_s, text_of(log.fileno()))}
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
            return report
        finally:
            _kill_group(process)


def _error(exit_code: int | None, limit_s: float, log: str) -> str:
    """Describe why a program printed no result. `exit_code` is None if the program still runs."""
    reason = f"no result after {limit_s:.0f} s" if exit_code is None else f"exit code {exit_code}"
    last_line = (log.strip().splitlines() or ["-"])[-1]
    return f"{reason}; the last line of its log is: {last_line[:_MAX_LINE_LENGTH]}"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its child processes, unless its exit code is already known."""
    # The process group must be killed before `wait` frees the process id. Afterwards, another
    # process group could have the same id.
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_report(
    process: "subprocess.Popen[bytes]", output: int, limit_s: float
) -> Report | None:
    """Wait until a program has printed a JSON object as one line of the file `output`.

    Return the object, or None if the program ends or the time limit is exceeded before that.
    """
    end = time.monotonic() + limit_s
    while True:
        # The output must be read after this call. Otherwise, the program could print the object
        # after the output is read and then end, and the object would be missed.
        has_ended = process.poll() is not None
        for line in reversed(text_of(output).splitlines(keepends=True)):
            if line.startswith("{") and line.endswith("}\n"):
                report: Report = json.loads(line)
                return report
        if has_ended or time.monotonic() > end:
            return None
        time.sleep(_POLL_S)


def text_of(file: int) -> str:
    """Return the text of a file.

    Do not change the file offset, because another program writes at this offset.
    """
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
