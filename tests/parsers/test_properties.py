"""Tests that random text causes no exception, is never lost, and may arrive in any pieces.

The environment variable NEREID_EXAMPLES sets the number of texts for each format.
"""

import itertools
import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nereid_parsers import STRICT, Policy, fold
from nereid_parsers.format import BrokenArguments, StrayClose, UnknownTool
from parsers.support import TOOLS, all_formats, check_order, markers_of, stream_at

EXAMPLES = int(os.environ.get("NEREID_EXAMPLES", "6"))
FORMATS = all_formats()

BITS = [
    "{", "}", "[", "]", '"', "\\", '\\"', ",", ":", " ", "\n", "\n\n", "a", "f", "g", '"name"',
    '"arguments"', '"parameters"', '{"name": "f", "arguments": {"a": "x"}}', '{"a": 1}', "f(a=1)",
    "f(", "a=", "'x'", ")", "=", "null", "nul", "true", "12", "hello", "é", "</", "<", "<|", "(",
    "functions.f", "```", "text", ".", "{}", ";", "\\u00e9", "\\ud83d", "'''", "\u3000", "\x00",
]  # fmt: skip

POLICIES = [
    None,
    STRICT,
    Policy(unknown_tool=UnknownTool.CONTENT),
    Policy(unknown_tool=UnknownTool.DROP),
    Policy(broken_arguments=BrokenArguments.REPAIR_OR_RAW),
    Policy(stray_close=StrayClose.REASONING),
]
POLICIES_AND_TOOLS = list(itertools.product(POLICIES, [TOOLS, None, []]))
NO_CHECKS = list(HealthCheck)


def pieces_of(fmt):
    """Return pieces of text for a format: its markers, whole and incomplete, and other text."""
    markers = markers_of(fmt)
    shortened = [marker[:size] for marker in markers for size in (1, 3, -1) if marker[:size]]
    return [*markers, *markers, *shortened, *BITS, *BITS, *BITS]


def garbage(fmt):
    """Return a strategy for texts that consist of random pieces. `pieces_of` lists the pieces."""
    return st.lists(st.sampled_from(pieces_of(fmt)), max_size=14).map("".join)


def traced_text(spans, kind):
    """Return the concatenated text of all spans of the kind `kind`, such as "content"."""
    return "".join(text for span_kind, text in spans if span_kind == kind)


def without_blanks(text):
    """Return `text` without white space.

    Content may repeat the white space before a tool call, and line breaks separate the blocks of
    reasoning.
    """
    return "".join(text.split())


def check(fmt, text, cuts, kwargs):
    """Assert that the message does not depend on `cuts`, and that the trace contains all text."""
    expected = fold(stream_at(fmt, text, [], **kwargs))
    spans = []  # pairs of a kind, such as "reasoning", and a text

    events = stream_at(
        fmt, text, cuts, trace=lambda kind, piece: spans.append((kind, piece)), **kwargs
    )

    example = (text, cuts, kwargs)
    check_order(events)
    assert fold(events) == expected, example
    assert "".join(piece for _, piece in spans) == text, example
    reasoning = traced_text(spans, "reasoning")
    assert without_blanks(reasoning) == without_blanks(expected.reasoning or ""), example
    # The formats "append_think" repeat the marker of the prompt in the content.
    if "append_think" not in fmt.name:
        content = traced_text(spans, "content")
        assert without_blanks(content) == without_blanks(expected.content or ""), example


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_garbage_is_never_lost_never_raises_and_does_not_depend_on_the_pieces(fmt):
    @settings(max_examples=min(EXAMPLES, 100), deadline=None, suppress_health_check=NO_CHECKS)
    @given(
        text=garbage(fmt),
        policy_and_tools=st.sampled_from(POLICIES_AND_TOOLS),
        prompt=st.one_of(st.none(), st.just("x"), garbage(fmt)),
        positions=st.sets(st.integers(1, 80)),
    )
    def run(text, policy_and_tools, prompt, positions):
        policy, tools = policy_and_tools
        cuts = [position for position in positions if position < len(text)]
        check(fmt, text, cuts, {"policy": policy, "tools": tools, "prompt": prompt})

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_random_garbage_is_never_lost_never_raises_and_does_not_depend_on_the_pieces(fmt):
    """Each example draws only one seed, so that thousands of examples are fast."""
    pieces = pieces_of(fmt)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=NO_CHECKS)
    @given(seed=st.integers(0, 2**64))
    def run(seed):
        rng = random.Random(seed)
        text = "".join(rng.choices(pieces, k=rng.randrange(15)))
        prompt = rng.choice([None, "x", "".join(rng.choices(pieces, k=3))])
        policy, tools = rng.choice(POLICIES_AND_TOOLS)
        positions = range(1, len(text))
        # Every third text arrives character by character, and the others in random pieces.
        cuts = positions if seed % 3 == 0 else [cut for cut in positions if rng.random() < 0.2]
        check(fmt, text, cuts, {"policy": policy, "tools": tools, "prompt": prompt})

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_repaired_arguments_are_always_json_objects(fmt):
    policy = Policy(broken_arguments=BrokenArguments.REPAIR_OR_DROP)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=NO_CHECKS)
    @given(text=garbage(fmt))
    def run(text):
        message = fold(stream_at(fmt, text, [], tools=TOOLS, policy=policy))
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_plain_prose_is_returned_unchanged_as_content(fmt):
    text = "Well: 3 < 5, and so on.\n\n  Indented, \"quoted\" & 'single'.\n"
    message = fold(stream_at(fmt, text, range(1, len(text)), tools=TOOLS, prompt="x"))
    if message.reasoning is None:  # Some formats return the whole text as reasoning.
        assert message.content == text
    else:
        assert (message.reasoning, message.content) == (text, None)
