# SPDX-License-Identifier: Apache-2.0
"""Limits on the waiting requests. A request that exceeds a limit is refused immediately.

The waiting queue consists of all requests that the engine has not started. Four limits apply: the
number of waiting requests, the number of their prompt tokens, the size of their prepared images,
and the time that the next request would wait. The waiting time is estimated from the rate at which
requests leave the queue. If the waiting time exceeds the time limit of a request, the request is
refused immediately, because its time limit would expire in the queue.

No client can use up a limit alone (see shared_limit.py). No client waits for all requests of
another client, because the clients take turns in the engine's queue (core/queues/fair_queue.py).
"""

import math
import re
import sys
import threading
import time
from collections import deque

from nereid_backend.errors import CapacityError
from nereid_backend.main_memory import format_bytes
from nereid_backend.serving.executor.request_timing import RequestTiming
from nereid_backend.serving.executor.shared_limit import SharedLimit

# The rate is the number of requests that the engine starts per second. It is measured over the last
# `_NUM_SAMPLES` started requests. If the engine has started fewer than `_MIN_SAMPLES` requests, the
# rate is unknown.
_NUM_SAMPLES = 64
_MIN_SAMPLES = 8
# The estimated waiting time is proportional to the time that has passed since the oldest measured
# start of a request. If less than `_MIN_PASSED_S` seconds have passed, the estimate uses
# `_MIN_PASSED_S` instead. Otherwise, the estimate could be 0.
_MIN_PASSED_S = 1e-3
_LONGEST_RETRY_S = 60
# The real waiting time can be longer than the estimate. If the server accepted requests with an
# estimate just below their time limit, about half of these requests would exceed the limit while
# they wait. Therefore a request is refused if the estimate exceeds `_SAFETY_FACTOR` times the
# request's time limit.
_SAFETY_FACTOR = 0.8
_TRY_LATER = re.compile(r"Try again later\.$")


