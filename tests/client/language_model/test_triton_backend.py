"""Tests of `TritonBackend`, most of them with a real Triton server and the echo model."""

import asyncio
import json
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from fakes.echo import token_id_of
from fakes.live_frontend import free_port
from fakes.live_server import serve
from nereid_client.errors import BackendError
from nereid_client.grpc_calls import decode_strings
from nereid_client.language_model import triton_backend
from nereid_client.language_model.backend import Generation
from nereid_client.language_model.server_errors import read_error
from nereid_client.language_model.triton_backend import TritonBackend
from nereid_client.streaming.deltas import fold

pytestmark = [pytest.mark.anyio, pytest.mark.triton]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("server")) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
async def backend(server):
    backend = TritonBackend(f"127.0.0.1:{server.ports['grpc']}", "llm")
    yield backend
    await backend.close()


async def collect(backend, text, **fields):
    generation = Generation("request", text_input=text, **fields)
    return [delta async for delta in backend.generate(generation)]


def test_strings_of_a_tensor_are_taken_apart():
    assert decode_strings(b"\x02\x00\x00\x00ab\x00\x00\x00\x00\x01\x00\x00\x00c") == [
        b"ab",
        b"",
        b"c",
    ]
    assert decode_strings(b"") == []


async def test_every_kind_of_prompt_arrives(backend):
    deltas = await collect(backend, "één två", with_text=True)
    assert [delta.get("text") for delta in deltas] == ["één ", "två", None]
    assert deltas[-1]["finish_reason"] == "stop"
    ids = Generation("request", input_ids=(7, 8))
    (answer,) = await fold(backend.generate(ids))
    assert answer["content"] == "7 8"
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    chat = Generation("request", chat_request=body)
    (answer,) = await fold(backend.generate(chat))
    assert answer["content"] == "hi"


async def test_a_response_may_carry_several_choices(backend):
    deltas = await collect(
        backend, "a b", sampling_parameters='{"n": 3}', with_text=True, num_choices=3
    )
    texts = ["", "", ""]
    for delta in deltas:
        texts[delta.get("index", 0)] += delta.get("text", "")
    assert texts == ["a b", "a b #1", "a b #2"]
    assert [delta["index"] for delta in deltas[1:3]] == [1, 2]  # both belong to the first response
    assert sum("finish_reason" in delta for delta in deltas) == 3


async def test_sampling_parameters_arrive_and_raw_text_comes_only_when_asked_for(backend):
    deltas = await collect(backend, "a b c", sampling_parameters='{"max_tokens": 1}')
    assert [delta["finish_reason"] for delta in deltas[1:]] == ["length"]
    assert "text" not in deltas[0]


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNAVAILABLE", "CANCELLED", "INTERNAL"])
@pytest.mark.parametrize("before", ["", "one two "])
async def test_an_error_keeps_its_code_and_message(backend, code, before):
    with pytest.raises(BackendError) as raised:
        await collect(backend, f"{before}<fail {code} temperature: is odd>")
    assert raised.value.code == code
    assert raised.value.message == "temperature: is odd"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("in ensemble 'llm', [INVALID_ARGUMENT] n: is 3", "INVALID_ARGUMENT", "n: is 3"),
        ("[request id: 7] in ensemble 'llm', [UNAVAILABLE] full", "UNAVAILABLE", "full"),
        ("Request for unknown model: 'llm' is not found", "UNAVAILABLE", None),
        (
            "in ensemble 'llm', Stub process is not healthy.",
            "UNAVAILABLE",
            "Stub process is not healthy.",
        ),
        ("in ensemble 'llm', it broke", "INTERNAL", "it broke"),
    ],
)
def test_a_message_in_the_stream_is_read_as_its_code_and_text(text, code, message):
    error = read_error(text)
    assert (error.code, error.message) == (code, message or text)


async def test_a_prompt_is_tokenised_without_generating(backend):
    ids = [token_id_of("één "), token_id_of("två")]
    assert await backend.tokenize(Generation("request", text_input="één två")) == ids
    body = json.dumps({"messages": [{"role": "user", "content": "één två"}]})
    assert await backend.tokenize(Generation("request", chat_request=body)) == ids


async def test_a_prompt_that_cannot_be_tokenised_is_the_callers_fault(backend):
    with pytest.raises(BackendError) as raised:
        await backend.tokenize(Generation("request", text_input="<fail>"))
    assert raised.value.code == "INVALID_ARGUMENT"
    assert raised.value.message == "text_input: cannot be tokenised"


