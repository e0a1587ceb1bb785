"""`nereid serve` on the real models: a stub or the server dies, and service comes back."""

import asyncio
import random
import signal
import time

import processes
import pytest
from faults import FAULTS, is_broken, long_requests, measure
from served import Served
from traffic import Ask, Asker, asks

pytestmark = pytest.mark.triton

FLAGS = ["--log-level=warning", "--served-model-name=chat", "--restart-backoff=0"]


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
def test_nobody_waits_for_what_died_and_service_comes_back(stack, fault):
    requests = [probe(), *long_requests("chat", {})]
    row = with_asker(stack, lambda asker: measure(stack, asker, fault, requests))
    assert not is_broken(row), row.cells()
    assert any(outcome.kind != "ok" for outcome in row.outcomes)
    deadline = time.monotonic() + 10
    while processes.what_is_busy(stack) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes.what_is_busy(stack)


def test_sigterm_lets_a_stream_finish_and_frees_everything():
    with Served(arguments=FLAGS) as running:
        url = f"http://127.0.0.1:{running.openai_port}"
        long = probe().body | {"max_tokens": 400, "ignore_eos": True, "stream": True}

        async def stop_in_the_middle():
            asker = Asker(url, running.http_url)
            task = asyncio.create_task(asker.ask(Ask("chat", "/v1/chat/completions", long)))
            while not processes.gauges(running).get("num_requests"):
                assert not task.done()
                await asyncio.sleep(0.02)
            running.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 10
            refused = await asker.ask(probe())
            while refused.kind == "ok" and time.monotonic() < deadline:
                refused = await asker.ask(probe())
            outcome = await task
            await asker.close()
            return outcome, refused

        outcome, refused = asyncio.run(stop_in_the_middle())
        assert outcome.kind == "ok", outcome.detail
        assert refused.kind in ("refused", "lost"), refused.detail
        assert running.process.wait(60) == 0
    assert processes.shared_memory(running) == []
