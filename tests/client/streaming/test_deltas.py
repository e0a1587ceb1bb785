"""Tests of merging deltas of one choice, folding a stream into whole choices, and interleaving."""

import asyncio
import copy
from random import Random

import pytest
from nereid_client.errors import BackendError
from nereid_client.streaming.deltas import fold, interleaved, merge, merge_by_choice, merged

pytestmark = pytest.mark.anyio


async def source(*items, log=None):
    """Yield the deltas among the items, sleep for each number of seconds, and raise each error.

    Append "closed" to `log` when the generator ends or is closed.
    """
    try:
        for item in items:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                yield item
    finally:
        if log is not None:
            log.append("closed")


def test_texts_are_joined_and_the_latest_facts_win():
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    total = merge(
        [
            {"content": "a", "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
            {"reasoning": "r"},
            {"content": "b", "text": "ab", "usage": usage, "finish_reason": "stop"},
        ]
    )
    assert total == {
        "text": "ab",
        "reasoning": "r",
        "content": "ab",
        "finish_reason": "stop",
        "usage": usage,
    }


def test_pieces_of_tool_calls_are_joined_by_index():
    total = merge(
        [
            {"tool_calls": [{"index": 0, "id": "c0", "name": "f", "arguments": ""}]},
            {"tool_calls": [{"index": 0, "arguments": '{"a'}]},
            {"tool_calls": [{"index": 0, "arguments": '"}'}, {"index": 1, "id": "c1"}]},
        ]
    )
    assert total["tool_calls"] == [
        {"index": 0, "id": "c0", "name": "f", "arguments": '{"a"}'},
        {"index": 1, "id": "c1", "arguments": ""},
    ]


def test_adding_up_changes_none_of_its_deltas():
    first = {"tool_calls": [{"index": 0, "id": "c", "arguments": "a"}]}
    merge([first, {"tool_calls": [{"index": 0, "arguments": "b"}]}])
    assert first == {"tool_calls": [{"index": 0, "id": "c", "arguments": "a"}]}


def test_lists_of_tokens_are_appended_and_what_is_known_of_the_prompt_stays():
    entry = {"token": "a", "token_id": 1, "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    total = merge(
        [
            {"prompt_token_ids": [7], "prompt_logprobs": [None], "token_ids": [1]},
            {"logprobs": [entry], "token_ids": []},
            {"logprobs": [entry, entry], "token_ids": [2, 3], "cumulative_logprob": -3.0},
        ]
    )
    assert total == {
        "prompt_token_ids": [7],
        "prompt_logprobs": [None],
        "logprobs": [entry] * 3,
        "token_ids": [1, 2, 3],
        "cumulative_logprob": -3.0,
    }


def test_deltas_of_several_choices_are_added_up_apart():
    deltas = [{"content": "a"}, {"index": 1, "content": "x"}, {"content": "b"}]
    assert merge_by_choice(deltas) == [{"content": "ab"}, {"index": 1, "content": "x"}]


async def test_folding_gives_every_choice_in_order():
    items = []
    for n in range(500):
        items += [{"index": 1, "content": f"x{n}"}, {"content": f"a{n}"}]
    ends = [{"index": index, "finish_reason": "stop"} for index in (1, 0)]
    first, second = await fold(source(*items, *ends), num_choices=2)
    assert first["content"] == "".join(f"a{n}" for n in range(500))
    assert second["content"] == "".join(f"x{n}" for n in range(500))


async def test_folding_misses_a_choice_that_has_no_reason():
    with pytest.raises(BackendError, match="without a finish reason"):
        await fold(source({"finish_reason": "stop"}), num_choices=2)


async def test_a_slow_reader_gets_one_delta_a_choice():
    items = [{"index": n % 3, "content": str(n)} for n in range(999)]
    texts = ["", "", ""]
    num_deltas = 0
    async for delta in merged(source(*items)):
        texts[delta["index"]] += delta["content"]
        num_deltas += 1
        await asyncio.sleep(0.1)  # much longer than the source takes to yield all deltas
    assert texts == ["".join(str(n) for n in range(index, 999, 3)) for index in range(3)]
    assert num_deltas < 15


def random_delta(random, number, num_choices):
    """Return a delta of a random choice. All parts of the delta contain `number`.

    The index of the first choice is optional.
    """
    index = random.randrange(num_choices)
    delta = {"index": index} if index or random.random() < 0.5 else {}
    if random.random() < 0.7:
        delta["content"] = f"{number},"
    if random.random() < 0.7:
        delta["token_ids"] = [number]
    if random.random() < 0.2:
        delta["tool_calls"] = [{"index": 0, "arguments": f"{number};"}]
    return delta


def add_to_choice(choices, delta):
    """Append the parts of a delta to the choice to which the delta belongs."""
    choice = choices[delta.get("index", 0)]
    choice["content"] += delta.get("content", "")
    choice["token_ids"] += delta.get("token_ids", [])
    choice["arguments"] += "".join(c.get("arguments", "") for c in delta.get("tool_calls", ()))


@pytest.mark.parametrize("seed", range(20))
async def test_however_deltas_queue_up_each_choice_keeps_all_of_its_own_in_order(seed):
    random = Random(seed)
    num_choices = random.randint(1, 5)
    sent = [{"content": "", "token_ids": [], "arguments": ""} for _ in range(num_choices)]
    received = copy.deepcopy(sent)
    items = []  # the deltas and the pauses of the source
    for number in range(random.randint(1, 600)):
        delta = random_delta(random, number, num_choices)
        add_to_choice(sent, delta)
        items.append(delta)
        if random.random() < 0.05:
            items.append(0.001)

    async for delta in merged(source(*items)):
        add_to_choice(received, delta)
        if random.random() < 0.1:
            await asyncio.sleep(0.002)  # deltas queue up while the reader is slow

    assert received == sent


async def test_folding_thousands_of_deltas_keeps_every_one():
    items = [{"content": f"{n} "} for n in range(3000)]
    (total,) = await fold(source(*items, {"finish_reason": "stop"}))
    assert total["content"] == "".join(f"{n} " for n in range(3000))


async def test_folding_an_answer_without_a_reason_is_an_error():
    with pytest.raises(BackendError, match="without a finish reason"):
        await fold(source({"content": "a"}))


async def test_a_fast_reader_gets_every_delta_as_it_comes():
    items = [{"content": "a"}, 0.01, {"content": "b"}, 0.01, {"finish_reason": "stop"}]
    got = [delta async for delta in merged(source(*items))]
    assert got == [{"content": "a"}, {"content": "b"}, {"finish_reason": "stop"}]


async def test_a_slow_reader_gets_what_queued_up_as_one():
    texts = []
    async for delta in merged(source(*[{"content": str(n)} for n in range(1000)])):
        texts.append(delta["content"])
        await asyncio.sleep(0.1)
    assert "".join(texts) == "".join(map(str, range(1000)))
    assert len(texts) < 5


async def test_an_error_comes_after_the_text_before_it():
    deltas = merged(source({"content": "a"}, BackendError("INTERNAL", "broke")))
    assert await anext(deltas) == {"content": "a"}
    with pytest.raises(BackendError, match="broke"):
        await anext(deltas)


async def test_closing_the_reader_closes_the_source():
    log = []
    deltas = merged(source({"content": "a"}, 60.0, log=log))
    await anext(deltas)
    await deltas.aclose()
    assert log == ["closed"]


async def test_interleaving_tags_each_delta_with_its_answer():
    first = source({"content": "a"}, 0.02, {"content": "b"})
    second = source(0.01, {"content": "x"})
    got = [(index, delta["content"]) async for index, delta in interleaved([first, second])]
    assert got == [(0, "a"), (1, "x"), (0, "b")]


async def test_one_failing_answer_ends_the_others():
    log = []
    sources = [source(60.0, log=log), source(0.01, BackendError("INTERNAL", "broke"), log=log)]
    with pytest.raises(BackendError, match="broke"):
        async for _ in interleaved(sources):
            pass
    assert log == ["closed", "closed"]


async def test_closing_an_interleaved_reader_closes_every_source():
    log = []
    items = [{"content": "a"}] * 5
    deltas = interleaved([source(*items, 60.0, log=log), source(*items, 60.0, log=log)])
    await anext(deltas)
    await deltas.aclose()
    assert log == ["closed", "closed"]
