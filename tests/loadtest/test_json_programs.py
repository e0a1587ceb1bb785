"""Tests of the function that runs a program with a time limit and reads its JSON object."""

import os
import sys
import time

import pytest

from loadtest.peers import json_programs


def program(code, limit_s=20.0):
    started = time.monotonic()
    found = json_programs.outcome([sys.executable, "-c", code], limit_s, dict(os.environ))
    return found, time.monotonic() - started


def test_a_result_counts_although_a_thread_keeps_its_program_alive(monkeypatch):
    monkeypatch.setattr(json_programs, "_ENDING_S", 0.2)
    found, spent = program(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "print('loading')\n"
        "print('{\"load_s\": 3}')\n",
        limit_s=120.0,
    )
    assert found == {"load_s": 3}
    assert spent < 60


def test_a_program_that_hangs_is_ended_with_its_child_processes(tmp_path):
    file = tmp_path / "pid"
    found, spent = program(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "print('capturing', file=sys.stderr, flush=True)\n"
        "time.sleep(300)\n",
        limit_s=5.0,
    )
    assert found == {"error": "no result after 5 s; the last line of its log is: capturing"}
    assert spent < 60
    for _ in range(100):
        if not is_running(int(file.read_text())):
            break
        time.sleep(0.1)
    assert not is_running(int(file.read_text()))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit('no room')", "exit code 1; the last line of its log is: no room"),
        ("print('done')", "exit code 0; the last line of its log is: -"),
        ("import os; os.abort()", "exit code -6; the last line of its log is: -"),
    ],
)
def test_a_program_without_a_result_says_how_it_ended(code, error):
    assert program(code)[0] == {"error": error}
