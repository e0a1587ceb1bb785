"""Fixtures of the fuzz tests, each of which tests one kind of input with random cases.

    FUZZ_CASES=100000 FUZZ_SEED=7 pytest tests/fuzz

This command takes hours. A case depends only on the seed, the kind of input and the number of the
case, so that a developer can repeat the case whose number is in an error message.
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
    """A server with the demo models. The session fails if one of its processes was replaced."""
    with Served(arguments=["--log-level=warning", "--max-model-len=256"]) as running:
        pids_at_start = processes.pids(running)
        yield running
        assert processes.replaced(pids_at_start, running) == [], "a process died"


@pytest.fixture
def random_cases():
    """A function that yields the number and the random generator of each case.

    It yields FUZZ_CASES cases, or `default_number` cases if FUZZ_CASES is not set.
    """

    def generate(kind, default_number):
        for number in range(CASES or default_number):
            yield number, random.Random(f"{SEED}-{kind}-{number}")

    return generate


@pytest.fixture
def errors_with_case():
    """A context that adds the number and the input of a case to each error. Limits the duration.

    Usage: `with errors_with_case(number, case_input):`
    """

    @contextmanager
    def add_case_to_errors(number, case_input):
        started = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - each error is reported with its case
            pytest.fail(f"case {number}: {error!r} of {case_input!r}")
        duration_s = time.monotonic() - started
        assert duration_s < LIMIT_S, f"case {number}: {duration_s:.1f} s for {case_input!r}"

    return add_case_to_errors


@pytest.fixture
def check_server(server):
    """A function that checks that the server still answers, and that it has no running request."""

    def check():
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        url = f"{server.openai_url}/chat/completions"
        answer = httpx.post(url, json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        deadline = time.monotonic() + 60
        while (activity := processes.what_is_busy(server)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not activity

    return check
