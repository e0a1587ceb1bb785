"""Tests that requests which schemathesis derives from the OpenAPI description cause no status 5xx.

`make test-schemathesis REQUESTS=20000` runs these tests with another number of requests.
"""

import os

import httpx
import pytest
from fakes.described_requests import DescribedRequests

pytestmark = [pytest.mark.triton, pytest.mark.long]

NUM_REQUESTS = int(os.environ.get("SCHEMATHESIS_REQUESTS", "20000"))
# The operations are divided into this many parts, one for each test, so that each test is short.
NUM_PARTS = 20


@pytest.fixture(scope="module")
def served_requests(served):
    url = f"http://127.0.0.1:{served.openai_port}"
    models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    sender = DescribedRequests(url, [model["id"] for model in models])
    yield sender
    print(dict(sender.counts))  # noqa: T201 - `pytest -s` shows the statuses


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_request_causes_an_internal_error(served, served_requests, part):
    served_requests.send(part, NUM_PARTS, NUM_REQUESTS // NUM_PARTS)
    assert not served_requests.failures
    assert served.process.poll() is None
