# SPDX-License-Identifier: Apache-2.0
"""Which requests may wait. Beyond that they are refused at once, with a time to come back.

The queue is all requests that the engine has not begun. It is bounded in requests, in prompt
tokens, and in time: how long the newest would wait is the queue's length over the rate at which
requests leave it, and a request that may wait less than that is refused before it waits in vain.
"""

import math
import re
import threading
import time
from collections import deque

from nereid_backend.errors import CapacityError
from nereid_backend.serving.executor.request_timing import Timing

# Requests that left the queue, from which its rate is measured.
_NUM_SAMPLES = 64
_MIN_SAMPLES = 8
_LONGEST_HINT_S = 60
# The wait is an estimate. Who would just about make it is refused at once, for the half of those
# would have waited in vain.
_MARGIN = 0.8
_LATER = re.compile(r"try again later$")


class Admission:
    """Counts the requests that wait. Used by several threads.

    Args:
        max_requests: at most so many wait.
        max_tokens: with at most so many tokens in their prompts; a single one may have more. 0 is
            no limit.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._num_requests = 0
        self._left: deque[float] = deque(maxlen=_NUM_SAMPLES)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._num_requests

    def enter(self, timing: Timing) -> None:
        """Let a request wait.

        Raises:
            CapacityError: the queue is full, or too long for what the request may wait.
        """
        with self._lock:
            wait_s = self._wait_s(timing.arrived)
            reason = self._refusal(timing, wait_s)
            if reason:
                raise CapacityError(f"{reason}; {_again_in(wait_s)}")
            self._num_requests += 1
            self._num_tokens += timing.num_prompt_tokens

    def leave(self, timing: Timing, begun: float | None) -> None:
        """A request stops waiting: it has begun, or has ended before (None)."""
        with self._lock:
            self._num_requests -= 1
            self._num_tokens -= timing.num_prompt_tokens
            if begun is not None:
                self._left.append(begun)
            if not self._num_requests:
                # What comes next finds no queue; the rate was that of a queue which is gone.
                self._left.clear()

    def with_hint(self, message: str) -> str:
        """A message that ends in "try again later", with the seconds instead."""
        with self._lock:
            hint = _again_in(self._wait_s(time.monotonic()))
        return _LATER.sub(hint, message)

    def _refusal(self, timing: Timing, wait_s: float | None) -> str:
        if self._num_requests >= self._max_requests:
            return (
                f"{self._num_requests} requests wait; the limit is {self._max_requests} "
                "(max_num_waiting)"
            )
        num_tokens = self._num_tokens + timing.num_prompt_tokens
        if self._max_tokens and self._num_requests and num_tokens > self._max_tokens:
            return (
                f"{self._num_tokens} prompt tokens wait, and this request brings "
                f"{timing.num_prompt_tokens}; the limit is {self._max_tokens} (max_waiting_tokens)"
            )
        limit_s = min(timing.queue_timeout_s, timing.timeout_s)
        if wait_s is not None and wait_s > _MARGIN * limit_s:
            return (
                f"{self._num_requests} requests wait, the next one for about {wait_s:.1f} s, give "
                f"or take; this one may wait {limit_s:g} s (queue_timeout, timeout)"
            )
        return ""

    def _wait_s(self, now: float) -> float | None:
        """How long a new request would wait; None while that can't be told."""
        if len(self._left) < _MIN_SAMPLES:
            return None
        passed_s = max(now - self._left[0], 1e-3)
        return self._num_requests * passed_s / (len(self._left) - 1)


def _again_in(wait_s: float | None) -> str:
    seconds = 1 if wait_s is None else min(max(math.ceil(wait_s), 1), _LONGEST_HINT_S)
    return f"try again in {seconds} s"
