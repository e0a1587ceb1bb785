"""Tests of the conversion of streamed tool calls to the format of chat completions."""

import json

from hypothesis import given
from hypothesis import strategies as st
from nereid_client.streaming.chat_calls import ToolCallConverter, whole_call

OPENED = {"index": 0, "id": "a", "name": "shell", "arguments": ""}


def convert(pieces, custom_tools):
    """Return the pieces of tool calls in the format of chat completions, one delta at a time.

    `custom_tools` contains the names of the tools whose calls become calls of custom tools.
    """
    calls = ToolCallConverter(custom_tools)
    return [converted for piece in pieces for converted in calls.convert([piece])] + calls.finish()


def test_only_the_first_piece_of_a_call_has_the_id_and_the_name():
    arguments = ['{"inp', 'ut": "l', "s\\", 'n"', "}"]
    pieces = [OPENED, *({"index": 0, "arguments": text} for text in arguments)]

    assert convert(pieces, custom_tools={"shell"}) == [
        {"index": 0, "id": "a", "type": "custom", "custom": {"name": "shell", "input": ""}},
        {"index": 0, "custom": {"input": "l"}},
        {"index": 0, "custom": {"input": "s"}},
        {"index": 0, "custom": {"input": "\n"}},
    ]
    assert convert(pieces, custom_tools=())[:2] == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "shell", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"inp'}},
    ]


def test_arguments_that_are_cut_off_end_with_a_piece():
    pieces = [OPENED | {"arguments": '{"input": "a\\u00'}, {"index": 1, "name": "g"}]
    assert convert(pieces, {"shell"}) == [
        {"index": 0, "id": "a", "type": "custom", "custom": {"name": "shell", "input": "a"}},
        {"index": 1, "function": {"name": "g", "arguments": ""}},
        {"index": 0, "custom": {"input": "\\u00"}},
    ]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=3), st.integers(1, 9))
def test_the_pieces_of_several_calls_add_up_to_the_whole_calls(inputs, piece_length):
    pieces, whole_calls = [], []
    for index, text in enumerate(inputs):
        arguments = json.dumps({"input": text})
        first_piece = {"index": index, "id": f"call_{index}", "name": "shell", "arguments": ""}
        whole_calls.append(whole_call(first_piece | {"arguments": arguments}, {"shell"}))
        pieces.append(first_piece)
        pieces += [
            {"index": index, "arguments": arguments[begin : begin + piece_length]}
            for begin in range(0, len(arguments), piece_length)
        ]

    joined_inputs = [""] * len(inputs)
    for piece in convert(pieces, custom_tools={"shell"}):
        joined_inputs[piece["index"]] += piece["custom"]["input"]

    assert joined_inputs == inputs
    assert [call["custom"] for call in whole_calls] == [
        {"name": "shell", "input": text} for text in inputs
    ]