async def test_closing_the_answer_cancels_the_request_on_the_server(backend, server):
    generation = Generation("to-be-closed", text_input="a " + "<pause 0.02>b " * 500)
    answer = backend.generate(generation)
    await anext(answer)
    await answer.aclose()
    async with asyncio.timeout(60):
        while "nereid: to-be-closed was cancelled" not in server.lines:
            await asyncio.sleep(0.02)


async def test_cancelling_the_reading_task_cancels_the_request_on_the_server(backend, server):
    generation = Generation("to-be-cancelled", text_input="a " + "<pause 0.02>b " * 500)

    has_begun = asyncio.Event()

    async def read():
        async for _ in backend.generate(generation):
            has_begun.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while "nereid: to-be-cancelled was cancelled" not in server.lines:
            await asyncio.sleep(0.02)


async def test_leaving_at_the_last_delta_lets_the_stream_end_by_itself(backend, server):
    async def leave_early(n):
        answer = backend.generate(Generation(f"leaves-{n}", text_input="a b"))
        async for delta in answer:
            if "finish_reason" in delta:
                break
        await answer.aclose()

    # A cancellation at this moment can crash the server (a race condition). Of 300 cancellations,
    # at least one would hit the race.
    for n in range(300):
        await leave_early(n)
    assert await backend.is_live()
    assert not any("leaves-" in line for line in server.lines)


async def test_a_question_to_the_executor_that_is_cancelled_lets_its_stream_end(monkeypatch):
    class SilentStream:
        has_been_released = False

        async def read(self):
            await asyncio.Event().wait()

        def let_end(self):
            self.has_been_released = True

    backend, stream = TritonBackend("127.0.0.1:1", "llm"), SilentStream()
    monkeypatch.setattr(backend._calls, "stream", lambda request: stream)
    task = asyncio.create_task(backend._only_response_of_executor(None))
    await asyncio.sleep(0)
    assert not stream.has_been_released
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.has_been_released
    await backend.close()


class FakeCalls:
    """A fake of `TritonCalls` for a Triton server that is live. Each stream has one response.

    Attributes:
        error: the error message of the responses, or an empty string.
        num_requests: the number of streams so far.
    """

    def __init__(self):
        self.error, self.num_requests = "", 0

    async def is_live(self):
        return True

    async def is_model_ready(self, *_):
        return True

    def stream(self, request):
        self.num_requests += 1
        infer_response = SimpleNamespace(
            outputs=[SimpleNamespace(name="delta")],
            # The first four bytes are the length of the string.
            raw_output_contents=[b'\x19\x00\x00\x00{"finish_reason": "stop"}'],
        )
        response = SimpleNamespace(error_message=self.error, infer_response=infer_response)
        return SimpleNamespace(read=AsyncMock(return_value=response), let_end=lambda: None)

    async def close(self):
        pass


async def test_a_dead_process_of_a_model_is_unhealthy_until_a_request_succeeds(monkeypatch):
    calls = FakeCalls()
    monkeypatch.setattr(triton_backend, "TritonCalls", lambda *_: calls)
    backend = TritonBackend("127.0.0.1:1", "llm")
    assert await backend.is_live()
    assert calls.num_requests == 0

    calls.error = "in ensemble 'llm', Stub process 'tokenizer_0_0' is not healthy."
    with pytest.raises(BackendError, match="not healthy"):
        await collect(backend, "hi")
    # From now on, each health check sends a test request to the model.
    assert not await backend.is_live()
    assert not await backend.is_ready()

    calls.error = ""  # from here on, requests succeed, as after a restart of the server
    assert await backend.is_live()
    assert await backend.is_ready()
    await backend.close()


async def test_many_streams_share_the_channel_without_mixing(backend):
    answers = await asyncio.gather(
        *(collect(backend, f"stream {n} says {n}", with_text=True) for n in range(64))
    )
    texts = ["".join(delta.get("text", "") for delta in deltas) for deltas in answers]
    assert texts == [f"stream {n} says {n}" for n in range(64)]


async def test_readiness_is_the_models(backend, server):
    assert await backend.is_live()
    assert await backend.is_ready()
    other = TritonBackend(f"127.0.0.1:{server.ports['grpc']}", "no-such-model")
    assert await other.is_live()
    assert not await other.is_ready()
    await other.close()


async def test_a_server_that_is_not_there_is_unavailable():
    url = f"127.0.0.1:{free_port()}"
    backend = TritonBackend(url, "llm")
    assert not await backend.is_live()
    assert not await backend.is_ready()
    with pytest.raises(BackendError, match=f"connect to the Triton server at {url} ") as error:
        await collect(backend, "hi")
    assert error.value.code == "UNAVAILABLE"
    with pytest.raises(BackendError, match="cannot connect") as error:
        await backend.tokenize(Generation("request", text_input="hi"))
    assert error.value.code == "UNAVAILABLE"
    await backend.close()
