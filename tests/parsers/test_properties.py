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
HOWS = list(itertools.product(POLICIES, [TOOLS, None, []]))
SETTINGS = st.sampled_from(HOWS)
NO_CHECKS = list(HealthCheck)


def pieces_of(fmt):
    """Return pieces of text for a format: its markers, whole and incomplete, and other text."""
    markers = markers_of(fmt)
    shortened = [marker[:size] for marker in markers for size in (1, 3, -1) if marker[:size]]
    return [*markers, *markers, *shortened, *BITS, *BITS, *BITS]


def garbage(fmt):
    return st.lists(st.sampled_from(pieces_of(fmt)), max_size=14).map("".join)


def kept_text(spans, kind):
    return "".join(text for found, text in spans if found == kind)


def without_blanks(text):
    """Return `text` without white space.

    Content may repeat the white space before a tool call, and line breaks separate the blocks of
    reasoning.
    """
    return "".join(text.split())


def check(fmt, text, cuts, kwargs):
    """Assert that the message does not depend on `cuts`, and that the trace contains all text."""
    whole = fold(stream_at(fmt, text, [], **kwargs))
    spans = []
    events = stream_at(
        fmt, text, cuts, trace=lambda kind, piece: spans.append((kind, piece)), **kwargs
    )
    check_order(events)
    assert fold(events) == whole, (text, cuts, kwargs)
    assert "".join(piece for _, piece in spans) == text, (text, cuts, kwargs)
    reasoning = kept_text(spans, "reasoning")
    assert without_blanks(reasoning) == without_blanks(whole.reasoning or ""), (text, cuts, kwargs)
    # The formats "append_think" repeat the marker of the prompt in the content.
    if "append_think" not in fmt.name:
        content = kept_text(spans, "content")
        assert without_blanks(content) == without_blanks(whole.content or ""), (text, cuts, kwargs)


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_garbage_is_never_lost_never_raises_and_does_not_depend_on_the_pieces(fmt):
    @settings(max_examples=min(EXAMPLES, 100), deadline=None, suppress_health_check=NO_CHECKS)
    @given(
        text=garbage(fmt),
        how=SETTINGS,
        prompt=st.one_of(st.none(), st.just("x"), garbage(fmt)),
        places=st.sets(st.integers(1, 80)),
    )
    def run(text, how, prompt, places):
        kwargs = {"policy": how[0], "tools": how[1], "prompt": prompt}
        check(fmt, text, [at for at in places if at < len(text)], kwargs)

    run()


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
def test_random_garbage_is_never_lost_never_raises_and_does_not_depend_on_the_pieces(fmt):
    """Each example draws only one seed, so that thousands of examples are fast."""
    pieces = pieces_of(fmt)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=NO_CHECKS)
    @given(seed=st.integers(0, 2**64))
    def run(seed):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(pieces, k=chosen.randrange(15)))
        prompt = chosen.choice([None, "x", "".join(chosen.choices(pieces, k=3))])
        policy, tools = chosen.choice(HOWS)
        every = range(1, len(text))
        cuts = every if seed % 3 == 0 else [at for at in every if chosen.random() < 0.2]
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
