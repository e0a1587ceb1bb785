"""Tests that child processes from a fork server behave like processes that a stub starts itself."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from nereid_backend.serving.process.forking.forked_process import ADDRESS_VARIABLE, ForkedProcess
from nereid_backend.serving.process.process_handle import ChildProcess, EngineDiedError

# The fork server of these tests imports only this module. The real modules would take seconds.
SMALL_MODULE = "nereid_backend.serving.process.process_entry"

# Tests that expect an error let `receive` wait for this number of messages. The process sends fewer
# messages, so `receive` can end only with the error.
FOREVER = 10**9


@pytest.fixture
def fork_server(make_program, monkeypatch):
    """The process of a fork server. An environment variable contains the address of the server."""
    address = f"nereid-test-{secrets.token_hex(8)}"
    module = "nereid_backend.serving.process.forking.fork_server"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        descriptor = listener.fileno()
        # The server expects four modules, because it imports different modules for each child.
        command = [sys.executable, "-m", module, str(descriptor), *4 * [SMALL_MODULE]]
        process = subprocess.Popen(command, pass_fds=[descriptor])
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


@pytest.fixture
def start(make_program):
    children = []

    def make(**program):
        children.append(ChildProcess.start(make_program(**program), lambda line: None))
        return children[-1]

    yield make
    for child in children:
        child.stop()


def is_forked(child):
    return isinstance(child._process, ForkedProcess)


def receive(child, count=1, limit_s=60.0):
    """Return the next `count` messages of a child process."""
    messages, deadline = [], time.monotonic() + limit_s
    while len(messages) < count:
        assert time.monotonic() < deadline, messages
        messages += child.receive(0.05, is_working=True)
    return messages


def test_forked_process_exchanges_messages_and_ends(fork_server, start):
    first, second = start(), start()
    assert is_forked(first)
    assert is_forked(second)
    assert {child.pid for child in fork_server.children()} == {first.pid, second.pid}
    for child in (first, second):
        child.send(["echo", child.pid])
        assert receive(child) == [["echo", child.pid]]
    first.stop()
    assert not psutil.pid_exists(first.pid)
    second.send(["echo", "still here"])
    assert receive(second) == [["echo", "still here"]]


def test_forked_process_shows_its_own_command_line(fork_server, start):
    words = psutil.Process(start().pid).cmdline()
    assert words[1:3] == ["-m", "backend.serving.process.scripted_child"]
    assert words[-1].strip() == "worker of the script"


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        (lambda child: os.kill(child.pid, signal.SIGKILL), r"ended \(signal 9\)"),
        (lambda child: child.send(["exit", 3]), r"ended \(exit code 3\)"),
        (lambda child: child.send(["fail", "gone"]), r"ended \(exit code 1\): gone$"),
    ],
)
def test_stub_learns_how_a_forked_process_ended(fork_server, start, end, ending):
    child = start()
    end(child)
    with pytest.raises(EngineDiedError, match=ending):
        receive(child, FOREVER)
    assert is_forked(child)


def test_hanging_process_is_killed(fork_server, start):
    child = start(hang_timeout=1)
    child.send(["sleep", 600])
    with pytest.raises(EngineDiedError, match="was killed, because it sent no message"):
        receive(child)
    assert is_forked(child)
    assert not psutil.pid_exists(child.pid)


def test_process_of_a_dead_stub_is_killed(fork_server, start):
    child = start()
    child.send(["sleep", 600])
    process = psutil.Process(child.pid)
    child._process._connection.close()  # When a stub dies, the kernel closes the connection.
    process.wait(30)


def test_child_process_ends_with_the_fork_server_and_the_next_one_is_started_alone(
    fork_server, start
):
    child = start()
    fork_server.kill()
    with pytest.raises(EngineDiedError, match="the worker process ended"):
        receive(child)
    assert not is_forked(start())


def test_different_environment_gets_a_process_of_its_own(fork_server, start, monkeypatch):
    assert is_forked(start())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not is_forked(start())


def test_without_a_fork_server_the_stub_starts_the_process(start, monkeypatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, f"nereid-test-{secrets.token_hex(8)}")
    assert not is_forked(start())
