from nereid_backend import RequestUpdate
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.serving.executor.streams import MAX_UNCONSUMED_STEPS, Pacer, Sequence, Stream
from nereid_backend.serving.wire import Ending, Opening, SequenceDelta

OPENING = Opening(b"context", (0,))


def make_stream(now=100.0, n=1):
    """Return a stream with `n` sequences whose last step was sent at `now`."""
    sequences = [Sequence(index, slot=index) for index in range(n)]
    return Stream("1", None, serial=1, sequences=sequences, opening=OPENING, last_sent=now)


def update(*token_ids, finish=None, index=0, **fields):
    """Return an update with new tokens, and with the finish reason `finish`, of one sequence."""
    return RequestUpdate("1", list(token_ids), finish, index=index, **fields)


def test_the_first_tokens_are_sent_at_once():
    stream = make_stream()
    stream.add(update(5))
    assert stream.due_at(interval_s=0.05, heartbeat_s=0.25) <= 100.0


def test_tokens_are_merged_until_the_next_step_of_the_stream():
    stream = make_stream()
    stream.add(update(5))
    stream.take_step(100.0)
    stream.add(update(6))
    stream.add(update(7))
    assert stream.due_at(0.05, 0.25) == 100.05
    state = stream.take_step(100.05)
    assert state.deltas[0].token_ids == (6, 7)
    assert (state.step, state.opening, state.is_last) == (2, None, False)


def test_an_unconsumed_stream_waits_but_its_last_step_does_not():
    stream = make_stream()
    for step_number in range(MAX_UNCONSUMED_STEPS):
        stream.add(update(5))
        stream.take_step(100.0)
        stream.unconsumed_steps.append(step_number)
    assert not stream.may_send()

    stream.add(update(6, finish="length"))
    assert stream.may_send()
    assert stream.due_at(0.05, 0.25) <= 100.0
    state = stream.take_step(100.0)
    assert state.deltas[0].token_ids == (6,)
    assert state.deltas[0].ending == Ending("length")
    assert state.is_last


def test_only_the_first_step_contains_the_context():
    stream = make_stream()
    assert stream.take_step(100.0).opening == OPENING
    assert stream.take_step(100.0).opening is None


def test_a_stream_without_new_tokens_sends_a_heartbeat():
    assert make_stream().due_at(0.05, heartbeat_s=0.25) == 100.25


def test_the_interval_grows_with_the_number_of_streams_up_to_a_limit():
    pacer = Pacer(responses_per_second=500)
    assert pacer.interval_s(1) == 0.002
    assert pacer.interval_s(32) == 0.064
    assert pacer.interval_s(100_000) == 0.1


def test_the_heartbeats_of_many_streams_need_at_most_half_of_the_rate():
    pacer = Pacer(responses_per_second=320)
    assert pacer.heartbeat_s(10, heartbeat_s=0.25) == 0.25
    assert pacer.heartbeat_s(200, heartbeat_s=0.25) == 1.25


def test_a_step_contains_a_part_for_each_sequence_with_new_tokens():
    stream = make_stream(n=3)
    stream.add(update(5, index=2, cumulative_logprob=-1.0))
    stream.add(update(6, index=0, cumulative_logprob=-2.0, num_cached_tokens=16))
    stream.add(update(7, index=2, cumulative_logprob=-3.0))
    state = stream.take_step(100.0)
    assert state.deltas == (
        SequenceDelta(0, (6,), cumulative_logprobs=(-2.0,), num_cached_tokens=16),
        SequenceDelta(2, (5, 7), cumulative_logprobs=(-1.0, -3.0)),
    )
    assert stream.take_step(100.1).deltas == ()


def test_a_stream_ends_when_all_its_sequences_have_ended():
    stream = make_stream(n=2)
    stream.add(update(5, index=1, finish="length"))
    assert not stream.has_ended
    assert not stream.take_step(100.0).is_last
    stream.add(update(6, finish="stop"))
    state = stream.take_step(100.1)
    assert state.is_last
    assert [part.index for part in state.deltas] == [0]


def test_log_probabilities_of_merged_updates_stay_in_order():
    stream = make_stream()
    first, second, third = [TokenLogprobs([token], [-1.0], rank=1) for token in range(3)]
    stream.add(update(0, logprobs=[first], prompt_logprobs=[None, third]))
    stream.add(update(1, 2, logprobs=[second, third]))
    (delta,) = stream.take_step(100.0).deltas
    assert delta.logprobs == (first, second, third)
    assert delta.prompt_logprobs == (None, third)

    stream.add(update(3, logprobs=[first]))
    (delta,) = stream.take_step(100.1).deltas
    assert (delta.logprobs, delta.prompt_logprobs) == ((first,), None)


def test_a_refusal_of_the_grammar_names_the_field_of_the_request():
    stream = make_stream()
    message = "structural_tag: the parenthesis is not closed"
    assert stream.refusal(message) == message
    stream.grammar_field = "regex"
    assert stream.refusal(message) == "regex: the parenthesis is not closed"
    assert stream.refusal("prompt: is empty") == "prompt: is empty"
