"""Tests that the supervisor retries when the operating system cannot start a program."""

import errno
import time
from types import SimpleNamespace

from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.serve_plan import Program
from nereid_client.supervise.supervised_program import SupervisedProgram
from nereid_client.supervise.supervisor import Supervisor

WORKING_PROGRAM = SimpleNamespace(restart_at=None, is_restart_due=False, failure=lambda: None)


def supervisor_of(programs, monkeypatch):
    """Return a supervisor that believes that all of `programs` have been ready.

    `Supervisor.run` would start a Triton server, so this function sets the programs directly. The
    supervisor neither ends processes of the programs nor reads the log of the server.
    """
    supervisor = Supervisor(SimpleNamespace(max_process_memory=0))
    supervisor._programs = programs
    supervisor._is_announced = True
    monkeypatch.setattr(supervisor, "_end_processes_of", lambda program: None)
    monkeypatch.setattr(supervisor, "_server_failure", lambda: None)
    return supervisor


def test_a_restart_without_memory_for_a_process_is_tried_again(tmp_path, monkeypatch):
    program = Program("the OpenAI frontend", ["/bin/false"], {})
    with (tmp_path / "log").open("w") as log:
        failing = SupervisedProgram(program, RestartPolicy(max_restarts=2, backoff_s=0.0), log)
    failing.child.stop(grace_s=5, wait=time.sleep)
    supervisor = supervisor_of([WORKING_PROGRAM, failing], monkeypatch)

    def fail_to_start():
        failing.restart_at = None
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(failing, "start", fail_to_start)
        # The program has ended, so the supervisor plans a restart. This first restart fails.
        assert supervisor._handle_failures() is None
        supervisor._restart_due_programs()
    # The supervisor now plans the second restart of the program.
    assert supervisor._handle_failures() is None

    assert failing.restart_at is not None
    assert failing.restarts.number == 2
