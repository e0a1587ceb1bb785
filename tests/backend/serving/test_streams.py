from nereid_backend import RequestUpdate
from nereid_backend.serving.streams import MAX_UNCONSUMED_STEPS, Pacer, Stream
from nereid_backend.serving.wire import Ending, Opening


def make_stream(now=100.0):
    return Stream("1", None, 0, 1, Opening(b"context", "/path"), now)


def update(*ids, finish=None):
    return RequestUpdate("1", list(ids), finish)


def test_the_first_tokens_are_sent_at_once():
    stream = make_stream()
    stream.add(update(5))
    assert stream.due_at(interval_s=0.05, heartbeat_s=0.25) <= 100.0


def test_tokens_are_merged_until_the_streams_turn_comes():
    stream = make_stream()
    stream.add(update(5))
    stream.take_step(100.0)
    stream.add(update(6))
    stream.add(update(7))
    assert stream.due_at(0.05, 0.25) == 100.05
    ids, state = stream.take_step(100.05)
    assert ids.tolist() == [6, 7]
    assert (state.step, state.opening, state.ending) == (2, None, None)


def test_an_unconsumed_stream_waits_but_its_last_step_does_not():
    stream = make_stream()
    for order in range(MAX_UNCONSUMED_STEPS):
        stream.add(update(5))
        stream.take_step(100.0)
        stream.unconsumed.append(order)
    assert not stream.may_send()
    stream.add(update(6, finish="length"))
    assert stream.may_send()
    assert stream.due_at(0.05, 0.25) <= 100.0
    ids, state = stream.take_step(100.0)
    assert ids.tolist() == [6]
    assert state.ending == Ending("length")


def test_only_the_first_step_brings_the_context():
    stream = make_stream()
    assert stream.take_step(100.0)[1].opening == Opening(b"context", "/path")
    assert stream.take_step(100.0)[1].opening is None


def test_a_stream_with_nothing_to_say_sends_a_heartbeat():
    assert make_stream().due_at(0.05, heartbeat_s=0.25) == 100.25


def test_more_streams_wait_longer_each_but_never_long():
    pacer = Pacer(responses_per_second=500)
    assert pacer.interval_s(1) == 0.002
    assert pacer.interval_s(32) == 0.064
    assert pacer.interval_s(100_000) == 0.1
