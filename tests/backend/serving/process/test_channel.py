import socket
import threading

import pytest
from nereid_backend.serving.process.channel import Channel, ChannelClosedError


def pair():
    """Return the two ends of a connection."""
    return tuple(Channel(end) for end in socket.socketpair())


def test_messages_arrive_whole_and_in_order():
    sending_end, receiving_end = pair()
    big = ["x" * 1_000_000, list(range(1000)), b"\x00\xff", None, 1.5]
    messages = [[number, big] for number in range(5)]
    thread = threading.Thread(target=lambda: [sending_end.send(message) for message in messages])
    thread.start()
    received = []
    while len(received) < len(messages):
        received += receiving_end.receive(5.0)
    thread.join()
    assert received == messages
    sending_end.close()
    receiving_end.close()


def test_receive_returns_an_empty_list_without_a_message():
    one, other = pair()
    assert other.receive(0) == []
    one.close()
    other.close()


def test_send_and_receive_fail_if_the_other_end_is_closed():
    one, other = pair()
    one.close()
    with pytest.raises(ChannelClosedError):
        other.receive(None)
    with pytest.raises(ChannelClosedError):
        other.send("x")
    other.close()
