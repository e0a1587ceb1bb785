# SPDX-License-Identifier: Apache-2.0
"""Counts and durations of requests since the start, recorded by the executor's loop."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.serving.executor.streams import Stream

TOKEN_BUCKETS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
"""The upper bounds of the histogram buckets for the time between two tokens, in seconds."""


class RequestStatistics:
    """Counters that only grow, and durations that have not been published yet.

    Attributes:
        counts: counters by the name of their metric.
        finished: the number of ended sequences by finish reason.
        durations: unpublished durations of requests in seconds, by the name of their histogram.
            The publisher empties the lists.
        token_gaps: the number of times between two tokens in each bucket of TOKEN_BUCKETS_S. The
            last element counts the times above all bounds.
        token_gap_sum_s: the sum of all times between two tokens, in seconds.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.durations: dict[str, list[float]] = {
            "time_to_first_token_seconds": [],
            "request_queue_time_seconds": [],
            "e2e_request_latency_seconds": [],
        }
        self.token_gaps = [0] * (len(TOKEN_BUCKETS_S) + 1)
        self.token_gap_sum_s = 0.0

    def note_start(self, stream: Stream, started: float) -> None:
        """Record that the engine started to compute a request at the time `started`."""
        waited_s = max(started - stream.timing.arrived, 0.0)
        self.durations["request_queue_time_seconds"].append(waited_s)

    def note_update(self, stream: Stream, update: RequestUpdate, now: float) -> None:
        """Record the tokens or the end of a sequence that the engine reported."""
        sequence = stream.sequences[update.index]
        if update.new_token_ids:
            self.counts["generation_tokens_total"] += len(update.new_token_ids)
            self.counts["engine_updates"] += 1
            if stream.timing.first_token is None:
                stream.timing.first_token = now
                self.counts["prompt_tokens_total"] += stream.timing.num_prompt_tokens
                waited_s = now - stream.timing.arrived
                self.durations["time_to_first_token_seconds"].append(waited_s)
            if sequence.last_token:
                gap_s = now - sequence.last_token
                self.token_gaps[bisect_left(TOKEN_BUCKETS_S, gap_s)] += 1
                self.token_gap_sum_s += gap_s
            sequence.last_token = now
        if update.finish_reason is not None:
            self.finished[update.finish_reason] += 1

    def note_step(self, *, has_output: bool) -> None:
        """Record that a step was sent to the postprocessor; without output it is a heartbeat."""
        self.counts["steps" if has_output else "heartbeats_total"] += 1

    def note_end(self, stream: Stream, now: float) -> None:
        """Record that a request left the executor, for any reason."""
        self.durations["e2e_request_latency_seconds"].append(now - stream.timing.arrived)

    @property
    def num_merged(self) -> int:
        """The number of engine updates that were merged into a step with other updates."""
        return max(self.counts["engine_updates"] - self.counts["steps"], 0)

    def cumulative_gaps(self) -> list[int]:
        """Return the cumulative histogram of the times between tokens.

        The element for a bound of TOKEN_BUCKETS_S counts the times up to that bound. The last
        element counts all times.
        """
        return list(accumulate(self.token_gaps))
