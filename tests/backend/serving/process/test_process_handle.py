"""Tests of a child process that works, dies or hangs, and of one whose loading fails."""

import os
import signal
import time

import psutil
import pytest
from nereid_backend import CapacityError, EngineError, RequestError
from nereid_backend.serving.process import process_handle
from nereid_backend.serving.process.process_handle import (
    ChildProcess,
    EngineDiedError,
    refusal_error,
)


@pytest.fixture
def start(make_program):
    children = []

    def make(**program):
        child = ChildProcess.start(make_program(**program), lambda line: None)
        children.append(child)
        return child

    yield make
    for child in children:
        child.stop()


def receive(child, count=1, limit_s=60.0, *, is_working=True):
    """Return the next `count` messages of a child process."""
    messages, deadline = [], time.monotonic() + limit_s
    while len(messages) < count:
        assert time.monotonic() < deadline, messages
        messages += child.receive(0.05, is_working=is_working)
    return messages


def scripted_children():
    """Return the running child processes of this process that run scripted_child.py."""
    children = psutil.Process().children()
    return [child for child in children if any("scripted_child" in arg for arg in child.cmdline())]


# Tests that expect an error let `receive` wait for this number of messages. The process sends fewer
# messages, so `receive` can end only with the error.
FOREVER = 10**9


def test_messages_are_exchanged_in_order(start, make_program):
    lines = []
    child = ChildProcess.start(make_program(), lines.append)
    assert lines == ["loading the script"]
    assert child.info == {"device": "cpu"}
    assert child.load_s > 0
    for number in range(3):
        child.send(["echo", number])
    assert receive(child, 3) == [["echo", 0], ["echo", 1], ["echo", 2]]
    child.stop()
    assert not psutil.pid_exists(child.pid)


def test_loading_that_fails_is_an_error_with_the_reason(start):
    with pytest.raises(EngineError, match=r"^the script cannot be loaded$"):
        start(loading="fails")


def test_a_process_that_dies_while_it_loads_is_an_error_with_its_exit_code(start):
    with pytest.raises(EngineDiedError, match=r"the worker process ended \(exit code 3\)"):
        start(loading="dies")


def test_loading_has_a_time_limit_and_the_caller_is_called_meanwhile(make_program, monkeypatch):
    calls = []
    program = make_program(loading="hangs", start_timeout=1)
    # The process ignores the message "stop" while it loads.
    monkeypatch.setattr(process_handle, "_STOP_TIMEOUT_S", 0.1)
    with pytest.raises(
        EngineError, match=r"not ready after 1 s, which is the limit \(start_timeout_s\)"
    ):
        ChildProcess.start(program, lambda line: None, lambda: calls.append(1))
    assert len(calls) > 2
    assert not scripted_children()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_any_exception_of_a_callback_ends_the_process(make_program, monkeypatch, error):
    def interrupt():
        assert scripted_children()
        raise error

    monkeypatch.setattr(process_handle, "_STOP_TIMEOUT_S", 0.1)
    with pytest.raises(error):
        ChildProcess.start(make_program(loading="hangs"), lambda line: None, interrupt)
    assert not scripted_children()


def test_a_killed_process_is_noticed_at_once_and_later_messages_are_dropped(start):
    child = start()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=r"the worker process ended \(signal 9\). See"):
        receive(child, FOREVER)
    for _ in range(100):
        child.send(["echo", "x" * 10_000])


@pytest.mark.parametrize("kind", ["fail", "raise"])
def test_an_error_in_a_step_or_in_a_message_is_the_reason_of_the_death(start, kind):
    child = start()
    child.send([kind, "CUDA error: gone"])
    with pytest.raises(EngineDiedError, match=r"ended \(exit code 1\): CUDA error: gone$"):
        receive(child, FOREVER)


def test_a_process_that_closes_its_connection_and_lingers_counts_as_dead(start, monkeypatch):
    monkeypatch.setattr(process_handle, "_EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(process_handle, "_STOP_TIMEOUT_S", 0.1)
    child = start()
    child.send(["linger", "CUDA error: gone"])
    with pytest.raises(
        EngineDiedError, match="the worker process closed its connection: CUDA error: gone"
    ):
        receive(child, FOREVER)


def test_a_process_that_hangs_is_killed_even_when_it_reads_nothing(start):
    child = start(hang_timeout=1)
    os.kill(child.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    # The messages are larger than the socket's buffer. `send` must not wait for the process.
    for number in range(200):
        child.send(["echo", number, "x" * 40_000])
    assert time.monotonic() - started_s < 20
    with pytest.raises(
        EngineDiedError, match=r"sent no message for 1 s .* limit is 1 s \(hang_timeout_s\)"
    ):
        receive(child, FOREVER)
    assert not psutil.pid_exists(child.pid)


def test_a_process_that_computes_longer_than_the_limit_is_not_killed(start, monkeypatch):
    # The replaced function reports that the process uses a whole CPU, even on a busy machine.
    monkeypatch.setattr(process_handle, "cpu_seconds", lambda pid: time.monotonic())
    child = start(hang_timeout=1)
    child.send(["sleep", 1.5])
    child.send(["echo", 1])
    assert receive(child) == [["echo", 1]]


def test_a_process_without_work_may_be_silent(start):
    child = start(hang_timeout=1)
    for _ in range(25):
        assert child.receive(0.05, is_working=False) == []
    child.send(["echo", 1])
    assert receive(child) == [["echo", 1]]


def test_a_refusal_has_the_class_of_its_error():
    for kind in (CapacityError, RequestError, EngineError):
        error = refusal_error(kind.__name__, "no")
        assert (type(error), str(error)) == (kind, "no")
    assert type(refusal_error("ZeroDivisionError", "no")) is EngineError
