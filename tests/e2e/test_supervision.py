"""Tests of how `nereid serve` handles SIGTERM and the death of the frontend or a Triton stub."""

import asyncio
import random
import signal
import time
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def asker_of(stack):
    asker = Asker(f"http://127.0.0.1:{stack.openai_port}", stack.http_url)
    try:
        yield asker
    finally:
        await asker.close()


def probe():
    """Return a short chat request that is not streamed."""
    return next(ask for ask in asks(random.Random(0), "chat", {}) if ask.kind == "whole chat")


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if f.name in ("kill -9 postprocessor stub", "kill -9 frontend")],
    ids=lambda fault: fault.role,
)
def test_requests_of_a_dead_process_end_and_the_server_recovers(stack, fault, monkeypatch):
    monkeypatch.setattr(fault_rows, "_RECOVERY_LIMIT_S", 400.0)
    requests = [probe(), *long_requests("chat", {})]

    async def measure_fault():
        async with asker_of(stack) as asker:
            return await measure(stack, asker, fault, requests)

    row = asyncio.run(measure_fault())

    kinds = {outcome.kind for outcome in row.outcomes}
    assert kinds - {"ok"}, row.cells()  # at least one request failed
    assert not kinds & {"hung", "wrong"}, row.cells()
    assert row.last_end_s is None or row.last_end_s < 40, row.cells()
    assert row.recovery_s is not None, row.cells()
    wait_for(lambda: not processes.what_is_busy(stack))


def test_sigterm_lets_a_stream_finish_and_frees_everything(stack):
    """This test stops the server `stack`, so it must be the last test that uses this server."""
    body = probe().body | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    long_stream = Ask("openai", "/v1/chat/completions", body)

    async def stop_during_stream():
        async with asker_of(stack) as asker:
            # A request of the previous test may still run in the frontend after its client left.
            wait_for(lambda: processes.num_in_frontend(stack) == 0)
            stream = asyncio.create_task(asker.ask(long_stream))
            while not await asyncio.to_thread(processes.num_in_frontend, stack):
                assert not stream.done()
            stack.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 100
            # The frontend may accept requests until it has handled the signal.
            while (late := await asker.ask(probe())).kind == "ok" and time.monotonic() < deadline:
                pass
            return await stream, late

    stream, late_request = asyncio.run(stop_during_stream())

    assert stream.kind == "ok", stream.detail
    assert late_request.kind in ("refused", "lost"), late_request.detail
    assert stack.process.wait(240) == 0
    assert processes.shared_memory(stack) == []
