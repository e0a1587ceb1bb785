"""Tests with random text: the rules for unusual spellings give the same result for all pieces.

The texts arrive in random pieces. They consist of the unusual spellings in test_leniency.py, of
parts of these spellings, and of prose. Prose must stay unchanged.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_parsers import Stage, fold, get_format
from parsers.support import all_formats, markers_of, stream_at
from parsers.test_leniency import CODER, DSML, GLM, HERMES, INVOKE, KIMI, TOOLS

PROMPTS = st.sampled_from([None, "assistant\n", "assistant\n<think>\n"])
PROSE = st.text(st.sampled_from("abc .,!?\n'=-09é"), max_size=60)
FAMILIES = [
    ({"reasoning": "qwen3", "tools": "hermes"}, HERMES),
    ({"reasoning": "nemotron_v3", "tools": "qwen3_coder"}, CODER),
    ({"reasoning": "glm45", "tools": "glm45"}, GLM),
    ({"reasoning": "kimi_k2", "tools": "kimi_k2"}, KIMI),
    ({"reasoning": "minimax_m2", "tools": "minimax_m2"}, INVOKE),
    ({"reasoning": "deepseek_v4", "tools": "deepseek_v4"}, DSML),
]
IDS = ["+".join(names.values()) for names, _ in FAMILIES]
FORMATS = all_formats()


@pytest.mark.parametrize(("names", "call"), FAMILIES, ids=IDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), prompt=PROMPTS)
def test_the_pieces_of_a_lenient_text_do_not_matter(names, call, data, prompt):
    """A part of the call is removed, repeated or replaced. The text is cut at random places."""
    fmt = get_format(**names)
    start = data.draw(st.integers(0, len(call)))
    end = data.draw(st.integers(start, min(len(call), start + 12)))
    repeated_part = call[start:end] * 2
    replacement = data.draw(st.sampled_from(["", " ", "\n", repeated_part, "</think>", "<think>"]))
    before = data.draw(st.sampled_from(["", "<think>", "<think>Hm.", "Hm.</think>", "One.\n\n"]))
    after = data.draw(st.sampled_from(["", "</think>Two.", "\n\nTwo.", call]))
    text = before + call[:start] + replacement + call[end:] + after
    cuts = data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=40))

    message = fold(stream_at(fmt, text, sorted(cuts), tools=TOOLS, prompt=prompt))

    expected = fold(stream_at(fmt, text, [], tools=TOOLS, prompt=prompt))
    assert message == expected, (text, cuts)


@pytest.mark.parametrize("fmt", FORMATS, ids=[fmt.name for fmt in FORMATS])
@settings(max_examples=10, deadline=None)
@given(text=PROSE)
def test_text_without_a_marker_is_returned_unchanged(fmt, text):
    """The text is content, or reasoning if the format always starts with reasoning."""
    if any(marker.strip() and marker.strip() in text for marker in markers_of(fmt)):
        return
    message = fold(stream_at(fmt, text, range(1, len(text)), tools=TOOLS, prompt="assistant\n"))
    if fmt.stage("assistant\n") is Stage.REASONING:  # Blank lines belong to the opening marker.
        assert (message.reasoning or "").strip() == text.strip()
    else:
        assert (message.content or "") == text
    assert message.tool_calls == []


@pytest.mark.parametrize(("names", "call"), FAMILIES, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(before=PROSE, after=PROSE)
def test_text_around_a_call_is_kept(names, call, before, after):
    fmt = get_format(**names)
    text = before + call + after
    message = fold(stream_at(fmt, text, [], tools=TOOLS, prompt="assistant\n"))
    assert "".join((message.content or "").split()) == "".join((before + after).split())
    assert [call.name for call in message.tool_calls] == ["get_weather"]