class WaitingLimits:
    """Counts the waiting requests, their prompt tokens and image bytes, and enforces the limits.

    The class is thread-safe.

    Args:
        max_requests: the largest number of waiting requests.
        max_tokens: the largest number of prompt tokens of all waiting requests together; 0 means no
            limit. If no other request is waiting, a request may exceed the limit.
        max_image_bytes: the largest size of the prepared images of all waiting requests together.
            If no other request with images is waiting, a request may exceed the limit.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, max_image_bytes: int = sys.maxsize
    ) -> None:
        self._request_limit = SharedLimit(max_requests)
        self._token_limit = SharedLimit(max_tokens)
        self._image_limit = SharedLimit(max_image_bytes)
        self._lock = threading.Lock()
        self._start_times: deque[float] = deque(maxlen=_NUM_SAMPLES)

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return self._request_limit.used

    def enter(self, timing: RequestTiming) -> None:
        """Add a request to the waiting requests.

        Raises:
            CapacityError: a limit is exceeded. The message gives a number of seconds after which
                the client should try again.
        """
        # The server's thread and the loop's thread change these counters.
        with self._lock:
            wait_s = self._estimated_wait_s(timing.arrived, timing.client_id)
            reason = (
                self._request_refusal_reason(timing.client_id)
                or self._token_refusal_reason(timing.client_id, timing.num_prompt_tokens)
                or self._image_refusal_reason(timing.client_id, timing.num_image_bytes)
                or self._wait_refusal_reason(min(timing.queue_timeout_s, timing.timeout_s), wait_s)
            )
            if reason is not None:  # a sentence without its full stop
                raise CapacityError(f"{reason}. {_retry_sentence(wait_s)}")
            self._request_limit.add(timing.client_id, 1)
            self._token_limit.add(timing.client_id, timing.num_prompt_tokens)
            self._image_limit.add(timing.client_id, timing.num_image_bytes)

    def leave(self, timing: RequestTiming, started: float | None) -> None:
        """Remove a request from the waiting requests.

        Args:
            timing: the request's times, as given to `enter`.
            started: the time at which the engine started the request; None if the request ended
                while it was waiting.
        """
        with self._lock:
            self._request_limit.remove(timing.client_id, 1)
            self._token_limit.remove(timing.client_id, timing.num_prompt_tokens)
            self._image_limit.remove(timing.client_id, timing.num_image_bytes)
            if started is not None:
                self._start_times.append(started)
            if not self._request_limit.used:
                # The measured rate is valid only while requests wait.
                self._start_times.clear()

    def with_retry_time(self, message: str, client_id: str) -> str:
        """Replace `Try again later.` at the end of `message` with the number of seconds to wait.

        Example: "the queue is full. Try again later." becomes "the queue is full. Try again in 3
        s."
        """
        with self._lock:
            sentence = _retry_sentence(self._estimated_wait_s(time.monotonic(), client_id))
        return _TRY_LATER.sub(sentence, message)

    def _request_refusal_reason(self, client: str) -> str | None:
        """Return a reason to refuse a new request of `client`, if too many requests are waiting.

        The reason is a sentence without its full stop.
        """
        if self._request_limit.allows(client, 1):
            return None
        return (
            f"{self._request_limit.used} requests are waiting{self._count_of_client(client)}, and "
            f"the limit is {self._request_limit.limit} (max_num_waiting)"
        )

    def _token_refusal_reason(self, client: str, num_tokens: int) -> str | None:
        """Return a reason to refuse a request of `client`, if too many prompt tokens are waiting.

        `num_tokens` is the number of tokens of the request's prompt. The reason is a sentence
        without its full stop. A limit of 0 means no limit. If no other request is waiting, the
        limit does not apply. Without this exception, a prompt with more tokens than the limit would
        never be accepted.
        """
        has_limit = self._token_limit.limit > 0
        others_wait = self._request_limit.used > 0
        if not has_limit or not others_wait or self._token_limit.allows(client, num_tokens):
            return None
        return (
            f"requests with {self._token_limit.used} prompt tokens are waiting"
            f"{self._count_of_client(client)}, and this request has {num_tokens} more, but the "
            f"limit is {self._token_limit.limit} (max_waiting_tokens)"
        )

    def _image_refusal_reason(self, client: str, num_bytes: int) -> str | None:
        """Return a reason to refuse a request, if its images of `num_bytes` bytes are too large.

        The reason is a sentence without its full stop. The limit applies only if other requests
        with images are waiting. Otherwise, large images could never be accepted.
        """
        used_bytes = self._image_limit.used  # the size of the images of all waiting requests
        limit_applies = num_bytes > 0 and used_bytes > 0
        if not limit_applies or self._image_limit.allows(client, num_bytes):
            return None
        return (
            f"requests with prepared images of {format_bytes(used_bytes)} are waiting"
            f"{self._count_of_client(client)}, and this request has {format_bytes(num_bytes)} "
            f"more, but the limit is {format_bytes(self._image_limit.limit)} (a quarter of "
            "the memory that was free at the start). Send fewer or smaller images"
        )

    def _wait_refusal_reason(self, limit_s: float, wait_s: float | None) -> str | None:
        """Return a reason to refuse a request, if the request would wait too long in the queue.

        The reason is a sentence without its full stop. The real wait may be longer than the
        estimate `wait_s`, so even an estimate slightly below the time limit `limit_s` is too long.
        """
        if wait_s is None or wait_s <= _SAFETY_FACTOR * limit_s:
            return None
        return (
            f"{self._request_limit.used} requests are waiting, so this request would wait for "
            f"about {wait_s:.1f} s, but its limit is {limit_s:g} s (queue_timeout, timeout)"
        )

    def _count_of_client(self, client: str) -> str:
        """Return the part of an error message that says how many waiting requests a client has.

        Only waiting requests are counted. Example: " (3 of them from this client)". If the client
        is unknown, `client` is "", and the result is "", too.
        """
        if not client:
            return ""
        return f" ({self._request_limit.used_by(client)} of them from this client)"

    def _estimated_wait_s(self, now: float, client: str) -> float | None:
        """Estimate how many seconds a new request of a client would wait in the queue.

        Return None if too few requests have left the queue for an estimate. Example: if 10 requests
        are before the new request and the engine starts 5 requests per second, the result is 2.0.
        """
        if len(self._start_times) < _MIN_SAMPLES:
            return None
        # In the last `passed_s` seconds, the engine has started `num_starts` requests. The period
        # begins with the oldest measured start, so this start itself is not counted.
        passed_s = max(now - self._start_times[0], _MIN_PASSED_S)
        num_starts = len(self._start_times) - 1
        return self._max_requests_before(client) * passed_s / num_starts

    def _max_requests_before(self, client: str) -> int:
        """Return the maximum number of requests that start before a new request of `client`.

        The engine starts one request of each client in turn. Example: this client has 2 waiting
        requests, and 3 clients have waiting requests. Before the new request, the engine starts at
        most 2 requests of each client, so at most 3 * 2 = 6 requests. If the client is unknown
        (""), all waiting requests start before the new request.
        """
        num_waiting = self._request_limit.used
        if not client:
            return num_waiting
        num_own = self._request_limit.used_by(client)
        return min(num_waiting, num_own * self._request_limit.num_clients)


def _retry_sentence(wait_s: float | None) -> str:
    """Return a sentence such as "Try again in 3 s." that contains the rounded waiting time.

    If the waiting time is unknown, the sentence contains 1 s.
    """
    seconds = 1 if wait_s is None else min(max(math.ceil(wait_s), 1), _LONGEST_RETRY_S)
    return f"Try again in {seconds} s."
