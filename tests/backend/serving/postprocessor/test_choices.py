"""Tests that each of several choices of a request has the same output as the choice alone.

The steps of the choices arrive in random order.
"""

import pytest
from backend.serving.postprocessor.test_choice import QWEN, START, TOOLS, Texts, decode, ids, row
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.serving.postprocessor.choice import Choice
from nereid_backend.serving.postprocessor.choices import Choices
from nereid_backend.serving.postprocessor.message_builder import ParsedMessage
from nereid_backend.serving.wire import Ending, SequenceDelta, StepState, StreamContext

SCRIPTS = [
    "<think>\nhm\n</think>\n\nOne moment, please. STOP here",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "Just text, with ST and STO in it.",
    "",
]
EOS = 7


def context(**fields):
    """Return the context of a chat with tools and the stop string "STOP"."""
    known = {"stream": True, "num_prompt_tokens": 4, "prompt": START, "tools": TOOLS}
    return StreamContext(**known | {"stop": ("STOP",), "prompt_token_ids": (1,)} | fields)


def open_choices(**fields):
    """Return the choices of one request."""
    ctx = context(**fields)
    choices = [Choice(ctx, i, decode, ParsedMessage(QWEN, ctx), Texts()) for i in range(ctx.n)]
    return Choices(ctx, slots=tuple(range(ctx.n)), choices=choices)


class Sender:
    """A sequence whose tokens are those of a script. Each token has the log-probability -0.5."""

    def __init__(self, index, script):
        self.index, self.ids, self.sent = index, [*ids(script), EOS], 0

    @property
    def is_done(self):
        return self.sent == len(self.ids)

    def next_delta(self, count):
        """Return the next `count` tokens as an update of the sequence."""
        tokens = self.ids[self.sent : self.sent + count]
        counts = range(self.sent + 1, self.sent + len(tokens) + 1)
        self.sent += len(tokens)
        return SequenceDelta(
            self.index,
            tuple(tokens),
            cumulative_logprobs=tuple(-0.5 * num_tokens for num_tokens in counts),
            logprobs=tuple(map(row, tokens)),
            ending=Ending("stop", EOS) if self.is_done else None,
        )


def add_up(pieces, totals):
    """Append the outputs `pieces` to the joined output of each choice in `totals`."""
    for piece in pieces:
        delta = piece.delta
        total = totals.setdefault(
            delta.get("index", 0),
            {"reasoning": "", "content": "", "text": "", "arguments": "", "tokens": [], "ends": []},
        )
        total["text"] += piece.text
        for name in ("reasoning", "content"):
            total[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            total["arguments"] += call["arguments"]
        total["tokens"] += [entry["token_id"] for entry in delta.get("logprobs", [])]
        assert delta.get("token_ids", []) == [e["token_id"] for e in delta.get("logprobs", [])]
        if "finish_reason" in delta:
            total["ends"].append((delta["finish_reason"], delta.get("stop_reason"), delta["usage"]))
            total["sum"] = delta["cumulative_logprob"]


def run(scripts, schedule, **fields):
    """Return the joined output of each choice by its index.

    An item of `schedule` describes one step: a list of pairs (index of a choice, number of tokens).
    """
    choices = open_choices(n=len(scripts), **fields)
    senders = [Sender(index, script) for index, script in enumerate(scripts)]
    totals = {}
    while not all(sender.is_done for sender in senders):
        deltas = {}
        for index, count in next(schedule):
            sender = senders[index % len(senders)]
            if not sender.is_done and sender.index not in deltas:
                deltas[sender.index] = sender.next_delta(count)
        is_last = all(sender.is_done for sender in senders)
        choices.add(step_state([deltas[index] for index in sorted(deltas)], is_last=is_last))
        add_up(choices.take_outputs(is_last=is_last), totals)
    return totals


def step_state(deltas, *, is_last=False):
    return StepState(slot=0, serial=1, step=1, deltas=tuple(deltas), is_last=is_last)


def alone(script):
    """Return the joined output of a request with only this choice."""
    return run([script], iter(lambda: [(0, 1)], None))[0]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=4), st.booleans())
def test_interleaved_choices_have_the_same_output_as_each_choice_alone(data, scripts, stream):
    turn = st.tuples(st.integers(0, 3), st.integers(1, 30))
    turns = data.draw(st.lists(st.lists(turn, min_size=1, max_size=4), max_size=30))
    # The last steps have tokens of every choice, so that all choices end.
    last_turns = [[(index, 5) for index in range(4)]] * 50
    schedule = iter([*turns, *last_turns])

    totals = run(scripts, schedule, stream=stream)
    assert sorted(totals) == list(range(len(scripts)))
    for index, script in enumerate(scripts):
        assert totals[index] == alone(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_log_probability_is_sent_once_and_none_after_a_stop_string(script):
    text, stop_string, _ = script.partition("STOP")
    tokens = ids(text + stop_string) if stop_string else [*ids(text), EOS]
    total = alone(script)
    assert total["tokens"] == tokens
    assert total["sum"] == -0.5 * len(tokens)
    ((_, _, usage),) = total["ends"]
    assert usage["completion_tokens"] == len(tokens)


def test_without_streaming_all_choices_are_sent_at_the_end_in_order():
    choices = open_choices(n=2, stream=False)
    second_to_end, first_to_end = Sender(0, "second to end"), Sender(1, "first to end")
    choices.add(step_state([first_to_end.next_delta(100)]))
    assert choices.take_outputs(is_last=False) == []

    choices.add(step_state([second_to_end.next_delta(100)], is_last=True))
    texts = [output.text for output in choices.take_outputs(is_last=True)]
    assert texts == ["second to end", "first to end"]


def test_a_stop_string_is_signalled_until_its_choice_has_ended():
    choices = open_choices(n=2)
    choices.add(step_state([Sender(1, "xSTOPy").next_delta(6)]))
    choices.take_outputs(is_last=False)
    assert choices.stopped_slots() == [1]

    choices.add(step_state([SequenceDelta(1, (), ending=Ending("abort"))]))
    (output,) = choices.take_outputs(is_last=False)
    assert (output.delta["finish_reason"], output.delta["stop_reason"]) == ("stop", "STOP")
    assert choices.stopped_slots() == []
