"""Seeded fuzzers, one per door, on one real server.

    FUZZ_CASES=100000 FUZZ_SEED=7 pytest tests/fuzz        for hours, by hand

A case is made from its seed, door and number alone, so the number in a failure makes it again.
"""

import os
import random
import time
from contextlib import contextmanager

import httpx
import pytest

from loadtest.server import processes
from loadtest.server.served import Served

CASES = int(os.environ.get("FUZZ_CASES", "0"))
SEED = os.environ.get("FUZZ_SEED", "0")
LIMIT_S = 60.0


@pytest.fixture(scope="session")
def server():
    """The demo models; the session fails when one of its processes had to be replaced."""
    with Served(arguments=["--log-level=warning", "--max-model-len=256"]) as running:
        before = {role: process.pid for role, process in processes.roles(running).items()}
        yield running
        after = {role: process.pid for role, process in processes.roles(running).items()}
        assert {role: after.get(role) for role in before} == before, "a process died"


@pytest.fixture
def rounds():
    """`for number, rng in rounds(door, usual)`: so many cases, or as many as were asked for."""

    def make(door, usual):
        for number in range(CASES or usual):
            yield number, random.Random(f"{SEED}-{door}-{number}")

    return make


@pytest.fixture
def case():
    """`with case(number, what):` an error in there tells which case it was."""

    @contextmanager
    def make(number, what):
        started = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told with its case
            pytest.fail(f"case {number}: {error!r} of {what!r}")
        took_s = time.monotonic() - started
        assert took_s < LIMIT_S, f"case {number}: {took_s:.1f} s for {what!r}"

    return make


@pytest.fixture
def goes_on(server):
    """Call it at the end: the server answers, and nothing is in use any more."""

    def check():
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        url = f"{server.openai_url}/chat/completions"
        answer = httpx.post(url, json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        deadline = time.monotonic() + 60
        while (busy := processes.what_is_busy(server)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not busy

    return check
