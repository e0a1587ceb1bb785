"""Tests of the frontend's limits on the number and duration of requests, and of its draining."""

import asyncio
import collections
import itertools
import json
import time
from types import SimpleNamespace

import pytest
from fakes.app_client import client_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_client.app import create_app
from nereid_client.middleware import admission_control as admission
from nereid_client.middleware.admission_control import AdmissionControl, Gate, Throttle
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.middleware.running_requests import RunningRequests
from nereid_client.middleware.shared_budget import SharedBudget
from nereid_client.middleware.timeouts import Timeouts
from nereid_client.settings import Settings

pytestmark = pytest.mark.anyio

REFUSED = 'nereid_frontend_refused_requests_total{limit="%s",status="%s"} 1.0'
# The echo model sends the text "a b b ..." and waits 0.02 s before each "b", 30 s together.
SLOW = "a " + "<pause 0.02>b " * 1500
SCOPE = {"type": "http", "headers": [], "method": "POST", "path": "/"}


def body(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def gated(backend):
    """A client and the gate of an application in which two requests, the maximum, are running."""
    app = create_app(Settings(served_model_name="echo", max_concurrent_requests=2), lambda: backend)
    async with client_of(app) as client:
        path = "/v1/chat/completions"
        running = [asyncio.create_task(client.post(path, json=body(SLOW))) for _ in range(2)]
        while len(backend.active) < 2:
            await asyncio.sleep(0.001)
        yield client, app.state.gate
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_one_request_too_many_is_a_429_at_once(gated):
    client, gate = gated
    assert gate.num_requests == 2
    started = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body("hi"))
    assert time.monotonic() - started < 15  # the response does not wait until a request has ended
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert "but the limit is 2 (max_concurrent_requests)" in answer.json()["error"]["message"]


async def test_pages_are_still_shown_at_the_limit(gated):
    client, _ = gated
    ready = await client.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "num_requests": 2}


