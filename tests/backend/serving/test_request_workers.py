"""Tests that long prompts do not delay short prompts, and that abandoned requests end."""

import threading
import time

import pytest
from backend.serving.fake_server import Request
from nereid_backend.serving import triton_api
from nereid_backend.serving.tokenizer import request_workers
from nereid_backend.serving.tokenizer.request_workers import RequestWorkers


class Work:
    """Workers that answer requests. A request with the input "long" waits for `release`."""

    def __init__(self):
        self.release = threading.Event()
        self.workers = RequestWorkers(self.respond, lambda request: "long" in request.inputs)
        self.workers.start()
        self.answered = []

    def respond(self, request):
        if "long" in request.inputs:
            assert self.release.wait(20)
        self.answered.append(request)
        return triton_api.response({"x": request})

    def send(self, *kinds):
        """Send one request of each kind ("long" or "short"), and return the requests."""
        requests = [Request(**{kind: 1}) for kind in kinds]
        for request in requests:
            self.workers.add(request)
        return requests


@pytest.fixture
def work():
    work = Work()
    yield work
    work.release.set()
    work.workers.stop()


def test_short_requests_do_not_wait_for_long_ones(work):
    *long_requests, short_request = work.send("long", "long", "long", "short")
    assert short_request.wait(20).error is None
    assert not any(request.ended.is_set() for request in long_requests)

    work.release.set()
    for request in long_requests:
        assert request.wait(20).error is None


def test_parameters_that_are_not_utf8_do_not_end_the_server_thread(work):
    request = Request(short=1)
    # A call of `decode` raises a UnicodeDecodeError, as `parameters` does in a stub of the server.
    request.parameters = b"\xff".decode
    work.workers.add(request)
    assert request.wait(20).error is None


def test_an_abandoned_request_is_not_processed(work):
    *running, waiting = work.send("long", "long", "long")  # Two threads process long requests.
    waiting.is_gone = True
    assert "cancelled" in waiting.wait(20).error

    work.release.set()
    for request in running:
        request.wait(20)
    assert waiting not in work.answered


def test_an_abandoned_request_ends_while_other_requests_arrive_without_a_pause(work, monkeypatch):
    # Short requests arrive faster than the workers would look for abandoned requests.
    monkeypatch.setattr(request_workers, "_POLL_S", 1.0)
    *_, waiting = work.send("long", "long", "long")
    waiting.is_gone = True
    deadline_s = time.monotonic() + 8
    while not waiting.ended.is_set() and time.monotonic() < deadline_s:
        work.send("short")[0].wait(20)
    assert "cancelled" in waiting.wait(0).error


def test_too_many_long_requests_are_refused(monkeypatch):
    monkeypatch.setattr(request_workers, "_MAX_LONG", 2)
    work = Work()
    *_, refused = work.send("long", "long", "long")
    assert "[UNAVAILABLE]" in refused.wait(20).error
    work.release.set()
    work.workers.stop()


class SlowRequest(Request):
    """A request with the input "long". The workers wait until `may_end` is set."""

    def __init__(self, workers, client):
        super().__init__(long=1)
        self.request_parameters = f'{{"client_id": "{client}"}}'
        self.may_end = threading.Event()
        workers.add(self)


@pytest.fixture
def send_slow():
    """A function that sends a `SlowRequest` of a client."""

    def respond(request):
        assert request.may_end.wait(20)
        return triton_api.response({"x": request})

    workers = RequestWorkers(respond, lambda request: True)
    workers.start()
    requests = []

    def send(client):
        requests.append(SlowRequest(workers, client))
        return requests[-1]

    yield send
    for request in requests:
        request.may_end.set()
    workers.stop()


def test_a_client_does_not_wait_for_the_slow_requests_of_another_client(send_slow):
    busy = [send_slow("busy") for _ in range(10)]
    other = send_slow("other")
    other.may_end.set()
    assert other.wait(20).error is None
    assert not any(request.ended.is_set() for request in busy)


def test_the_client_with_the_fewest_running_requests_comes_first(send_slow):
    busy = [send_slow("busy") for _ in range(10)]
    send_slow("third")  # occupies the last thread
    other = send_slow("other")
    other.may_end.set()
    busy[0].may_end.set()
    assert other.wait(20).error is None
    assert not any(request.ended.is_set() for request in busy[1:])
