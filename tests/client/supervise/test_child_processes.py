"""Tests of how the supervisor starts and stops child processes, and detects their failures."""

import io
import os
import subprocess
import time

import pytest
from fakes.live_frontend import wait_for
from nereid_client.supervise import child_processes
from nereid_client.supervise.child_processes import ChildProcess, process_of
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.serve_plan import Program
from nereid_client.supervise.supervised_program import SupervisedProgram

STUB_DIED = "E1122 10:20:42 1 model.cc:1] Stub process executor_0_0 is not healthy."
POLICY = RestartPolicy(max_restarts=1, backoff_s=0.0)


@pytest.fixture
def start():
    """A function that starts a shell script as a supervised program."""
    programs = []

    def run(script):
        program = Program("tritonserver", ["/bin/sh", "-c", script], dict(os.environ))
        programs.append(SupervisedProgram(program, POLICY, io.StringIO()))
        return programs[-1]

    yield run
    for program in programs:
        program.child.kill()


def ended(program):
    wait_for(lambda: program.child.exit_code is not None)
    program.child._reader.join(10)
    return program


def test_a_program_that_runs_has_no_failure(start):
    assert start("exec sleep 60").failure() is None


def test_an_exit_is_no_crash(start):
    program = ended(start("exit 3"))
    assert program.failure() == "tritonserver ended with exit code 3"
    assert not program.has_crashed


def test_an_abort_is_a_crash(start):
    program = ended(start("kill -ABRT $$"))
    assert program.failure() == "tritonserver was ended by SIGABRT"
    assert program.has_crashed


def test_a_signal_without_a_name_is_described_by_its_number(start):
    program = ended(start("kill -35 $$"))
    assert program.failure() == "tritonserver was ended by the signal 35"


def test_the_reason_before_a_long_usage_text_is_an_error_line(start):
    reason = "/x y/tritonserver: unrecognized option '--foo'"
    program = ended(start(f'echo "{reason}"; seq 100; exit 1'))
    assert list(program.child.error_lines) == [reason]


def test_a_server_that_reports_a_dead_stub_and_ends_has_crashed(start):
    program = ended(start(f"echo '{STUB_DIED}'; exit 1"))
    assert program.failure() == "tritonserver ended with exit code 1"
    assert program.has_crashed


def test_a_server_that_hangs_in_its_own_crash_has_crashed(start):
    program = start("echo 'Signal (11) received.'; exec sleep 60")
    wait_for(program.failure)
    assert program.failure() == "tritonserver crashed (Signal (11) received.)"
    assert program.has_crashed


def test_a_reason_that_several_models_report_is_stored_once(start):
    program = ended(start("for _ in 1 2; do echo 'nereid: error: a wrong setting'; done"))
    assert program.child.model_errors == ["a wrong setting"]
    assert program.child.first_model_error_at < time.monotonic()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(start):
    program = start("trap '' TERM; echo nereid: ready; while true; do sleep 0.05; done")
    wait_for(lambda: program.child.last_lines)
    program.child.stop(0.3, lambda timeout: time.sleep(timeout))
    assert program.child.describe_end() == "tritonserver was ended by SIGKILL"


def test_lines_for_the_user_are_passed_on_and_all_lines_go_to_the_log():
    lines, log = [], io.StringIO()
    script = "echo one; echo nereid: two; echo '| a table |'"
    child = ChildProcess("p", ["/bin/sh", "-c", script], dict(os.environ), log, lines.append)
    wait_for(lambda: child.exit_code is not None)
    child._reader.join(10)
    assert lines == ["nereid: two"]
    assert log.getvalue() == "one\nnereid: two\n| a table |\n"
    assert list(child.last_lines) == ["one", "nereid: two"]


def test_a_zombie_that_crashed_is_told_from_one_that_exited():
    found = []
    for command in ("kill -SEGV $$", "exit 1"):
        process = subprocess.Popen(["/bin/sh", "-c", command])
        wait_for(lambda pid=process.pid: process_of(pid).is_zombie)
        found.append(process_of(process.pid).has_crashed)
        process.wait()
    assert found == [True, False]


def test_a_process_that_survives_a_kill_is_named_and_does_not_block_the_end(monkeypatch, capsys):
    # A process that waits for a device driver survives SIGKILL. The test simulates such a process:
    # it replaces the function that sends the signals.
    cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Popen can return before Linux has changed the name of the process from "python" to "cat".
        # The first output of the process proves that the name has changed.
        cat.stdin.write(b"ready\n")
        cat.stdin.flush()
        assert cat.stdout.readline() == b"ready\n"
        monkeypatch.setattr(child_processes, "_descendants", lambda keep: [cat.pid])
        monkeypatch.setattr(child_processes, "_signal_all", lambda pids, signal: None)
        monkeypatch.setattr(child_processes, "_MAX_KILL_S", 0.1)
        survivors = child_processes.end_descendants(0.0, lambda seconds: False)
    finally:
        cat.kill()
        cat.communicate()
    assert survivors == [f"cat ({cat.pid})"]
    assert f"did not end after SIGKILL: cat ({cat.pid})" in capsys.readouterr().err
