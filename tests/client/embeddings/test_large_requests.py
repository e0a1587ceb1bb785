"""Tests that a large pooling request does not block the event loop for other requests."""

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest
from nereid_client import request_context
from nereid_client.embeddings import pooling_backend
from nereid_client.embeddings.pooling_backend import PoolingCall, TritonPooling
from nereid_client.request_context import _LARGE_BODY_BYTES

pytestmark = pytest.mark.anyio


async def test_a_large_body_is_validated_while_the_event_loop_answers_other_requests(
    connect_pooling, monkeypatch
):
    validates, may_continue = threading.Event(), threading.Event()

    def wait_before_validation(kind, body):
        validates.set()
        assert may_continue.wait(10)
        return kind.model_validate(body)

    monkeypatch.setattr(request_context, "validate", wait_before_validation)
    async with connect_pooling() as client:
        body = {"input": ["a"], "user": "u" * _LARGE_BODY_BYTES}
        large = asyncio.create_task(client.post("/v1/embeddings", json=body))
        async with asyncio.timeout(10):
            while not validates.is_set():
                await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        may_continue.set()
        assert (await large).status_code == 200


async def test_the_message_for_many_texts_is_built_in_a_thread(monkeypatch):
    threads = []

    def infer_request(*_):
        threads.append(threading.current_thread())

    async def infer(_):
        return SimpleNamespace(outputs=[], raw_output_contents=[])

    monkeypatch.setattr(pooling_backend, "infer_request", infer_request)
    monkeypatch.setattr(pooling_backend, "TritonCalls", lambda _: SimpleNamespace(infer=infer))
    pooling = TritonPooling("127.0.0.1:1")
    for num_texts in (1, 100_000):
        await pooling.infer(PoolingCall("embedding", "1", {"texts": ["a"] * num_texts}))
    thread_for_one_text, thread_for_many_texts = threads
    assert thread_for_one_text is threading.main_thread()
    assert thread_for_many_texts is not threading.main_thread()


async def test_no_garbage_is_collected_while_a_large_body_is_parsed(connect_pooling, monkeypatch):
    is_enabled = []

    def parse(_):
        is_enabled.append(gc.isenabled())
        return {"input": "a"}

    monkeypatch.setattr(request_context, "parse_json_object", parse)
    async with connect_pooling() as client:
        response = await client.post("/v1/embeddings", content=b" " * (_LARGE_BODY_BYTES + 1))
    assert response.status_code == 200
    assert is_enabled == [False]
    assert gc.isenabled()
