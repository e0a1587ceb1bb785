"""Tests that a signal handler can set a `SignalFlag` while the main thread waits for the flag."""

import subprocess
import sys

# Each call of `wait_with_signal` sends a signal at another point of the method `wait`: before the
# line with the number `at_line`, counting the lines that Python executes. A call of `wait` without
# a signal executes about ten lines.
SCRIPT = """
import os
import signal
import sys
from {module} import {name}

def wait_with_signal(at_line):
    flag = {name}()
    signal.signal(signal.SIGTERM, lambda *_: flag.set())
    num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        if event == "line" and frame.f_globals["__name__"] == "{module}":
            num_lines += 1
            if num_lines == at_line:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    sys.settrace(trace)
    flag.wait(0.001)
    sys.settrace(None)
    return num_lines < at_line or flag.wait(10)

assert all(wait_with_signal(at_line) for at_line in range(1, 20))
"""


def _run(module, name):
    script = SCRIPT.format(module=module, name=name)
    return subprocess.run([sys.executable, "-c", script], timeout=20, check=False).returncode


def test_a_signal_at_any_step_of_a_wait_sets_the_flag():
    assert _run("nereid_client.signal_flag", "SignalFlag") == 0
