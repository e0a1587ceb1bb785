"""Tests of the functions with which the command `nereid` prints lines."""

import subprocess
import sys

_PROGRAM = """
import sys
from nereid_client.console import complain, continue_without_output, say

sys.stdin.read()  # returns when the test has closed both pipes
with continue_without_output():
    say("stopping")
    complain("a warning")
    say("stopped")
sys.exit(7)
"""


def test_a_server_whose_output_nobody_reads_continues_to_run():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM], **pipes)
    for pipe in (program.stdout, program.stderr, program.stdin):
        pipe.close()
    assert program.wait(30) == 7


def test_a_server_whose_disk_is_full_continues_to_run():
    with open("/dev/full", "w") as full:
        program = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.DEVNULL, stdout=full, stderr=full
        )
        assert program.wait(30) in (7, 120)  # 120: Python cannot flush the output
