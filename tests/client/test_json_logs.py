"""Tests of the log format with one JSON object on each line."""

import io
import json
import logging
import subprocess
import sys

import pytest
from nereid_client.json_logs import (
    JsonFormatter,
    JsonLines,
    LinesWithoutMessages,
    to_json_line,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("I1123 12:00:00.123456 7 server.cc:1] started", "info"),
        ("W1123 12:00:00.123456 7 server.cc:1] slow", "warning"),
        ("E1123 12:00:00.123456 7 server.cc:1] failed", "error"),
        ("nereid: error: dtype: unknown", "error"),
        ("a line of a traceback", "info"),
    ],
)
def test_a_plain_line_becomes_a_record_with_its_level(line, level):
    record = json.loads(to_json_line(line, "tritonserver"))
    assert record.pop("time").endswith("Z")
    assert record == {"level": level, "source": "tritonserver", "message": line}


def test_a_record_is_not_converted_again():
    line = to_json_line("hello", "frontend")
    log = io.StringIO()
    JsonLines(log).write(line + "\n")
    assert log.getvalue() == line + "\n"


def test_a_log_on_the_standard_output_repeats_no_message():
    log = io.StringIO()
    lines = LinesWithoutMessages(log)
    for line in ("nereid: loading", "nereid: error: no model", "I1123 started"):
        lines.write(line + "\n")
    assert log.getvalue() == "nereid: error: no model\nI1123 started\n"


@pytest.fixture
def records():
    """A function that returns all log records so far. The root logger writes them as JSON."""
    root, level, text = logging.getLogger(), logging.getLogger().level, io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    root.addHandler(handler)
    root.setLevel("INFO")
    yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    root.setLevel(level)
    root.removeHandler(handler)


def test_the_configuration_of_uvicorn_is_valid_and_writes_json():
    code = (
        "import logging.config; from nereid_client.json_logs import uvicorn_log_config;"
        "logging.config.dictConfig(uvicorn_log_config('warning'));"
        "logging.getLogger('uvicorn.error').info('no'); logging.getLogger('a').warning('yes')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr)["message"] == "yes"


def test_a_traceback_is_a_part_of_the_message(records):
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        logging.getLogger("nereid_client").exception("failed")
    (record,) = records()
    assert record["level"] == "error"
    assert record["message"].startswith("failed\nTraceback")
    assert record["message"].endswith("ZeroDivisionError: a bug")


@pytest.mark.anyio
async def test_each_answered_request_has_a_record_without_its_prompt(connect, records):
    headers = {"X-Request-Id": "my-id", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    body = {"messages": [{"role": "user", "content": "a-secret-word"}]}
    wrong = body | {"temperature": "a-secret-word"}
    failing = {"messages": [{"role": "user", "content": "<fail INTERNAL oops> a-secret-word"}]}
    async with connect() as client:
        for request in (body, wrong, failing):
            await client.post(CHAT, json=request, headers=headers)
        await client.get("/health")

    # This test sends its requests with httpx, which also logs them.
    own_records = [r for r in records() if not r["message"].startswith("HTTP Request")]
    assert "a-secret-word" not in json.dumps(own_records)
    assert not any("/health" in record["message"] for record in own_records)
    chat_records = [record for record in own_records if record["message"].startswith("POST")]
    assert [record["status"] for record in chat_records] == [200, 400, 500]
    for record in chat_records:
        assert 0 <= record["duration_s"] < 60
        assert (record["source"], record["level"], record["route"]) == ("frontend", "info", CHAT)
        assert (record["request_id"], record["trace_id"]) == ("my-id", "a" * 32)
