"""Tests that the input of a custom tool is decoded from JSON arguments that arrive in pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_client.streaming.custom_tool_input import InputDecoder, decode_input

ESCAPES = ["\\", '"', "\n", "\u2028", "é", "😀", "\\u0041", "\x00", "}", '"}', "/"]
TEXTS = st.lists(st.text(max_size=3) | st.sampled_from(ESCAPES), max_size=8).map("".join)
FRAGMENTS = ['{"input": "', '{"input"', "{", '"', "}", " ", "\\", "\\u", "\\ud83d", "00", "a", ", "]
WHITE_SPACE = st.text(" \t\r\n", max_size=2)


def decode(pieces):
    decoder = InputDecoder()
    return [*(decoder.add(piece) for piece in pieces), decoder.finish()]


def cut(text, places):
    """Cut a text at the given positions. A position beyond the end of the text wraps around."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=400)
@given(TEXTS, st.lists(st.integers(0, 200)), st.booleans(), st.lists(WHITE_SPACE, min_size=6))
def test_the_deltas_of_any_string_add_up_to_the_string(text, places, is_ascii, spaces):
    tokens = ["{", '"input"', ":", json.dumps(text, ensure_ascii=is_ascii), "}", ""]
    arguments = "".join(space + token for space, token in zip(spaces, tokens, strict=False))
    assert "".join(decode(cut(arguments, places))) == text


@settings(max_examples=400)
@given(st.lists(st.sampled_from(FRAGMENTS)).map("".join), st.lists(st.integers(0, 99)))
def test_the_input_of_any_arguments_does_not_depend_on_the_cuts(arguments, places):
    text = "".join(decode(cut(arguments, places)))
    assert text == decode_input(arguments)
    text.encode()  # raises an error if the text contains half of a surrogate pair


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", "{}"),
        ("plain text", "plain text"),
        ('"a"', '"a"'),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        (' {"inp', ' {"inp'),
        ('{"input": "a', "a"),
        ('{"input": "a"', "a"),
        ('{"input": "a"}\n', "a"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "say "hi""}', 'say "hi"'),
        ('{"input": "a", "more": 1}', 'a", "more": 1}'),
        ('{"input": "\\d+\\.\\q"}', "\\d+\\.\\q"),
        ('{"input": "a\\u00', "a\\u00"),
        ('{"input": "\\ud83d"}', "\\ud83d"),
        ('{"input": "\\ud83d\\u0041"}', "\\ud83dA"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "\\ud83d😀"),
    ],
)
def test_arguments_of_another_form_are_the_input_themselves(arguments, text):
    assert decode_input(arguments) == text
    assert "".join(decode(arguments)) == text


def test_text_is_returned_as_soon_as_it_is_certain():
    pieces = ['{"inp', 'ut": "a', "b\\", "nc\\u0", "0e9\\ud83d", "\\ude00d", '"', "}"]
    assert decode(pieces) == ["", "a", "b", "\nc", "é", "😀d", "", "", ""]
    assert decode(["[1", ", 2]"]) == ["[1", ", 2]", ""]
