"""Tests of responses that are stored, continued, generated in the background, and deleted."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from fakes.app_client import client_of
from fakes.fake_backend import FakeBackend
from fakes.response_events import StreamCheck, text_of
from nereid_client.app import create_app
from nereid_client.errors import BackendError
from nereid_client.responses.input_items import read_items
from nereid_client.responses.stored_response import StoredResponse
from nereid_client.routes import responses
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
LONG = "one <pause 0.02>" + "word <pause 0.02>" * 400
CALL = '<think>why</think>ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@asynccontextmanager
async def frontend(backend, **settings):
    app = create_app(Settings(served_model_name="echo", **settings), lambda: backend)
    async with client_of(app) as client:
        yield client, app


@pytest.fixture
async def client(connect):
    async with connect() as client:
        yield client


async def create(client, given="one two", **fields):
    response = await client.post(PATH, json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def get(client, response_id):
    response = await client.get(f"{PATH}/{response_id}")
    assert response.status_code == 200, response.text
    return response.json()


async def until(client, response_id, *statuses):
    async with asyncio.timeout(60):
        while (found := await get(client, response_id))["status"] not in statuses:
            await asyncio.sleep(0.005)
    return found


def events_of(text):
    return [json.loads(block.split("data: ")[1]) for block in text.split("\n\n")[:-1]]


async def hold(condition):
    """Wait until a condition is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def is_gone(client, response_id):
    response = await client.get(f"{PATH}/{response_id}")
    if response.status_code == 404:
        assert response.json()["error"]["code"] == "response_not_found"
    return response.status_code == 404


async def test_a_response_is_kept_unless_told_otherwise(client):
    kept, not_kept = await create(client), await create(client, store=False)
    assert await get(client, kept["id"]) == kept
    assert await is_gone(client, not_kept["id"])
    assert (kept["store"], not_kept["store"]) == (True, False)


async def test_a_streamed_response_is_kept_as_its_last_event_says(client):
    for text in (CALL, "one <pause 0.01><fail INTERNAL broken>"):
        answer = await client.post(PATH, json={"input": text, "stream": True})
        final = StreamCheck().run(events_of(answer.text))
        assert final["store"] is True
        assert await get(client, final["id"]) == final


async def test_a_conversation_goes_on_from_a_response(client, backend):
    first = await create(client, CALL, instructions="not carried over")
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second = await create(client, [output], previous_response_id=first["id"])
    third = await create(client, "and?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert json.loads(backend.generations[-1].chat_request)["messages"] == [
        {"role": "user", "content": CALL},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning": "why",
            "reasoning_content": "why",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": call["call_id"]},
        {"role": "assistant", "content": "sun"},
        {"role": "user", "content": "and?"},
    ]


