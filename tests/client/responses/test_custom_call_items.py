"""Tests that a custom tool call's output item does not depend on how its deltas are cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nereid_client.responses.response_builder import ResponseBuilder

SHELL = {"type": "custom", "name": "shell"}
SPACE = {"type": "namespace", "name": "box", "tools": [SHELL, {"type": "function", "name": "f"}]}


def build(deltas):
    builder = ResponseBuilder({"id": "resp_1", "tools": [SHELL, SPACE]})
    return builder, [event for delta in deltas for event in builder.add(delta)]


def call_deltas(index, name, arguments, size):
    """Return the deltas of one call, whose arguments are cut into pieces of `size` characters."""
    opened = {"index": index, "id": f"call_{index}", "name": name, "arguments": ""}
    parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    pieces = [opened, *({"index": index, "arguments": part} for part in parts)]
    return [{"tool_calls": [piece]} for piece in pieces]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=3), st.integers(1, 9))
def test_the_deltas_of_each_item_add_up_to_its_input(inputs, piece_length):
    deltas = []
    for index, text in enumerate(inputs):
        deltas += call_deltas(index, "shell", json.dumps({"input": text}), piece_length)
    builder, events = build([*deltas, {"finish_reason": "tool_calls"}])

    assert [item["input"] for item in builder.output] == inputs
    for item in builder.output:
        *deltas_of_item, done = (event for event in events if event.get("item_id") == item["id"])
        assert done["type"] == "response.custom_tool_call_input.done"
        assert done["input"] == item["input"]
        assert "".join(event["delta"] for event in deltas_of_item) == item["input"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("last_delta", "status"),
    [
        ({"finish_reason": "length"}, "incomplete"),
        ({"finish_reason": "tool_calls"}, "completed"),
        ({"content": "so"}, "completed"),
        ({"tool_calls": [{"index": 1, "id": "b", "name": "box__f"}]}, "completed"),
    ],
)
def test_the_rest_of_a_call_that_is_cut_off_comes_before_the_end_of_its_item(last_delta, status):
    deltas = call_deltas(0, "box__shell", '{"input": "a\\u00', 4)
    builder, events = build([*deltas, last_delta])

    item = builder.output[0]
    assert (item["namespace"], item["name"]) == ("box", "shell")
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", status, "a\\u00")
    events_of_item = [event for event in events if event.get("item_id") == item["id"]]
    assert [event.get("delta") for event in events_of_item] == ["a", "\\u00", None]


def test_an_item_in_progress_has_the_input_that_is_certain():
    builder, _ = build(call_deltas(0, "shell", '{"input": "a\\u00', 4))
    (item,) = builder.output
    assert (item["status"], item["input"]) == ("in_progress", "a")
