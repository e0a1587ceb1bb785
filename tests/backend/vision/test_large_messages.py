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
    first, worker_end = Pipe()
    worker_start, last = Pipe()
    Message(data).send(first)
    message = receive_message(worker_end)
    assert message.starts_with(data[:5])
    assert not message.starts_with(b"other")
    for _ in range(2):  # a message can be sent again
        message.send(worker_start)
        assert receive_message(last).read() == data
    assert message.read() == data


def test_a_large_message_is_sent_through_the_socket_if_there_are_no_files_in_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    message = Message(_LARGE)
    assert message._descriptor is None
    assert message.read() == _LARGE


def test_the_descriptors_of_messages_are_closed():
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    start, end = Pipe()
    before = num_descriptors()
    for _ in range(5):
        Message(_LARGE).send(start)
        assert receive_message(end).read() == _LARGE
    assert num_descriptors() == before


def test_an_invalid_descriptor_is_an_error_of_the_connection():
    start, end = Pipe()
    start.send_bytes(b"")
    start.close()
    with pytest.raises((EOFError, OSError)):
        receive_message(end)

    end.close()

    start, end = Pipe()
    reader, writer = os.pipe()
    start.send_bytes(b"")
    reduction.send_handle(start, reader, None)
    os.close(reader)
    os.close(writer)
    with pytest.raises((EOFError, OSError)):
        receive_message(end).read()


def test_a_message_with_too_many_bytes_is_refused():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, large_messages._MAX_BYTES + 1)
    with pytest.raises(OSError, match="a message has"):
        Message(descriptor=descriptor).read()