async def test_while_it_stops_new_requests_get_a_503_and_running_ones_go_on(gated, backend):
    client, gate = gated
    gate.is_draining = True
    answer = await client.post("/v1/embeddings", json={"input": "hi"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    ready = await client.get("/health/ready")
    assert (ready.status_code, ready.json()["num_requests"]) == (503, 2)
    assert len(backend.active) == 2


async def test_requests_that_have_ended_no_longer_count(connect, backend):
    async with connect(max_concurrent_requests=1) as client:
        for text in ("one", "<fail INTERNAL broken>", "two"):
            await client.post("/v1/chat/completions", json=body(text))
        assert (await client.get("/health/ready")).json()["num_requests"] == 0


async def test_an_answer_that_takes_too_long_is_a_504_and_is_given_up(connect, backend):
    async with connect() as client:
        headers = {"X-Request-Timeout": "0.1"}
        answer = await client.post("/v1/chat/completions", json=body(SLOW), headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert "within 0.1 s" in answer.json()["error"]["message"]
    assert len(backend.aborted) == 1


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(connect, backend, chunks_of):
    async with connect() as client:
        headers = {"X-Request-Timeout": "1"}
        answer = await client.post(
            "/v1/chat/completions", json=body(SLOW, stream=True), headers=headers
        )
    chunks = chunks_of(answer, done=False)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["error"]["code"] == "timeout"
    assert len(backend.aborted) == 1


async def test_a_late_stream_of_a_response_ends_with_an_event_of_the_responses_api(connect):
    async with connect() as client:
        request = {"model": "echo", "input": SLOW, "stream": True}
        headers = {"X-Request-Timeout": "1"}
        answer = await client.post("/v1/responses", json=request, headers=headers)

    *_, last_delta, error = (event.split("\ndata: ") for event in answer.text.strip().split("\n\n"))
    assert error[0] == "event: error"
    delta_data, error_data = json.loads(last_delta[1]), json.loads(error[1])
    assert error_data["type"] == "error"
    assert error_data["sequence_number"] == delta_data["sequence_number"] + 1
    assert error_data["code"] == error_data["error"]["code"] == "timeout"
    assert error_data["message"] == error_data["error"]["message"]


async def test_the_server_limit_holds_for_callers_that_ask_for_more(connect, backend):
    async with connect(request_timeout_s=1) as client:
        started = time.monotonic()
        headers = {"X-Request-Timeout": "60"}
        answer = await client.post("/v1/chat/completions", json=body(SLOW), headers=headers)
    assert answer.status_code == 504
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
async def test_an_unusable_timeout_is_a_400(connect, value):
    async with connect() as client:
        headers = {"X-Request-Timeout": value}
        answer = await client.post("/v1/chat/completions", json=body("hi"), headers=headers)
    assert answer.status_code == 400
    assert f"the request has '{value}'" in answer.json()["error"]["message"]


async def test_a_client_that_reads_nothing_is_given_up():
    messages = []
    has_ended = asyncio.Event()

    async def send_endlessly(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            has_ended.set()

    async def accept_three_messages(message):
        messages.append(message)
        if len(messages) > 3:
            await asyncio.Event().wait()  # for ever, like a write to a client that does not read

    metrics = RequestMetrics(lambda: 0)
    app = Timeouts(
        send_endlessly, limit_s=0, unread_s=0.1, metrics=metrics, running=RunningRequests()
    )
    await asyncio.wait_for(app(SCOPE, None, accept_three_messages), timeout=30)

    assert has_ended.is_set()
    assert REFUSED % ("unread_timeout_s", 499) in metrics.as_text().decode()


async def test_a_late_stream_that_nobody_reads_ends_although_its_error_cannot_be_sent():
    async def begin_stream_and_stop(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.Event().wait()

    async def block_at_the_error(message):
        if message["type"] == "http.response.body":
            assert json.loads(message["body"].removeprefix(b"data: "))["error"]["code"] == "timeout"
            await asyncio.Event().wait()

    limited = Timeouts(
        begin_stream_and_stop,
        limit_s=0.05,
        unread_s=0,
        metrics=RequestMetrics(lambda: 0),
        running=RunningRequests(),
    )
    await asyncio.wait_for(limited(SCOPE, None, block_at_the_error), timeout=30)


class Server:
    """A simulated server that answers `per_second` requests per second and rejects the others.

    The queue of the server has space for the requests of one second, but for at least three
    requests. At most `arrivals_per_second` requests per second reach the server, including requests
    that the server rejects.
    """

    def __init__(self, per_second, arrivals_per_second=1e9):
        self.per_second = per_second
        self._free_places = self._num_places = max(per_second, 3.0)
        self._arrival_interval_s = 1 / arrivals_per_second
        self._last_arrival = 0.0
        self.num_asked = self.num_accepted = 0
        self.longest_delay_s = 0.0

    def send(self, now):
        """Return the time at which a request arrives, and whether the server accepts it."""
        arrival = max(now, self._last_arrival) + self._arrival_interval_s
        num_answered = (arrival - self._last_arrival) * self.per_second
        self._free_places = min(self._free_places + num_answered, self._num_places)
        self._last_arrival = arrival
        self.longest_delay_s = max(self.longest_delay_s, arrival - now)
        self.num_asked += 1
        if self._free_places < 1:
            return arrival, False
        self._free_places -= 1
        self.num_accepted += 1
        return arrival, True


def offer_requests(server, per_second, duration_s):
    """Send requests to a server at a steady rate through a throttle, and return their number.

    The throttle learns about a rejection when the rejected request has arrived at the server.
    """
    throttle = Throttle()
    rejected = collections.deque()  # the times of sending and of arrival
    times = [number / per_second for number in range(1, int(duration_s * per_second))]
    for now in times:
        while rejected and rejected[0][1] <= now:
            throttle.record_rejection("full; try again in 2 s", "2", *rejected.popleft())
        if throttle.rejection(now) is None:
            throttle.record_admission(now)
            arrival, is_accepted = server.send(now)
            if not is_accepted:
                rejected.append((now, arrival))
    return len(times)


@settings(max_examples=40, deadline=None)
@given(capacity=st.floats(0.5, 200), factor=st.floats(0.2, 15))
def test_beyond_capacity_the_server_is_kept_busy_and_asked_little_more(capacity, factor):
    server, duration_s = Server(capacity), 6.0
    num_offered = offer_requests(server, capacity * factor, duration_s)
    most_possible = min(num_offered, max(capacity, 3.0) + duration_s * capacity)
    assert server.num_accepted >= 0.9 * most_possible - 2
    assert server.num_asked - server.num_accepted <= 0.3 * server.num_accepted + 12 * duration_s
    if factor < 0.9:
        assert server.num_asked == num_offered


@settings(max_examples=40, deadline=None)
@given(capacity=st.floats(5, 50), factor=st.floats(2, 15), slowness=st.floats(1, 6))
def test_a_slow_connection_to_the_server_does_not_become_a_queue(capacity, factor, slowness):
    offered = capacity * factor
    server = Server(capacity, max(offered / slowness, 4 * capacity))
    num_offered = offer_requests(server, offered, duration_s=10.0)
    most_possible = min(num_offered, max(capacity, 3.0) + 10.0 * capacity)
    assert server.longest_delay_s < 1.5
    assert server.num_accepted >= 0.8 * most_possible - 2


def test_when_rejections_end_all_requests_are_admitted_within_half_a_second():
    throttle = Throttle()
    for number in range(1000):
        if throttle.rejection(number / 1000) is None:
            throttle.record_admission(number / 1000)
            throttle.record_rejection("full", "1", number / 1000, number / 1000)
    assert throttle.rejection(1.0) is not None
    assert throttle.rejection(1.51) is None


def test_one_rejection_does_not_throttle_requests():
    throttle = Throttle()
    throttle.record_admission(1.0)
    throttle.record_rejection("no room for this one", "1", 1.0, 1.4)
    assert throttle.rejection(1.41) is None


async def test_what_the_server_would_refuse_is_refused_at_once_in_its_words(connect, monkeypatch):
    # The clock advances by two milliseconds each time it is read, so the test is deterministic.
    ticks = itertools.count(1.0, 0.002)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(admission, "time", clock)
    # This text makes the echo model reject the request with the message after the status.
    full = "<fail UNAVAILABLE 9 requests wait; try again in 7 s>"
    path = "/v1/chat/completions"
    async with connect() as client:
        answers = [await client.post(path, json=body(full)) for _ in range(60)]

        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"7"}
        messages = [answer.json()["error"]["message"] for answer in answers]
        num_rejected_by_server = sum("overloaded" not in message for message in messages)
        assert 4 <= num_rejected_by_server < 30
        assert "message: 9 requests wait; try again in 7 s" in answers[-1].text

        # Each route has its own throttle, so requests to another route are accepted.
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200

        # The throttle admits requests again half a second after the last rejection.
        clock.monotonic = lambda: next(ticks) + 0.6
        assert (await client.post(path, json=body("hi"))).status_code == 200


async def test_a_503_without_retry_after_does_not_throttle_requests():
    async def answer_503(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"answer of the application"})

    messages = []

    async def send(message):
        messages.append(message)

    gate = Gate(SharedBudget(10))
    app = AdmissionControl(answer_503, gate, RequestMetrics(lambda: 0))
    for _ in range(50):
        await app(SCOPE, None, send)

    bodies = [message["body"] for message in messages if "body" in message]
    assert bodies == [b"answer of the application"] * 50


def test_clients_with_ever_new_names_do_not_fill_the_memory_with_throttles():
    control = AdmissionControl(None, Gate(SharedBudget(1)), None)
    for number in range(3000):
        throttle = control._throttle((f"client-{number}", "/v1/completions"), float(number))
        throttle.record_rejection("full", "1", number - 0.1, float(number))
    assert len(control._throttles) <= 1024
