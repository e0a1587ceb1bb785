"""Tests that a dead engine process is restarted, and that its requests end with an error."""

import asyncio
import json
import os
import re
import signal
import time

import httpx
import psutil
import pytest
from e2e.triton_client import ask, tensor
from fakes.live_frontend import wait_for

from loadtest.server.served import ALONE, Served

pytestmark = pytest.mark.triton


def engine_process(served):
    descendants = psutil.Process(served.process.pid).children(recursive=True)
    return next(
        p
        for p in descendants
        if p.status() != psutil.STATUS_ZOMBIE  # a zombie process has no command line
        and "nereid_backend.serving.executor.engine_process" in " ".join(p.cmdline())
    )


def request(max_tokens):
    """Return the tensors of a stream that generates exactly `max_tokens` tokens."""
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return [
        tensor("text_input", "Once"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", json.dumps(fields)),
    ]


def test_a_killed_engine_ends_its_requests_with_an_error_and_is_started_again(served, gauge):
    num_restarts = gauge("num_engine_restarts")
    victim = engine_process(served)
    killed_at = None

    def kill_engine(reply):
        nonlocal killed_at
        if killed_at is None and len(reply.deltas) > 2:
            killed_at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
        return False  # do not cancel the request

    reply = asyncio.run(ask(served.grpc_url, request(3000), cancel_when=kill_engine))

    assert time.monotonic() - killed_at < 40
    assert "the engine process ended (signal 9)" in reply.error
    assert "[INTERNAL]" in reply.error
    assert reply_after_restart(served).finish_reasons == ["length"]
    assert engine_process(served).pid != victim.pid
    wait_for(lambda: gauge("num_engine_restarts") == num_restarts + 1)


def reply_after_restart(served):
    """Repeat a request while the engine restarts, and return the reply without an error."""
    deadline = time.monotonic() + 240
    while True:
        reply = asyncio.run(ask(served.grpc_url, request(5)))
        if reply.error is None:
            return reply
        assert "[UNAVAILABLE] the engine is restarting. Try again" in reply.error
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_server_whose_engine_has_given_up_is_started_again(tmp_path):
    script = tmp_path / "script.json"
    # The engine dies when it processes the prompt "Break", and it answers all other prompts.
    rules = [
        {"when": "Break", "fault": "CUDA error: an illegal memory access", "token_ids": [10]},
        {"when": "", "token_ids": [10], "ends": False},
    ]
    script.write_text(json.dumps(rules))
    environment = {
        "NEREID_ENGINE": "scripted",
        "NEREID_SCRIPT": str(script),
        "NEREID_MAX_ENGINE_RESTARTS": "0",  # `nereid serve` must restart the whole server
    }
    with Served(environment=environment, arguments=["--log-level=warning", *ALONE]) as running:

        def complete(prompt):
            url = running.openai_url + "/completions"
            body = {"prompt": prompt, "max_tokens": 2}
            return httpx.post(url, json=body, timeout=120, trust_env=False)

        assert complete("Go").status_code == 200
        assert "CUDA error" in complete("Break").json()["error"]["message"]

        deadline = time.monotonic() + 240
        while (answer := complete("Go")).status_code != 200:
            assert answer.status_code == 503, answer.text
            assert time.monotonic() < deadline
            time.sleep(0.2)
        line = "the engine process has died once.*it is started again now \\(restart 1 of 5\\)"
        assert re.search(line, running.output)
