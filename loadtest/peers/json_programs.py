"""Run a program that prints one JSON object, with a time limit. Benchmarks run engines this way."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import Any

Report = dict[str, Any]

# Seconds that a program may take to end after it has printed its result.
_ENDING_S = 5


def outcome(command: list[str], limit_s: float, environment: dict[str, str]) -> Report:
    """Run a program and return the JSON object that it prints, or {"error": ...} if it prints none.

    The function returns soon after the program has printed its result, even if its own threads
    keep it alive. A program that does not end is killed together with its process group, because
    children could keep its output open.

    Args:
        command: the program and its arguments.
        limit_s: seconds until the program must have printed its result.
        environment: the environment variables of the program.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        found, code = None, None
        try:
            found = printed(process, output.fileno(), limit_s)
            if found is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
            code = process.poll()
        finally:
            # The group must be killed before the process is waited for. Afterwards, another process
            # group could have the same id.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if found is not None:
            return found
        last = (text_of(errors.fileno()).strip().splitlines() or ["-"])[-1][:200]
    if code is None:
        return {"error": f"no result after {limit_s:.0f} s; the last line of its log is: {last}"}
    return {"error": f"exit code {code}; the last line of its log is: {last}"}


def printed(process: "subprocess.Popen[bytes]", output: int, limit_s: float) -> Report | None:
    """Wait for the result of a program. Return None if the program prints no result in time."""
    end = time.monotonic() + limit_s
    while True:
        has_ended = process.poll() is not None
        for text in reversed(text_of(output).splitlines(keepends=True)):
            if text.startswith("{") and text.endswith("}\n"):
                found: Report = json.loads(text)
                return found
        if has_ended or time.monotonic() > end:
            return None
        time.sleep(0.1)


def text_of(file: int) -> str:
    """Return a file's text without moving the offset at which the program keeps writing."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
