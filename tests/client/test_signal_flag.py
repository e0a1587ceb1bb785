"""Signals that set a flag while the main thread waits for the flag."""

import subprocess
import sys

# Each call of `wait_with_signal` sends a signal at another step of `wait`: at line `at_line` of
# the Python code that `wait` runs. An uninterrupted call runs about ten lines.
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
