"""Tests of the inbox, which receives messages while its process computes."""

import socket
import threading

import pytest
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.inbox import Inbox


@pytest.fixture
def ends():
    pair = [Channel(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def test_the_sender_never_waits_until_the_process_reads(ends):
    parent, child = ends
    inbox = Inbox(child)
    texts = ["x" * 12_000] * 400  # 5 MB, far more than the buffer of the socket
    sender = threading.Thread(target=lambda: [parent.send([text]) for text in texts])
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    received = []
    while len(received) < len(texts):
        received += inbox.receive(10)
    assert received == [[text] for text in texts]


def test_the_end_of_the_channel_comes_after_all_messages(ends):
    parent, child = ends
    inbox = Inbox(child)
    parent.send(["last"])
    parent.close()
    assert inbox.receive(None) == [["last"]]
    for _ in range(2):
        with pytest.raises(ChannelClosedError):
            inbox.receive(None)


def test_an_empty_inbox_returns_nothing_after_the_timeout(ends):
    inbox = Inbox(ends[1])
    assert inbox.receive(0) == []
    assert inbox.receive(0.01) == []
