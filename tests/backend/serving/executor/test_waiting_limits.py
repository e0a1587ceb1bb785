import collections
import contextlib
import math
import random
import time

import pytest
from nereid_backend import CapacityError
from nereid_backend.errors import DeadlineError
from nereid_backend.serving.executor.request_timing import RequestTiming, effective_limit_s
from nereid_backend.serving.executor.waiting_limits import WaitingLimits


def enter(admission, num_tokens=1, arrived=None, **limits):
    """Add a request to the queue, and return its timing. Raise a CapacityError if it is full."""
    timing = RequestTiming(time.monotonic() if arrived is None else arrived, num_tokens, **limits)
    admission.enter(timing)
    return timing


def test_a_request_above_the_limit_is_refused_with_a_time_to_retry():
    admission = WaitingLimits(max_requests=2, max_tokens=0)
    first = enter(admission)
    enter(admission)
    with pytest.raises(
        CapacityError, match=r"2 requests are waiting, and the limit is 2 \(max_num"
    ):
        enter(admission)
    admission.leave(first, time.monotonic())
    enter(admission)


def test_waiting_prompts_have_a_limit_of_tokens_but_a_single_prompt_can_be_larger():
    admission = WaitingLimits(max_requests=100, max_tokens=50)
    large = enter(admission, 80)
    with pytest.raises(
        CapacityError, match=r"80 prompt tokens are waiting.*has 1 more.*max_waiting_"
    ):
        enter(admission, 1)
    admission.leave(large, None)
    enter(admission, 50)
    assert admission.num_waiting == 1


def test_waiting_images_have_a_limit_of_bytes_but_a_single_request_can_be_larger():
    admission = WaitingLimits(max_requests=100, max_tokens=0, max_image_bytes=3 * 2**20)
    large = enter(admission, num_image_bytes=4 * 2**20)
    with pytest.raises(
        CapacityError,
        match=r"images of 4\.0 MiB are waiting, and this request has 1\.0 KiB more, but the limit "
        r"is 3\.0 MiB .*smaller images\. Try again in 1 s\.",
    ):
        enter(admission, num_image_bytes=1024)
    enter(admission)
    admission.leave(large, None)
    enter(admission, num_image_bytes=1024)


def test_one_client_cannot_fill_the_queue_for_the_others():
    admission = WaitingLimits(max_requests=40, max_tokens=0)
    timings = [enter(admission, client_id="busy") for _ in range(30)]
    with pytest.raises(CapacityError, match=r"30 requests.*\(30 of them from this client\)"):
        enter(admission, client_id="busy")

    for client_id in ("second", "third", "second"):
        enter(admission, client_id=client_id)
    for timing in timings:
        admission.leave(timing, None)
    enter(admission, client_id="busy")


def test_one_client_cannot_use_all_waiting_tokens():
    admission = WaitingLimits(max_requests=100, max_tokens=1000)
    for _ in range(7):
        enter(admission, 100, client_id="busy")
    with pytest.raises(CapacityError, match=r"700 prompt tokens.*\(7 of them.*max_waiting_tok"):
        enter(admission, 100, client_id="busy")
    enter(admission, 300, client_id="other")


def queue_with_a_rate(per_second, num_waiting, client_id=""):
    """Return limits with `num_waiting` requests of one client, and the current time.

    The limits have measured that `per_second` requests start in a second: 20 more requests of the
    client have left the queue, the last of them now.
    """
    admission, now = WaitingLimits(max_requests=1000, max_tokens=0), time.monotonic()
    timings = [enter(admission, arrived=now, client_id=client_id) for _ in range(num_waiting + 20)]
    for number, timing in enumerate(timings[:20]):
        admission.leave(timing, now - (19 - number) / per_second)
    return admission, now


