"""Tests of how `nereid serve` handles SIGTERM and the death of the frontend or a Triton stub."""

import asyncio
import random
import signal
import time

import pytest
from fakes.live_frontend import wait_for

from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker, asks
from loadtest.faults import fault_rows
from loadtest.faults.fault_rows import measure
from loadtest.faults.process_faults import FAULTS, long_requests
from loadtest.server import processes
from loadtest.server.served import ALONE, Served

pytestmark = pytest.mark.triton

FLAGS = [
    *("--log-level=warning", "--served-model-name=chat", "--restart-backoff=0"),
    *("--drain-timeout=200", *ALONE),
]


@pytest.fixture(scope="module")
def stack():
    with Served(arguments=FLAGS) as running:
        yield running


def with_asker(stack, work):
    async def run():
        asker = Asker(f"http://127.0.0.1:{stack.openai_port}", stack.http_url)
        try:
            return await work(asker)
        finally:
            await asker.close()

    return asyncio.run(run())


def probe():
    return next(ask for ask in asks(random.Random(0), "chat", {}) if ask.kind == "whole chat")


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if f.name in ("kill -9 postprocessor stub", "kill -9 frontend")],
    ids=lambda fault: fault.role,
)
def test_requests_of_a_dead_process_end_and_the_server_recovers(stack, fault, monkeypatch):
    monkeypatch.setattr(fault_rows, "_RECOVERY_LIMIT_S", 400.0)
    requests = [probe(), *long_requests("chat", {})]
    row = with_asker(stack, lambda asker: measure(stack, asker, fault, requests))
    kinds = {outcome.kind for outcome in row.outcomes}
    assert kinds - {"ok"}, row.cells()
    assert not kinds & {"hung", "wrong"}, row.cells()
    assert row.last_end_s is None or row.last_end_s < 40, row.cells()
    assert row.recovery_s is not None, row.cells()
    wait_for(lambda: not processes.what_is_busy(stack))


def test_sigterm_lets_a_stream_finish_and_frees_everything(stack):
    """This test stops the server `stack`, so it must be the last test that uses this server."""
    url = f"http://127.0.0.1:{stack.openai_port}"
    long = probe().body | {"max_tokens": 400, "ignore_eos": True, "stream": True}

    async def stop_in_the_middle():
        asker = Asker(url, stack.http_url)
        # A request of the previous test may still run in the frontend after its client has left.
        wait_for(lambda: processes.num_in_frontend(stack) == 0)
        task = asyncio.create_task(asker.ask(Ask("openai", "/v1/chat/completions", long)))
        while not await asyncio.to_thread(processes.num_in_frontend, stack):
            assert not task.done()
        stack.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 100
        refused = await asker.ask(probe())
        while refused.kind == "ok" and time.monotonic() < deadline:
            refused = await asker.ask(probe())
        outcome = await task
        await asker.close()
        return outcome, refused

    outcome, refused = asyncio.run(stop_in_the_middle())
    assert outcome.kind == "ok", outcome.detail
    assert refused.kind in ("refused", "lost"), refused.detail
    assert stack.process.wait(240) == 0
    assert processes.shared_memory(stack) == []
