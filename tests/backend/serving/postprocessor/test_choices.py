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
    known = {"stream": True, "num_prompt_tokens": 4, "prompt": START, "tools": TOOLS}
    return StreamContext(**known | {"stop": ("STOP",), "prompt_token_ids": (1,)} | fields)


def open_answers(ctx):
    made = [Choice(ctx, index, decode, ParsedMessage(QWEN, ctx), Texts()) for index in range(ctx.n)]
    return Choices(ctx, tuple(range(ctx.n)), made)


class Sender:
    """A sequence whose tokens are those of a script. Each token has the log-probability -0.5."""

    def __init__(self, index, script):
        self.index, self.ids, self.sent = index, [*ids(script), EOS], 0

    @property
    def is_done(self):
        return self.sent == len(self.ids)

    def part(self, count):
        """Return the next `count` tokens as an update of the sequence."""
        tokens = self.ids[self.sent : self.sent + count]
        sums = tuple(-0.5 * (self.sent + at + 1) for at in range(len(tokens)))
        self.sent += len(tokens)
        ending = Ending("stop", EOS) if self.is_done else None
        rows = tuple(map(row, tokens))
        return SequenceDelta(self.index, tuple(tokens), sums, rows, ending=ending)


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
    answers = open_answers(context(n=len(scripts), **fields))
    senders = [Sender(index, script) for index, script in enumerate(scripts)]
    totals = {}
    while not all(sender.is_done for sender in senders):
        told = {}
        for sequence, count in next(schedule):
            sender = senders[sequence % len(senders)]
            if not sender.is_done and sender.index not in told:
                told[sender.index] = sender.part(count)
        steps = [told[index] for index in sorted(told)]
        is_last = all(sender.is_done for sender in senders)
        answers.add(StepState(0, 1, 1, tuple(steps), is_last))
        add_up(answers.take_outputs(is_last=is_last), totals)
    return totals


def alone(script):
    """Return the joined output of a request with only this choice."""
    return run([script], iter(lambda: [(0, 1)], None))[0]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=4), st.booleans())
def test_interleaved_choices_have_the_same_output_as_each_choice_alone(data, scripts, stream):
    turn = st.tuples(st.integers(0, 3), st.integers(1, 30))
    turns = data.draw(st.lists(st.lists(turn, min_size=1, max_size=4), max_size=30))
    rest = [(index, 5) for index in range(4)]
    schedule = iter([*turns, *([rest] * 50)])
    totals = run(scripts, schedule, stream=stream)
    assert sorted(totals) == list(range(len(scripts)))
    for index, script in enumerate(scripts):
        assert totals[index] == alone(script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_log_probability_is_sent_once_and_none_after_a_stop_string(script):
    shown = script[: script.index("STOP") + 4] if "STOP" in script else script
    tokens = ids(shown) + ([] if "STOP" in script else [EOS])
    total = alone(script)
    assert total["tokens"] == tokens
    assert total["sum"] == -0.5 * len(tokens)
    ((_, _, usage),) = total["ends"]
    assert usage["completion_tokens"] == len(tokens)


def test_without_streaming_all_choices_are_sent_at_the_end_in_order():
    answers = open_answers(context(n=2, stream=False))
    senders = [Sender(0, "second to end"), Sender(1, "first to end")]
    answers.add(StepState(0, 1, 1, (senders[1].part(100),)))
    assert answers.take_outputs(is_last=False) == []
    answers.add(StepState(0, 1, 2, (senders[0].part(100),), is_last=True))
    assert [piece.text for piece in answers.take_outputs(is_last=True)] == [
        "second to end",
        "first to end",
    ]


def test_a_stop_string_is_signalled_until_its_choice_has_ended():
    answers = open_answers(context(n=2))
    senders = [Sender(0, "going on and on"), Sender(1, "xSTOPy")]
    answers.add(StepState(0, 1, 1, (senders[1].part(6),)))
    answers.take_outputs(is_last=False)
    assert answers.stopped_slots() == [1]
    answers.add(StepState(0, 1, 2, (SequenceDelta(1, (), ending=Ending("abort")),)))
    (piece,) = answers.take_outputs(is_last=False)
    assert (piece.delta["finish_reason"], piece.delta["stop_reason"]) == ("stop", "STOP")
    assert answers.stopped_slots() == []
