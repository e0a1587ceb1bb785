"""Tests of a supervised model whose child process dies, hangs or cannot be restarted."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from backend.serving.fake_server import Request
from nereid_backend import CapacityError, EngineError
from nereid_backend.serving import triton_api
from nereid_backend.serving.process import process_handle, supervised_process
from nereid_backend.serving.process.process_handle import refusal_error
from nereid_backend.serving.process.supervised_model import SupervisedModel
from nereid_backend.serving.process.supervised_process import SupervisedProcess

POLL_S = 0.02


class EchoModel(SupervisedModel):
    """A model whose requests are instructions for the scripted child process.

    The word "ID" in an instruction stands for the id of the request.
    """

    title = "echo"
    log_prefix = "echo: "

    def __init__(self, program, num_processes):
        super().__init__()
        self.defect = None
        self.processes = [SupervisedProcess.start(program, i) for i in range(num_processes)]
        self.start_loop()

    def accept(self, request, sender):
        instruction = request.inputs["instruction"].as_numpy()
        if instruction is None:
            self.respond_later(sender, {"echo": triton_api.strings("nothing")})
        else:
            request_id = str(id(sender))
            message = [value if value != "ID" else request_id for value in instruction]
            index = request.inputs["index"].as_numpy() or 0
            self.add_request(request_id, (request_id, sender), message, index)

    def handle(self, process, kind, values):
        request_id, *rest = values
        _, sender = self.remove(request_id)
        if kind == "refused":
            self.respond(sender, refusal_error(*rest))
        else:
            process.num_attempts = 0
            self.respond(sender, {"echo": triton_api.strings(*rest)})

    def do_periodic_work(self):
        if self.defect is not None:
            defect, self.defect = self.defect, None
            raise defect
        return POLL_S

    def end(self, request, error):
        request_id, sender = request
        self.remove(request_id)
        self.respond(sender, error)

    def restart_message(self):
        return "the echo is restarting"

    def failure_message(self, error):
        return f"the echo is dead: {error}"

    @property
    def num_restarts(self):
        return self.processes[0].num_restarts


@pytest.fixture
def start(make_program):
    models = []

    def make(num_processes=1, **program):
        models.append(EchoModel(make_program(**program), num_processes))
        return models[-1]

    yield make
    for model in models:
        model.finalize()


def ask(model, *instruction, index=0):
    request = Request(instruction=instruction or None, index=index)
    model.execute([request])
    return request


def echo(model, text="hello", index=0):
    """Return whether the child process with this index returns a text that it receives."""
    (reply,) = ask(model, "echo", "ID", text, index=index).wait().replies
    return [value.decode() for value in reply["echo"]] == [text]


def wait_until(is_true, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_are_answered_refused_or_need_no_child(start):
    model = start()
    assert echo(model)
    assert ask(model, "refuse", "ID", "CapacityError", "full").wait().error == "[UNAVAILABLE] full"
    (reply,) = ask(model).wait().replies
    assert reply["echo"] == [b"nothing"]
    assert model.num_requests == 0


def test_a_child_that_dies_ends_its_requests_and_is_started_again(start, capsys):
    model = start()
    first_pid = model.child.pid
    waiting, killer = ask(model, "sleep", 0), ask(model, "exit", 7)
    for request in (waiting, killer):
        assert "the worker process ended (exit code 7)" in request.wait().error
    wait_until(lambda: not model.outage)
    assert echo(model)
    assert model.child.pid != first_pid
    assert model.num_restarts == 1
    line = "nereid: restarting the worker of the script (attempt 1 of 1), because the worker"
    assert line in capsys.readouterr().out


def test_a_child_that_hangs_ends_its_requests_and_is_started_again(start):
    model = start(hang_timeout=1)
    os.kill(model.child.pid, signal.SIGSTOP)
    request = ask(model, "echo", "ID", "late").wait()
    assert "during one step. The limit is 1 s (hang_timeout_s)" in request.error
    assert request.elapsed_s < 30
    wait_until(lambda: not model.outage)
    assert echo(model)


def test_a_child_without_requests_may_be_silent(start):
    model = start(hang_timeout=1)
    child = model.child
    time.sleep(1.5)
    assert echo(model)
    assert model.child is child


def test_requests_are_refused_at_once_while_the_child_restarts(start, tmp_path):
    flag = tmp_path / "flag"
    model = start(flag=str(flag), max_restarts=100)
    flag.touch()  # While this file exists, the child process cannot be restarted.
    ask(model, "exit", 1).wait()
    refused = ask(model, "echo", "ID", "x").wait()
    assert refused.error == "[UNAVAILABLE] the echo is restarting"
    flag.unlink()
    wait_until(lambda: not model.outage)
    assert echo(model)


def test_a_child_that_cannot_be_restarted_is_given_up_with_the_reason(start, tmp_path, capsys):
    model = start(flag=str(tmp_path / "flag"), max_restarts=2)
    (tmp_path / "flag").touch()  # While this file exists, the child process cannot be restarted.
    ask(model, "exit", 1).wait()
    wait_until(lambda: "dead" in model.outage)
    refusal = ask(model, "echo", "ID", "x").wait().error
    assert "[UNAVAILABLE] the echo is dead: the worker process ended (exit code 1)" in refusal
    assert "(The last restart failed: the script cannot be loaded)" in refusal
    output = capsys.readouterr().out
    assert "(attempt 2 of 2), because the script cannot be loaded" in output
    # When `nereid serve` reads this line, it restarts the server.
    assert "nereid: error: echo: the echo is dead" in output


def test_a_child_is_restarted_although_no_process_can_be_created_for_a_moment(start, monkeypatch):
    monkeypatch.setattr(supervised_process, "_RETRY_AFTER_S", 0.5)
    model = start(max_restarts=3)
    start_process = process_handle.start_process
    time_of_death = time.monotonic()

    def refuse_or_start(*arguments):
        if time.monotonic() < time_of_death + 0.5:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start_process(*arguments)

    monkeypatch.setattr(process_handle, "start_process", refuse_or_start)
    ask(model, "exit", 7).wait()
    wait_until(lambda: model.num_restarts == 1 or model.processes[0].has_given_up)
    wait_until(lambda: not model.outage)
    assert echo(model)


def test_deaths_count_until_the_child_has_proved_to_work(start):
    model = start(max_restarts=1)
    for number in (1, 2, 3):
        ask(model, "exit", 1).wait()
        wait_until(lambda: not model.outage)
        assert model.num_restarts == number
        assert echo(model)

    # Without an answer in between, the second death exceeds `max_restarts`.
    ask(model, "exit", 1).wait()
    wait_until(lambda: not model.outage)
    ask(model, "exit", 1).wait()
    wait_until(lambda: "dead" in model.outage)


def test_a_defect_in_the_loop_ends_the_requests_and_no_later_ones(start):
    model = start()
    request = ask(model, "sleep", 0)
    model.defect = ValueError("a bug")
    assert "the echo failed: ValueError: a bug" in request.wait().error
    assert echo(model)


def test_a_defect_in_accepting_a_request_ends_that_request_alone(start):
    model = start()
    request = Request()
    model.execute([request])
    assert "KeyError" in request.wait().error
    assert echo(model)


def test_the_end_of_the_server_ends_the_requests(start):
    model = start()
    request = ask(model, "sleep", 0)
    model.finalize()
    assert "the server is shutting down" in request.wait().error


def test_a_request_that_the_model_does_not_take_is_refused(start, monkeypatch):
    model = start()

    def refuse(request, sender):
        raise CapacityError("not now")

    monkeypatch.setattr(model, "accept", refuse)
    assert ask(model, "echo", "ID", "x").wait().error == "[UNAVAILABLE] not now"


def test_a_model_whose_child_cannot_be_loaded_does_not_start(start):
    with pytest.raises(EngineError, match="the script cannot be loaded"):
        start(loading="fails")


def test_the_death_of_a_process_ends_only_its_requests_and_the_others_continue(start, tmp_path):
    flag = tmp_path / "flag"
    model = start(num_processes=2, flag=str(flag), max_restarts=100)
    flag.touch()  # While this file exists, the child process cannot be restarted.
    lost = ask(model, "exit", 7, index=1)
    assert "the worker process ended (exit code 7)" in lost.wait().error
    assert not model.outage
    assert echo(model, index=0)
    late = ask(model, "echo", "ID", "x", index=1)
    assert "the worker process ended (exit code 7)" in late.wait().error

    flag.unlink()
    wait_until(lambda: model.processes[1].is_running)
    assert echo(model, index=1)
    assert [process.num_restarts for process in model.processes] == [0, 1]


def test_a_process_that_is_given_up_leaves_the_others_and_the_last_one_ends_the_service(
    start, tmp_path, capsys
):
    model = start(num_processes=2, flag=str(tmp_path / "flag"), max_restarts=1)
    (tmp_path / "flag").touch()
    ask(model, "exit", 1, index=1).wait()
    wait_until(lambda: model.processes[1].has_given_up)
    assert echo(model, index=0)
    output = capsys.readouterr().out
    assert "is not restarted again. The server continues with fewer processes" in output
    assert "nereid: error:" not in output
    ask(model, "exit", 1, index=0).wait()
    wait_until(lambda: "dead" in model.outage)
    wait_until(lambda: "nereid: error: echo: the echo is dead" in capsys.readouterr().out)


def test_the_end_of_the_server_ends_a_process_that_is_restarting(start, tmp_path):
    model = start(flag=str(tmp_path / "flag"), max_restarts=10**6)
    (tmp_path / "flag").touch()
    ask(model, "exit", 1).wait()
    started_s = time.monotonic()
    model.finalize()
    assert time.monotonic() - started_s < 30


STUB = """
import sys, time, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("the stub's module")
from nereid_backend.serving.process import supervised_model

class Model(supervised_model.SupervisedModel):
    title = log_prefix = "model"

    def do_periodic_work(self):
        return 0.01

Model.__abstractmethods__ = frozenset()
supervised_model._EXIT_GRACE_S = 0.0
Model().start_loop()
print("started", flush=True)
time.sleep(60)
"""
SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_a_stub_ends_if_the_server_is_killed():
    command = [sys.executable, "-c", SERVER, STUB]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"started\n"
        killed_s = time.monotonic()
        server.kill()
        assert server.stdout.read() == b""  # `read` returns when the last process has ended
    assert time.monotonic() - killed_s < 30
