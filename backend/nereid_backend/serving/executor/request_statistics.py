# SPDX-License-Identifier: Apache-2.0
"""What happened to requests since the start, counted where it is seen: in the executor's loop."""

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
"""Upper bounds for the time between two tokens."""


class Statistics:
    """Numbers that only grow, and durations that were not published yet.

    Attributes:
        counts: by the metric's name.
        finished: ended requests' answers by finish reason.
        refused: refused requests, by reason.
        durations: of requests, in seconds, by the histogram's name; taken by the publisher.
        token_gaps: how many gaps between two tokens fell into each bucket, the last beyond all.
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

    def note_begun(self, stream: Stream, begun: float) -> None:
        """The engine began to compute a request."""
        self.durations["request_queue_time_seconds"].append(max(begun - stream.timing.arrived, 0.0))

    def note_update(self, stream: Stream, update: RequestUpdate, now: float) -> None:
        """Tokens came, or an end."""
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

    def note_step(self, *, has_news: bool) -> None:
        """A response was sent to the postprocessor."""
        self.counts["steps" if has_news else "heartbeats_total"] += 1

    def note_end(self, stream: Stream, now: float) -> None:
        """A request left the executor, whatever the reason."""
        self.durations["e2e_request_latency_seconds"].append(now - stream.timing.arrived)

    @property
    def num_merged(self) -> int:
        """Updates of the engine that went out together with others."""
        return max(self.counts["engine_updates"] - self.counts["steps"], 0)

    def cumulative_gaps(self) -> list[int]:
        """How many gaps were at most as long as each bound; all of them at the end."""
        return list(accumulate(self.token_gaps))
