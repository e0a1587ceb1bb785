"""Tests of the code with which every child process starts. Each test starts a child process."""

import os
import socket
import subprocess
import sys

import pytest
from backend.serving.fake_server import TESTS
from nereid_backend.serving.process.channel import Channel, pack

MODULE = "backend.serving.process.scripted_child"


@pytest.fixture
def child():
    """A scripted child process and the parent's end of the socket between them.

    The child process waits for its settings.
    """
    own_end, child_end = socket.socketpair()
    descriptor = child_end.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(descriptor)],
        pass_fds=[descriptor],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    child_end.close()
    yield process, own_end
    own_end.close()  # The child process ends if its connection is closed.
    process.wait(timeout=60)


def receive_until(channel, kind):
    """Receive messages until a message of this kind arrives."""
    while not any(message[0] == kind for message in channel.receive(60)):
        pass


def test_messages_that_arrive_together_with_the_settings_are_handled(child):
    process, connection = child
    connection.sendall(pack({}) + pack(["echo", "hello"]) + pack(["stop"]))
    receive_until(Channel(connection), "echo")
    assert process.wait(timeout=60) == 0


def test_settings_may_arrive_in_parts(child):
    process, connection = child
    settings = pack({"flag": "/no-such-file" + "x" * 100})
    channel = Channel(connection)
    connection.sendall(settings[:20])
    # Wait until the child process has read the first part of the settings.
    while unread_bytes(connection):
        pass
    connection.sendall(settings[20:])
    receive_until(channel, "ready")
    channel.send(["stop"])
    assert process.wait(timeout=60) == 0


def unread_bytes(connection):
    """Return the number of bytes that were sent and that the other end has not read yet."""
    import fcntl
    import struct
    import termios

    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0]
