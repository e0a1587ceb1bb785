"""Tests of the frontend's tracing: the span of a request, and the context sent to the models."""

import pytest
from fakes.otlp_receiver import receive_spans
from nereid_client.grpc_calls import infer_request
from nereid_client.middleware.tracing import current_traceparent

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "a-secret-word"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def receiver(monkeypatch):
    with receive_spans() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield receiver


@pytest.fixture
def seen(backend):
    """A list of the `traceparent` values with which the backend was called."""
    contexts, generate = [], backend.generate

    def observed(generation):
        contexts.append(current_traceparent.get())
        return generate(generation)

    backend.generate = observed
    return contexts


async def test_a_request_has_a_span_below_that_of_its_client(connect, receiver, seen):
    headers = {"traceparent": TRACEPARENT, "X-Request-Id": "my-id"}
    span_name = f"POST {CHAT}"
    async with connect() as client:
        assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200
    span = receiver.wait_for([span_name])[span_name]

    assert (span.trace, span.parent) == (TRACE, PARENT)
    assert span.attributes == {
        "http.response.status_code": 200,
        "http.route": CHAT,
        "nereid.request_id": "my-id",
        "nereid.client": "",
    }
    assert seen == [f"00-{TRACE}-{span.id}-01"]
    assert b"a-secret-word" not in receiver.raw


async def test_a_path_that_a_client_invents_is_not_recorded(connect, receiver):
    async with connect() as client:
        await client.post("/a-secret-word", json={})
    assert receiver.wait_for(["POST unknown"])["POST unknown"].parent == ""
    assert b"a-secret-word" not in receiver.raw


@pytest.mark.parametrize("given", [TRACEPARENT, "nonsense", None])
async def test_without_a_collector_a_valid_context_is_passed_on(connect, seen, given, monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    async with connect() as client:
        await client.post(CHAT, json=HELLO, headers={"traceparent": given} if given else {})
    assert seen == [TRACEPARENT if given == TRACEPARENT else ""]


async def test_a_call_of_the_triton_server_carries_the_context():
    assert "traceparent" not in infer_request("llm", "1", []).parameters
    token = current_traceparent.set(TRACEPARENT)
    try:
        request = infer_request("llm", "1", [])
    finally:
        current_traceparent.reset(token)
    assert request.parameters["traceparent"].string_param == TRACEPARENT
