# SPDX-License-Identifier: Apache-2.0
"""The times and the time limits of a request. All times are values of time.monotonic()."""

import math
from dataclasses import dataclass

from nereid_backend.errors import CapacityError, DeadlineError, NereidError


@dataclass(slots=True)
class RequestTiming:
    """The times, the time limits and the prompt size of one request in the executor.

    Attributes:
        arrived: the time at which the request arrived.
        num_prompt_tokens: the number of the request's prompt tokens.
        num_image_bytes: the size of the request's prepared images, videos and audio.
        queue_timeout_s: the time limit for waiting in the queue; infinity means no limit.
        timeout_s: the time limit of the whole request; infinity means no limit.
        started: the time at which the engine started the request; None while the request waits.
        first_token: the time at which the engine sent the first token; None if there is no token
            yet.
        client_id: the client that sent the request; "" if the client is unknown.
        compilation: the times at which the compilation of the request's grammar began and ended;
            None if the request has no grammar, or if the compilation has not ended.
        traceparent: the parent of the request's spans (see tracing.py); "" for none.
    """

    arrived: float = 0.0
    num_prompt_tokens: int = 0
    num_image_bytes: int = 0
    queue_timeout_s: float = math.inf
    timeout_s: float = math.inf
    started: float | None = None
    first_token: float | None = None
    client_id: str = ""
    compilation: tuple[float, float] | None = None
    traceparent: str = ""

    @property
    def next_deadline(self) -> float:
        """The time at which the next time limit of the request expires."""
        is_waiting = self.started is None
        limit = min(self.queue_timeout_s, self.timeout_s) if is_waiting else self.timeout_s
        return self.arrived + limit

    def deadline_error(self, now: float) -> NereidError | None:
        """Return an error if a time limit of the request has expired, otherwise None.

        The error names the expired limit. The limit queue_timeout applies only while the request
        waits for its start. The limit timeout applies to the whole request. `now` is the current
        time.
        """
        # After the start of the request, `next_deadline` no longer depends on `queue_timeout_s`.
        if now < self.next_deadline:
            return None
        elapsed_s = now - self.arrived
        is_waiting = self.started is None
        if is_waiting and elapsed_s >= self.queue_timeout_s:
            return CapacityError(
                f"the request waited in the queue for {elapsed_s:.1f} s, but the limit is "
                f"{self.queue_timeout_s:g} s (queue_timeout). Try again later."
            )
        return DeadlineError(
            f"the request was not finished after {elapsed_s:.1f} s, but the limit is "
            f"{self.timeout_s:g} s (timeout). Request fewer tokens or a longer timeout."
        )


def effective_limit_s(requested_s: float | None, default_s: float) -> float:
    """Return a time limit in seconds. Infinity means no limit.

    Args:
        requested_s: the time limit in the request. 0 means no limit, None means `default_s`.
        default_s: the server's default. 0 means no limit.
    """
    limit_s = default_s if requested_s is None else requested_s
    return limit_s if limit_s > 0 else math.inf