def test_a_client_without_waiting_requests_does_not_wait_for_those_of_another_client():
    admission, now = queue_with_a_rate(per_second=10, num_waiting=200, client_id="busy")
    limits = {"arrived": now, "queue_timeout_s": 4.9}
    with pytest.raises(CapacityError, match=r"200 requests are waiting, so this.*about 20"):
        enter(admission, client_id="busy", **limits)
    for _ in range(20):
        enter(admission, client_id="other", **limits)
    # The queue alternates between clients. Before the next request of the other client, 20 requests
    # of each client must start.
    with pytest.raises(CapacityError, match=r"about 4\.0 s, but its limit is 4\.9"):
        enter(admission, client_id="other", **limits)


def test_a_request_that_would_exceed_its_queue_timeout_is_refused_immediately():
    admission, now = queue_with_a_rate(per_second=10, num_waiting=103)
    with pytest.raises(
        CapacityError, match=r"for about 10\.3 s.*limit is 5 s.*Try again in 11 s\."
    ):
        enter(admission, arrived=now, queue_timeout_s=5.0)
    enter(admission, arrived=now, queue_timeout_s=30.0)


def test_a_short_queue_has_no_rate_and_refuses_no_request():
    admission = WaitingLimits(max_requests=1000, max_tokens=0)
    for _ in range(5):
        enter(admission, queue_timeout_s=0.001)
    assert admission.with_retry_time("full. Try again later.", "") == "full. Try again in 1 s."


def test_the_rate_of_an_old_queue_is_forgotten():
    admission, _ = queue_with_a_rate(per_second=0.1, num_waiting=1)
    admission.leave(RequestTiming(0.0, 1), time.monotonic())
    enter(admission, queue_timeout_s=1.0)


def test_a_request_can_be_repeated_after_the_queue_timeout_but_not_after_the_timeout():
    timing = RequestTiming(100.0, queue_timeout_s=2.0, timeout_s=10.0)
    assert timing.deadline_error(101.9) is None
    error = timing.deadline_error(102.0)
    assert isinstance(error, CapacityError)
    assert "waited in the queue for 2.0 s, but the limit is 2 s (queue_timeout)" in str(error)

    timing.started = 101.0
    assert timing.next_deadline == 110.0
    error = timing.deadline_error(110.0)
    assert isinstance(error, DeadlineError)
    assert "not finished after 10.0 s, but the limit is 10 s (timeout)" in str(error)


def test_zero_means_no_limit_and_none_means_the_default():
    assert effective_limit_s(None, 3.0) == 3.0
    assert effective_limit_s(0.0, 3.0) == math.inf
    assert effective_limit_s(None, 0.0) == math.inf


@pytest.mark.parametrize("factor", [1.2, 3, 10])
@pytest.mark.parametrize("per_second", [4, 16, 100])
def test_under_overload_few_requests_time_out_and_the_queue_is_never_empty(per_second, factor):
    """For 60 s, `factor` times as many requests arrive as the engine starts in a second."""
    rng = random.Random(0)
    admission, waiting = WaitingLimits(max_requests=1000, max_tokens=0), collections.deque()
    counts = collections.Counter()
    events = [(rng.uniform(0, 60), "arrival") for _ in range(int(60 * per_second * factor))]
    # In a step of the engine, two requests start together.
    events += [(step * 2 / per_second, "step") for step in range(30 * per_second)]
    for now, event in sorted(events):
        while waiting and waiting[0].arrived + 2.0 <= now:
            admission.leave(waiting.popleft(), None)
            counts["timed out"] += now > 5  # In the first seconds, no rate has been measured.
        if event == "step":
            for timing in [waiting.popleft() for _ in range(min(2, len(waiting)))]:
                admission.leave(timing, now)
                counts["started"] += 1
        else:
            with contextlib.suppress(CapacityError):
                waiting.append(enter(admission, arrived=now, queue_timeout_s=2.0))

    assert counts["started"] > 0.9 * 60 * per_second
    assert counts["timed out"] < 0.1 * counts["started"]
