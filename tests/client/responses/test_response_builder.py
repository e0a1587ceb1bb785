"""Tests that `ResponseBuilder` builds well-formed items and events from any deltas.

The items must not depend on how the text is divided into deltas.
"""

import asyncio
import itertools

import pytest
from fakes.response_events import StreamCheck
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_client.errors import ApiError, BackendError
from nereid_client.responses.output_items import LogprobMatcher
from nereid_client.responses.response_builder import ResponseBuilder
from nereid_client.streaming.deltas import merge_by_kind, merged

FRAME = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def entry(token):
    return {
        "token": token,
        "token_id": 1,
        "logprob": -0.5,
        "bytes": list(token.encode()),
        "rank": 1,
        "top_logprobs": [],
    }


TEXTS = st.text(min_size=1, max_size=6)


@st.composite
def answers(draw):
    """Draw the deltas of an answer: reasoning, content and calls in any order.

    The deltas of one call come before the deltas of the next call, as in the output of the
    postprocessor. Any finish reason can follow any deltas, because the builder must not infer the
    finish reason from the calls.
    """
    deltas, num_calls = [], 0
    kinds = st.sampled_from(["reasoning", "content", "call", "usage"])
    for kind in draw(st.lists(kinds, max_size=8)):
        if kind == "call":
            index = num_calls
            num_calls += 1
            pieces = [{"index": index, "id": f"call_{index}", "name": "f", "arguments": ""}]
            pieces += [{"index": index, "arguments": text} for text in draw(st.lists(TEXTS))]
            deltas += [{"tool_calls": [piece]} for piece in pieces]
        elif kind == "usage":
            deltas.append({"usage": USAGE})
        else:
            for text in draw(st.lists(TEXTS, min_size=1, max_size=4)):
                deltas.append({kind: text, "logprobs": [entry(letter) for letter in text]})
    reason = draw(st.sampled_from(["stop", "length", "tool_calls", "abort"]))
    return [*deltas, {"finish_reason": reason, "usage": USAGE}]


def written(deltas, **options):
    answer = ResponseBuilder(dict(FRAME), **options)
    events = answer.opening()
    for delta in deltas:
        events += answer.add(delta)
    return answer, events


@settings(max_examples=150, deadline=None)
@given(answers(), st.booleans())
def test_events_of_any_answer_are_well_formed_and_add_up_to_the_response(deltas, is_queued):
    answer, events = written(deltas, is_queued=is_queued)
    final = StreamCheck().run(events)
    assert final == answer.as_json()

    kinds = [event["type"].removeprefix("response.") for event in events]
    first_kinds = ["created", "queued", "in_progress"] if is_queued else ["created", "in_progress"]
    assert kinds[: len(first_kinds)] == first_kinds
    finish_reason = deltas[-1]["finish_reason"]
    status = {"length": "incomplete", "abort": "failed"}.get(finish_reason, "completed")
    assert (kinds[-1], final["status"]) == (status, status)

    statuses_of_items = [item["status"] for item in final["output"]]
    if statuses_of_items and status != "completed":
        assert statuses_of_items.pop() == "incomplete"
    assert set(statuses_of_items) <= {"completed"}


def without_ids(value):
    if isinstance(value, dict):
        return {name: without_ids(inner) for name, inner in value.items() if name != "id"}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


@settings(max_examples=100, deadline=None)
@given(answers(), st.lists(st.integers(1, 5), min_size=1))
def test_an_answer_is_the_same_however_its_deltas_are_added_up(deltas, sizes):
    merged_deltas, num_merged = [], 0
    for size in itertools.cycle(sizes):
        merged_deltas += merge_by_kind(deltas[num_merged : num_merged + size])
        num_merged += size
        if num_merged >= len(deltas):
            break

    answer, _ = written(deltas)
    answer_of_merged_deltas, events = written(merged_deltas)

    StreamCheck().run(events)
    assert without_ids(answer_of_merged_deltas.output) == without_ids(answer.output)


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(0, 20), st.booleans())
def test_a_stream_that_breaks_off_anywhere_is_well_formed(deltas, at, is_cancelled):
    answer, events = written(deltas[:-1][:at], is_queued=True)
    events += answer.cancel() if is_cancelled else answer.fail(ApiError(503, "gone"))
    final = StreamCheck().run(events)
    assert final["status"] == ("cancelled" if is_cancelled else "failed")
    if not is_cancelled:
        assert final["error"] == {"code": "server_error", "message": "gone"}


@settings(max_examples=60, deadline=None)
@given(answers())
def test_the_log_probabilities_of_a_part_are_those_of_the_tokens_of_its_text(deltas):
    answer, _ = written(deltas)
    for item in answer.output:
        if item["type"] == "message":
            (part,) = item["content"]
            assert "".join(logprob["token"] for logprob in part["logprobs"]) == part["text"]


@pytest.mark.parametrize(
    ("tokens", "text", "tokens_of_text", "remaining_tokens"),
    [
        (["<think>", "a", "</think>", "b", "c"], "bc", ["b", "c"], []),
        (["a", "b", "\n"], "ab", ["a", "b"], ["\n"]),
        (["ab", "cd"], "bc", ["ab", "cd"], []),
        (["x"], "yz", ["x"], []),
        ([], "a", [], []),
    ],
)
def test_a_texts_tokens_are_found_among_those_that_came(
    tokens, text, tokens_of_text, remaining_tokens
):
    matcher = LogprobMatcher()
    matcher.add([entry(token) for token in tokens])
    assert [logprob["token"] for logprob in matcher.pop(text)] == tokens_of_text
    next_text = "".join(remaining_tokens) or "?"
    assert [logprob["token"] for logprob in matcher.pop(next_text)] == remaining_tokens


def test_half_characters_stand_with_the_text_that_they_complete():
    halves = [{**entry(""), "bytes": [0xC3]}, {**entry("é"), "bytes": [0xA9]}]
    found = LogprobMatcher()
    found.add(halves)
    assert found.pop("é") == halves


def test_a_call_that_goes_on_after_its_end_is_an_error():
    calls = [{"index": at, "id": str(at), "name": "f", "arguments": ""} for at in (0, 1)]
    answer, _ = written([{"tool_calls": calls}])
    with pytest.raises(BackendError, match="tool call 0 after this call had ended"):
        answer.add({"tool_calls": [{"index": 0, "arguments": "x"}]})


def test_the_kinds_of_a_merged_stream_keep_their_order():
    async def source():
        for kind in ("content", "reasoning", "content", "content"):
            yield {kind: kind[0]}

    async def read():
        return [delta async for delta in merged(source(), merge_by_kind)]

    deltas = asyncio.run(read())
    assert merge_by_kind(deltas) == [{"content": "c"}, {"reasoning": "r"}, {"content": "cc"}]
