"""Tests of a server that receives more requests than it can answer, and of request timeouts."""

import asyncio
import time

import httpx
import pytest
from fakes.live_frontend import wait_for

from loadtest.load.overload import CAPACITY_PER_S, judge, offer, serve

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("overload")) as running:
        yield running


@pytest.fixture(autouse=True)
def accepting(crowded):
    """Wait until the server accepts requests again after the requests of the previous test."""
    wait_for(lambda: post(crowded, max_tokens=1).status_code == 200)


def post(served, **fields):
    body = {"model": "scripted", "prompt": "Go", "max_tokens": 2000, "ignore_eos": True}
    with httpx.Client(timeout=120, trust_env=False) as client:
        return client.post(served.openai_url + "/completions", json=body | fields)


def test_overload_reduces_neither_the_throughput_nor_the_speed_of_accepted_requests(crowded):
    async def run_phases():
        return {
            "peak": await offer(crowded, per_second=1.3 * CAPACITY_PER_S, seconds=5.0),
            "overload": await offer(crowded, per_second=10 * CAPACITY_PER_S, seconds=5.0),
        }

    phases = asyncio.run(run_phases())
    # The limits are loose, because other processes may slow the server down. A server whose queue
    # grows without limit would still exceed them.
    assert judge(phases, least_share=0.5, slack=8.0) == []


def test_a_request_that_takes_too_long_ends_with_504(crowded):
    started = time.monotonic()
    answer = post(crowded, timeout=1.0)
    assert time.monotonic() - started < 50  # without the timeout, the request would take 100 s
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert "the limit is 1 s (timeout)" in answer.json()["error"]["message"]


def test_a_stream_that_takes_too_long_ends_with_the_error(crowded):
    answer = post(crowded, timeout=2.0, stream=True)
    assert answer.status_code == 200
    assert "the limit is 2 s (timeout)" in answer.text
    assert '"finish_reason": "length"' not in answer.text


def test_a_wrong_limit_is_refused_by_name(crowded):
    answer = post(crowded, timeout=-1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"
