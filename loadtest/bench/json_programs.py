# SPDX-License-Identifier: Apache-2.0
"""Programs that print one JSON object, run with a limit: what contestants of benchmarks are."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import Any

Report = dict[str, Any]

# A program that has printed its result gets so long to end.
_ENDING_S = 5


def outcome(command: list[str], limit_s: float, environment: dict[str, str]) -> Report:
    """The JSON object that a program prints; {"error": ...} where it prints none in time.

    It counts as soon as it is there: a program may have threads that do not let it end. One that
    does not end is killed, with all that it has started, which could hold its output open.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdout=said, stderr=complaints, env=environment, start_new_session=True
        )
        found, code = None, None
        try:
            found = printed(process, said.fileno(), limit_s)
            if found is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
            code = process.poll()
        finally:
            # Before it is waited for: until then no other group can have its number.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if found is not None:
            return found
        last = (text_of(complaints.fileno()).strip().splitlines() or ["-"])[-1][:200]
    if code is None:
        return {"error": f"not done after {limit_s:.0f} s; its last line: {last}"}
    return {"error": f"exit code {code}: {last}"}


def printed(process: "subprocess.Popen[bytes]", said: int, limit_s: float) -> Report | None:
    """Wait until a program has printed its result, has ended, or takes too long."""
    end = time.monotonic() + limit_s
    while True:
        has_ended = process.poll() is not None
        for text in reversed(text_of(said).splitlines(keepends=True)):
            if text.startswith("{") and text.endswith("}\n"):
                found: Report = json.loads(text)
                return found
        if has_ended or time.monotonic() > end:
            return None
        time.sleep(0.1)


def text_of(file: int) -> str:
    """What a program has written, without moving the place where it goes on."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
