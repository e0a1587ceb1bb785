"""Tests that the frontend and each Triton model send their spans of a request to a collector."""

import itertools
import json
import urllib.request

import pytest
from fakes.otlp_receiver import receive_spans

from loadtest.server.served import Served

pytestmark = [pytest.mark.triton, pytest.mark.long]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def collected():
    """The spans of a chat completion and of an embedding request, the raw spans, and the log.

    The first two values are dictionaries: name of the span -> span.
    """
    with receive_spans() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "NEREID_LOG_FORMAT": "json",
        }
        with Served(environment=environment) as served:
            chat = {
                "messages": [{"role": "user", "content": "a-secret-word"}],
                "response_format": STRICT,
                "max_tokens": 30,
            }
            post(served, "chat/completions", chat, TRACE)
            phases = ("tokenize", "grammar", "queue", "prefill", "decode", "parse")
            chat_names = ["POST /v1/chat/completions", *(f"nereid.{phase}" for phase in phases)]
            chat_spans = receiver.wait_for(chat_names, TRACE)

            second_trace = TRACE[::-1]
            post(served, "embeddings", {"input": "a-secret-word"}, second_trace)
            embedding_names = ["POST /v1/embeddings", "nereid.queue", "nereid.compute"]
            embedding_spans = receiver.wait_for(embedding_names, second_trace)
            log = served.server_log
        yield chat_spans, embedding_spans, receiver.raw, log


def post(served, route, body, trace):
    """Send a request as part of a trace, as a client with tracing does."""
    headers = {
        "Content-Type": "application/json",
        "traceparent": f"00-{trace}-{PARENT}-01",
        "X-Request-Id": f"id-{trace}",
    }
    url = f"{served.openai_url}/{route}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()


def test_every_span_of_the_models_is_below_the_span_of_the_frontend(collected):
    chat_spans, embedding_spans, _, _ = collected
    for spans, route in ((chat_spans, "chat/completions"), (embedding_spans, "embeddings")):
        root = spans[f"POST /v1/{route}"]
        assert root.parent == PARENT
        for name, span in spans.items():
            if span != root:
                assert span.parent == root.id, name
                # The model may end its span up to 0.1 s after the frontend has sent the answer.
                assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns + 1e8, name


def test_the_phases_follow_each_other(collected):
    spans, _, _, _ = collected
    ordered = [spans[f"nereid.{phase}"] for phase in ("queue", "prefill", "decode")]
    for earlier, later in itertools.pairwise(ordered):
        assert later.start_ns == pytest.approx(earlier.end_ns, abs=1e6)
    assert spans["nereid.grammar"].end_ns <= spans["nereid.queue"].end_ns + 1e6
    models = {name: span.attributes.get("nereid.model") for name, span in spans.items()}
    assert models["nereid.tokenize"] == "tokenizer"
    assert models["nereid.decode"] == "executor"
    assert models["nereid.parse"] == "postprocessor"


def test_neither_spans_nor_logs_contain_the_prompt(collected):
    _, _, raw, log = collected
    assert b"a-secret-word" not in raw
    assert "a-secret-word" not in log


def test_every_line_of_the_log_is_json_and_requests_have_their_ids(collected):
    _, _, _, log = collected
    records = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "source", "message"} <= set(record) for record in records)
    assert {"tritonserver", "frontend"} <= {record["source"] for record in records}
    (chat,) = [record for record in records if record.get("request_id") == f"id-{TRACE}"]
    assert (chat["route"], chat["status"]) == ("/v1/chat/completions", 200)
    assert chat["trace_id"] == TRACE
