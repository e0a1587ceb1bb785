"""Tests with recorded transcripts. Every registered name has at least one transcript."""

import json

import pytest
from nereid_parsers import fold, get_format
from nereid_parsers.formats.registry import REASONING, TOOLS
from parsers.support import DATA, SIZES, check_order, stream, transcripts

NAMED = [f"reasoning.{name}" for name in REASONING] + [f"tools.{name}" for name in TOOLS]
MISSING = [name for name in NAMED if not (DATA / f"{name}.json").is_file()]
if MISSING:
    raise FileNotFoundError(f"registered formats without a transcript in {DATA}: {MISSING}")

CASES = transcripts()


def as_expected(message):
    """Return a parsed message as a dict that can be compared with a recorded transcript."""
    return {
        "reasoning": (message.reasoning or "").strip() or None,
        "content": (message.content or "").strip() or None,
        "tool_calls": [
            {"name": call.name, "arguments": json.loads(call.arguments)}
            for call in message.tool_calls
        ],
    }


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_a_transcript_is_parsed_as_recorded_at_every_piece_size(case):
    fmt = get_format(**case["format"])
    for size in SIZES:
        events = stream(fmt, case["output"], size, tools=case["tools"], prompt=case["prompt"])
        check_order(events)
        assert as_expected(fold(events)) == case["expected"], size


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_events_of_a_prefix_are_never_withdrawn(case):
    fmt = get_format(**case["format"])
    events = stream(fmt, case["output"], 1, tools=case["tools"], prompt=case["prompt"])
    final_message = fold(events)
    for count in range(len(events)):
        message_of_prefix = fold(events[:count])
        assert (final_message.reasoning or "").startswith(message_of_prefix.reasoning or "")
        assert (final_message.content or "").startswith(message_of_prefix.content or "")
        for call, final_call in zip(
            message_of_prefix.tool_calls, final_message.tool_calls, strict=False
        ):
            assert (call.name, call.id) == (final_call.name, final_call.id)
            assert final_call.arguments.startswith(call.arguments)


@pytest.mark.parametrize("name", ["tools.qwen3_coder", "tools.hermes", "tools.pythonic"])
def test_string_arguments_arrive_while_they_are_written(name):
    case = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))[0]
    events = stream(get_format(**case["format"]), case["output"], 1, tools=case["tools"])
    deltas = [event for event in events if type(event).__name__ == "ArgumentsDelta"]
    longest = max(len(text) for call in case["expected"]["tool_calls"]
                  for text in call["arguments"].values() if isinstance(text, str))  # fmt: skip
    assert len(deltas) > longest