async def test_sending_the_output_back_is_the_same_as_going_on_from_it(client, backend):
    first = await create(client, CALL)
    question = {"role": "user", "content": CALL}
    output = {"type": "function_call_output", "call_id": "call_0", "output": "sun"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    short_references = [{"id": item["id"]} for item in first["output"]]

    await create(client, [output], previous_response_id=first["id"])
    await create(client, [question, *first["output"], output], store=False)
    await create(client, [question, *references, output])
    await create(client, [question, *short_references, output])

    _, *generations = backend.generations
    by_response_id, by_items, by_references, by_short_references = (
        json.loads(generation.chat_request)["messages"] for generation in generations
    )
    assert by_response_id == by_items == by_references == by_short_references


async def test_items_that_are_sent_twice_get_ids_of_their_own(client):
    first = await create(client, "one")
    second = await create(client, first["output"], previous_response_id=first["id"])
    listed = (await client.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
    # The ids must differ. If two items had the same id, a client that asks for the items after an
    # id could get the same page again and again.
    assert len({item["id"] for item in listed}) == len(listed) == 3


async def test_a_short_request_cannot_refer_to_a_long_item_many_times(client, backend):
    backend.limits = {
        "max_model_len": 4096,
        "max_prompt_bytes": 65_536,
        "max_request_bytes": 100_000,
        "max_messages": 682,
        "max_tools": 2048,
    }
    first = await create(client, "word " * 2000)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert (await client.post(PATH, json={"input": [reference] * 5})).status_code == 200
    response = await client.post(PATH, json={"input": [reference] * 20})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert error["code"] == "context_length_exceeded"
    assert "100000 bytes (max_request_bytes)" in error["message"]
    assert len(backend.generations) == 2


async def test_a_response_is_parsed_once_for_many_references(client, monkeypatch):
    num_parsed = 0
    output = StoredResponse.output

    def counted_output(record):
        nonlocal num_parsed
        num_parsed += 1
        return output.fget(record)

    first = await create(client, CALL)
    monkeypatch.setattr(StoredResponse, "output", property(counted_output))
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    await create(client, references * 100)
    assert num_parsed == 1


async def test_other_clients_are_served_while_a_long_conversation_is_converted(client, monkeypatch):
    has_started, has_ended = threading.Event(), threading.Event()

    def read_slowly(given, find):
        has_started.set()
        time.sleep(0.2)
        has_ended.set()
        return read_items(given, find)

    monkeypatch.setattr(responses, "read_items", read_slowly)
    items = [{"role": "user", "content": "word " * 300_000}]
    long_request = asyncio.create_task(create(client, items))
    await hold(has_started.is_set)
    assert (await client.get("/v1/models")).status_code == 200
    assert not has_ended.is_set()
    await long_request


async def test_other_clients_are_served_while_long_input_items_are_read(client, monkeypatch):
    has_started, has_ended = threading.Event(), threading.Event()

    def parse_slowly(text):
        has_started.set()
        time.sleep(0.2)
        has_ended.set()
        return json.loads(text)

    first = await create(client, [{"role": "user", "content": "word " * 300_000}])
    monkeypatch.setattr(responses, "json", SimpleNamespace(loads=parse_slowly))
    listing = asyncio.create_task(client.get(f"{PATH}/{first['id']}/input_items"))
    await hold(has_started.is_set)
    assert (await client.get("/v1/models")).status_code == 200
    assert not has_ended.is_set()
    assert len((await listing).json()["data"]) == 1


async def test_an_unknown_response_is_a_404_that_names_its_id(client):
    for call in (
        client.get(f"{PATH}/resp_x"),
        client.delete(f"{PATH}/resp_x"),
        client.post(f"{PATH}/resp_x/cancel"),
        client.get(f"{PATH}/resp_x/input_items"),
        client.post(PATH, json={"input": "a", "previous_response_id": "resp_x"}),
    ):
        response = await call
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "response_not_found"
        assert '"resp_x"' in error["message"]
    reference = [{"type": "item_reference", "id": "msg_x"}]
    response = await client.post(PATH, json={"input": reference})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "input[0].id"


async def test_input_items_are_listed_a_page_at_a_time(client):
    first = await create(client, "one")
    items = [{"role": "user", "content": "two", "id": "mine"}, {"role": "user", "content": "3"}]
    second = await create(client, items, previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    page = (await client.get(path, params={"order": "asc"})).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["one", "one", "two", "3"]
    assert [item["role"] for item in page["data"]] == ["user", "assistant", "user", "user"]
    assert not page["has_more"]

    # By default, the newest item comes first.
    newest_page = (await client.get(path, params={"limit": 1})).json()
    assert newest_page["data"] == page["data"][-1:]
    assert (newest_page["first_id"], newest_page["has_more"]) == (page["data"][-1]["id"], True)

    oldest_page = (await client.get(path, params={"after": "mine", "limit": 2})).json()
    assert oldest_page["data"] == page["data"][1::-1]
    assert not oldest_page["has_more"]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("input_items?limit=0", 400, "limit"),
        ("input_items?limit=101", 400, "limit"),
        ("input_items?order=up", 400, "order"),
        ("input_items?after=x", 404, "after"),
        ("?stream=true", 400, "stream"),
        ("?stream=True", 400, "stream"),
        ("?stream=maybe", 400, "stream"),
        ("?starting_after=x", 400, "starting_after"),
        ("?stream=true&starting_after=-1", 400, "starting_after"),
        ("?stream=true&starting_after=x", 400, "starting_after"),
    ],
)
async def test_a_bad_query_is_named(client, query, status, param):
    made = await create(client)
    response = await client.get(f"{PATH}/{made['id']}/{query}".replace("/?", "?"))
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


async def test_a_deleted_response_is_gone_and_so_are_its_items(client):
    made = await create(client)
    response = await client.delete(f"{PATH}/{made['id']}")
    assert response.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert await is_gone(client, made["id"])
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    assert (await client.post(PATH, json={"input": reference})).status_code == 404


async def test_the_number_of_stored_responses_is_limited_and_the_oldest_are_deleted(backend):
    async with frontend(backend, max_stored_responses=2) as (client, app):
        made = [await create(client, f"number {n}") for n in range(4)]
        gone = [await is_gone(client, response["id"]) for response in made]
        assert gone == [True, True, False, False]
        assert len(app.state.responses.store) == 2


@pytest.mark.parametrize(
    "limits", [{"max_stored_responses": 5}, {"max_stored_response_bytes": 5000}]
)
async def test_a_client_that_stores_many_responses_deletes_no_responses_of_others(
    backend, tmp_path, limits
):
    keys = tmp_path / "keys.toml"
    keys.write_text('[busy]\nkey = "busy-key"\n[other]\nkey = "other-key"\n')
    async with frontend(backend, api_key_file=str(keys), **limits) as (client, _):
        client.headers["Authorization"] = "Bearer other-key"
        kept = await create(client)
        client.headers["Authorization"] = "Bearer busy-key"
        made = [await create(client) for _ in range(20)]
        assert await is_gone(client, made[0]["id"])
        assert not await is_gone(client, made[-1]["id"])
        client.headers["Authorization"] = "Bearer other-key"
        assert not await is_gone(client, kept["id"])


async def test_the_bytes_of_stored_responses_are_limited_and_counted(backend):
    limit = 60_000
    async with frontend(backend, max_stored_response_bytes=limit) as (client, app):
        made = [await create(client, "word " * 1000) for _ in range(12)]
        store = app.state.responses.store
        assert await is_gone(client, made[0]["id"])
        assert 2 <= len(store) < 12
        assert limit / 2 < store.num_bytes <= limit
        too_large = await create(client, "word " * 10_000)
        assert too_large["store"] is False
        assert await is_gone(client, too_large["id"])
        assert not await is_gone(client, made[-1]["id"])
        for response in made:
            await client.delete(f"{PATH}/{response['id']}")
        assert store.num_bytes == len(store) == 0


async def test_an_expired_response_is_deleted_although_no_request_arrives(backend):
    async with frontend(backend, stored_response_age_s=2) as (client, app):
        made = await create(client)
        ran = await create(client, background=True, stream=False)
        await until(client, ran["id"], "completed")
        store = app.state.responses.store
        assert len(store) == 2
        await hold(lambda: len(store) == store.num_bytes == 0)
        assert await is_gone(client, made["id"])


async def test_a_server_that_stores_no_responses_says_so(backend):
    async with frontend(backend, max_stored_responses=0) as (client, _):
        made = await create(client)
        assert made["store"] is False
        assert await is_gone(client, made["id"])
        for name in ("store", "background"):
            response = await client.post(PATH, json={"input": "a", name: True})
            assert response.status_code == 400
            assert "max_stored_responses is 0" in response.json()["error"]["message"]


async def test_a_background_response_comes_back_at_once_and_can_be_polled(client, backend):
    made = await create(client, "one <pause 0.3>two <pause 0.3>three", background=True)
    assert (made["status"], made["output"], made["background"]) == ("queued", [], True)
    running = await until(client, made["id"], "in_progress")
    assert text_of(running["output"][0]).startswith("one ")
    assert running["output"][0]["status"] == "in_progress"
    final = await until(client, made["id"], "completed")
    assert text_of(final["output"][0]) == "one two three"
    assert final["usage"]["output_tokens"] == 3


async def test_a_background_response_that_fails_says_why(client):
    for text in ("<fail INVALID_ARGUMENT messages: are odd>", "one <fail INTERNAL broken>"):
        made = await create(client, text, background=True)
        final = await until(client, made["id"], "failed")
        assert final["error"]["message"] in ("input are odd", "broken")
    assert final["error"]["code"] == "server_error"


async def test_a_background_response_to_a_long_conversation_has_the_code_that_agents_expect(client):
    problem = "prompt has 9000 tokens; the limit is 4096 (max_model_len)"
    made = await create(client, f"<fail INVALID_ARGUMENT {problem}>", background=True)
    final = await until(client, made["id"], "failed")
    assert final["error"]["code"] == "context_length_exceeded"


async def test_a_bug_fails_a_background_response_and_not_the_server(backend, monkeypatch):
    async def broken(generation):
        raise ZeroDivisionError
        yield

    backend.generate = broken
    async with frontend(backend) as (client, app):
        made = await create(client, background=True)
        final = await until(client, made["id"], "failed")
        assert "ZeroDivisionError" in final["error"]["message"]
        assert app.state.gate.num_requests == 0


@pytest.mark.parametrize("text", [LONG, "<pause 60>queued"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_stops_the_generation(client, backend, text, stream):
    body = {"input": text, "background": True, "stream": stream}
    creation = asyncio.create_task(client.post(PATH, json=body))
    await hold(lambda: backend.active)
    (response_id,) = client._transport.app.state.responses._tasks

    cancelled = (await client.post(f"{PATH}/{response_id}/cancel")).json()

    assert cancelled["status"] == "cancelled"
    assert not backend.active
    assert len(backend.aborted) == 1
    cancelled_again = (await client.post(f"{PATH}/{response_id}/cancel")).json()
    assert cancelled_again == cancelled
    assert await get(client, response_id) == cancelled
    created = await creation
    if stream:
        assert StreamCheck().run(events_of(created.text)) == cancelled
    else:
        assert created.json()["id"] == response_id


async def test_a_response_cancelled_before_it_began_is_cancelled(backend):
    async with frontend(backend) as (client, app):
        responses = app.state.responses
        await create(client, "never", background=True)
        (task,) = responses._tasks.values()
        task.cancel()
        await hold(task.done)
        await hold(lambda: app.state.gate.num_requests == 0)
        assert responses.store.running == []


async def test_only_background_responses_can_be_cancelled(client):
    made = await create(client)
    response = await client.post(f"{PATH}/{made['id']}/cancel")
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"The response {made['id']} cannot be cancelled, because it was not")
    ran = await create(client, background=True)
    final = await until(client, ran["id"], "completed")
    assert (await client.post(f"{PATH}/{ran['id']}/cancel")).json() == final


async def test_deleting_a_running_response_ends_it(client, backend):
    made = await create(client, LONG, background=True)
    await until(client, made["id"], "in_progress")
    assert (await client.delete(f"{PATH}/{made['id']}")).json()["deleted"]
    assert not backend.active
    assert await is_gone(client, made["id"])


async def test_nothing_goes_on_from_a_response_that_runs(client):
    made = await create(client, LONG, background=True)
    fields = {"input": "and?", "previous_response_id": made["id"]}
    response = await client.post(PATH, json=fields)
    assert response.status_code == 400
    assert (
        "previous_response_id must name a response that has ended, but"
        in response.json()["error"]["message"]
    )


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_background_stream_can_be_read_again_from_anywhere(client, is_over):
    text = "one <pause 0.03>" * 8 + CALL
    body = {"input": text, "background": True, "stream": True}
    creation = asyncio.create_task(client.post(PATH, json=body))
    responses = client._transport.app.state.responses
    await hold(lambda: responses._tasks)
    (response_id,) = responses._tasks
    if is_over:
        await creation

    async def read_stream(**query):
        """Read the stream of the response again, and return the text of its events."""
        params = {"stream": "true", **query}
        return (await client.get(f"{PATH}/{response_id}", params=params)).text

    whole_text, *texts = await asyncio.gather(
        read_stream(), *(read_stream(starting_after=number) for number in (0, 3, 9))
    )
    events = events_of((await creation).text)
    assert StreamCheck().run(events)["status"] == "completed"
    assert events_of(whole_text) == events
    assert [events_of(text) for text in texts] == [events[1:], events[4:], events[10:]]
    assert await read_stream(starting_after=len(events)) == ""


async def test_a_background_stream_goes_on_without_its_client(backend):
    async with frontend(backend) as (client, app):
        body = {"input": "one <pause 0.5>two", "background": True, "stream": True}
        reader = asyncio.create_task(client.post(PATH, json=body))
        await hold(lambda: backend.active)
        (response_id,) = app.state.responses._tasks
        reader.cancel()
        final = await until(client, response_id, "completed")
        assert text_of(final["output"][0]) == "one two"


async def test_the_gate_counts_background_responses_and_lets_their_end_in(backend):
    async with frontend(backend, max_concurrent_requests=1) as (client, app):
        made = await create(client, LONG, background=True)
        assert app.state.gate.num_requests == 1
        assert (await client.post(PATH, json={"input": "one"})).status_code == 429
        app.state.gate.is_draining = True
        response = await client.post(PATH, json={"input": "one"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        ready = (await client.get("/health/ready")).json()
        assert ready["num_requests"] == 1
        cancelled = await client.post(f"{PATH}/{made['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        assert app.state.gate.num_requests == 0


async def test_the_end_of_the_server_ends_background_responses(backend):
    async with frontend(backend) as (client, app):
        await create(client, LONG, background=True)
        await create(client, "<pause 60>queued", background=True)
        await hold(lambda: len(backend.active) == 2)
    assert not backend.active
    assert len(backend.aborted) == 2
    assert app.state.gate.num_requests == 0


async def test_a_background_response_ends_although_the_disk_of_the_store_is_full(backend):
    async with frontend(backend) as (client, app):
        made = await create(client, "word " * 2000, background=True)
        database = app.state.responses.store._database
        (num_pages,) = database.row("PRAGMA page_count")
        database.row(f"PRAGMA max_page_count = {num_pages}")
        final = await until(client, made["id"], "completed")
        assert text_of(final["output"][0]).startswith("word ")
        assert app.state.gate.num_requests == 0


async def test_a_background_response_that_takes_too_long_fails(backend):
    async with frontend(backend, request_timeout_s=1) as (client, _):
        made = await create(client, "one <pause 60>two", background=True)
        final = await until(client, made["id"], "failed")
        assert (
            "within 1 s, which is the limit of the server's setting request_timeout_s"
            in final["error"]["message"]
        )
        assert text_of(final["output"][0]) == "one "
        assert not backend.active


async def test_running_responses_are_bounded_too(backend):
    async with frontend(backend, max_stored_responses=2) as (client, _):
        await create(client)
        made = [await create(client, LONG, background=True) for _ in range(2)]
        response = await client.post(PATH, json={"input": "one", "background": True})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert "max_stored_responses" in response.json()["error"]["message"]
        assert (await create(client))["store"] is False
        await client.post(f"{PATH}/{made[0]['id']}/cancel")
        assert (await create(client, background=True))["status"] == "queued"


async def test_a_response_whose_input_is_larger_than_the_store_is_refused(backend):
    async with frontend(backend, max_stored_response_bytes=20_000) as (client, _):
        response = await client.post(PATH, json={"input": "a" * 30_000, "background": True})
    assert response.status_code == 400
    assert "at most 20000 bytes (max_stored_response_bytes)" in response.text


async def test_a_running_response_that_outgrows_the_store_fails(backend):
    async with frontend(backend, max_stored_response_bytes=20_000) as (client, app):
        earlier_response = await create(client)
        # The answer repeats the input. The input alone fits into the store, but the input and the
        # answer together do not.
        body = {"input": "word " * 500, "background": True, "stream": True}

        events = events_of((await client.post(PATH, json=body)).text)

        response = StreamCheck().run(events)
        assert response["status"] == "failed"
        assert "max_stored_response_bytes" in response["error"]["message"]
        # The store deletes older responses before it rejects a newer response.
        assert await is_gone(client, earlier_response["id"])
        store = app.state.responses.store
        assert store.num_bytes <= 20_000
        assert store.running == []
        assert not backend.active


async def test_a_foreground_stream_that_is_left_is_neither_finished_nor_kept(backend):
    async with frontend(backend) as (client, app):
        for stream in (True, False):
            reader = asyncio.create_task(client.post(PATH, json={"input": LONG, "stream": stream}))
            await hold(lambda: backend.active)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            assert not backend.active
        assert len(backend.aborted) == 2
        assert len(app.state.responses.store) == 0


class ShortBackend(FakeBackend):
    """A backend that rejects conversations of more than `room` words, as an engine does."""

    room = 12

    async def generate(self, generation):
        self.generations.append(generation)
        messages = json.loads(generation.chat_request)["messages"]
        words = sum(len(message["content"].split()) for message in messages)
        if words > self.room:
            told = f"prompt has {words} tokens; the limit is {self.room} (max_model_len)"
            raise BackendError("INVALID_ARGUMENT", told)
        async for delta in super().generate(generation):
            yield delta


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


async def test_truncation_leaves_out_the_oldest_turns_and_keeps_the_instructions():
    backend = ShortBackend()
    conversation = turns("a b c d", "e f", "g h", "i j", "k l")
    async with frontend(backend) as (client, _):
        response = await create(client, conversation, instructions="be brief", truncation="auto")
        assert text_of(response["output"][0]) == "k l"
        assert response["truncation"] == "auto"
        messages = json.loads(backend.generations[-1].chat_request)["messages"]
        assert [message["content"] for message in messages] == ["be brief", "g h", "i j", "k l"]
        listed = (await client.get(f"{PATH}/{response['id']}/input_items")).json()["data"]
        assert len(listed) == 5

        too_long_turn = turns("x " * 20)[0]
        for items, truncation in ((conversation, "disabled"), ([too_long_turn], "auto")):
            refusal = await client.post(PATH, json={"input": items * 2, "truncation": truncation})
            assert refusal.status_code == 400
            assert "the limit is 12 (max_model_len)" in refusal.json()["error"]["message"]

        # The backend refused the whole conversation, so the frontend sent a second request.
        first_id, second_id = [generation.request_id for generation in backend.generations[:2]]
        assert first_id != second_id
