"""Tests of the messages between the processes that prepare images."""

import os
from multiprocessing import Pipe, reduction

import pytest
from nereid_backend.vision import large_messages
from nereid_backend.vision.large_messages import Message, receive_message

_SMALL = b"done" * 3
_LARGE = os.urandom(3 * 2**20)


@pytest.mark.parametrize("data", [_SMALL, _LARGE, b"a" * large_messages._MIN_FILE_BYTES])
def test_a_message_arrives_unchanged_and_can_be_forwarded(data):
    client, worker = Pipe()
    worker_to_child, child = Pipe()

    Message(data).send(client)
    message = receive_message(worker)
    assert message.starts_with(data[:5])
    assert not message.starts_with(b"other")

    # The same message can be sent twice, because sending does not consume it.
    for _ in range(2):
        message.send(worker_to_child)
        assert receive_message(child).read() == data
    assert message.read() == data


def test_a_large_message_is_sent_through_the_socket_if_there_are_no_files_in_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    message = Message(_LARGE)
    assert message._descriptor is None
    assert message.read() == _LARGE


def test_the_descriptors_of_messages_are_closed():
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    sender, receiver = Pipe()
    num_before = num_descriptors()
    for _ in range(5):
        Message(_LARGE).send(sender)
        assert receive_message(receiver).read() == _LARGE
    assert num_descriptors() == num_before


def test_a_message_without_its_descriptor_is_an_error_of_the_connection():
    sender, receiver = Pipe()
    sender.send_bytes(b"")
    sender.close()
    with pytest.raises((EOFError, OSError)):
        receive_message(receiver)


def test_a_descriptor_that_is_not_a_file_is_an_error_of_the_connection():
    sender, receiver = Pipe()
    pipe_reader, pipe_writer = os.pipe()
    sender.send_bytes(b"")
    reduction.send_handle(sender, pipe_reader, None)
    os.close(pipe_reader)
    os.close(pipe_writer)
    with pytest.raises((EOFError, OSError)):
        receive_message(receiver).read()


def test_a_message_with_too_many_bytes_is_refused():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, large_messages._MAX_BYTES + 1)
    with pytest.raises(OSError, match="a message has"):
        Message.from_file(descriptor).read()
