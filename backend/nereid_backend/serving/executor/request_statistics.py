# SPDX-License-Identifier: Apache-2.0
"""Counts, sizes and durations of requests, recorded by the executor's loop."""

from collections import Counter, defaultdict

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.published_metrics import Histogram

_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0),
)


class RequestStatistics:
    """Counts requests and tokens, and collects histogram values until they are published.

    Attributes:
        counts: counters by the name of their metric.
        finished: the number of ended sequences by finish reason.
        observations: the unpublished values of each histogram, by the name of the histogram. The
            values are durations in seconds or numbers of tokens. The publisher empties the lists.
        token_gaps: the times between two tokens of a sequence, in seconds.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.observations: defaultdict[str, list[float]] = defaultdict(list)
        self.token_gaps = Histogram(_TOKEN_BUCKETS_S)

    def note_start(self, stream: Stream, started: float) -> None:
        """Record that the engine started a request at the time `started`."""
        waited_s = max(started - stream.timing.arrived, 0.0)
        self.observations["request_queue_time_seconds"].append(waited_s)

    def note_update(self, stream: Stream, update: RequestUpdate, now: float) -> None:
        """Record an update of the engine: new tokens of a sequence, or the end of a sequence.

        Mutates: `stream.timing.first_token`, and the number of tokens and the time of the last
        token of the sequence.
        """
        sequence = stream.sequences[update.index]
        if update.new_token_ids:
            self._note_tokens(stream, sequence, len(update.new_token_ids), now)
        if update.finish_reason is not None:
            # If a stop string was found, the executor asks the engine to abort the sequence. The
            # engine then reports "abort", but the client gets the finish reason "stop".
            is_stopped = update.finish_reason == "abort" and sequence.is_aborting
            self._note_ended(sequence, "stop" if is_stopped else update.finish_reason)

    def note_unfinished(self, stream: Stream, reason: str) -> None:
        """Record that all unfinished sequences of a stream have ended.

        This method is called when the whole stream ends. Later updates from the engine for these
        sequences are ignored.

        Args:
            stream: the stream.
            reason: the finish reason of the sequences, "error" or "abort".
        """
        for sequence in stream.sequences:
            if sequence.ending is None:
                self._note_ended(sequence, reason)

    def _note_ended(self, sequence: Sequence, reason: str) -> None:
        """Record that a sequence has ended with the finish reason `reason`."""
        self.finished[reason] += 1
        self.observations["request_generation_tokens"].append(sequence.num_tokens)

    def _note_tokens(self, stream: Stream, sequence: Sequence, num_new: int, now: float) -> None:
        """Record that the engine has generated `num_new` tokens for a sequence of `stream`."""
        self.counts["generation_tokens_total"] += num_new
        self.counts["engine_updates"] += 1
        sequence.num_tokens += num_new
        if stream.timing.first_token is None:
            self._note_first_token(stream, now)
        if sequence.last_token:  # 0 means that the sequence had no tokens yet.
            self.token_gaps.observe(now - sequence.last_token)
        sequence.last_token = now

    def _note_first_token(self, stream: Stream, now: float) -> None:
        """Record that the first token of a request was generated, so its prefill has ended."""
        timing = stream.timing
        timing.first_token = now
        self.counts["prompt_tokens_total"] += timing.num_prompt_tokens
        self.observations["request_prompt_tokens"].append(timing.num_prompt_tokens)
        self.observations["time_to_first_token_seconds"].append(now - timing.arrived)
        started = now if timing.started is None else timing.started
        self.observations["request_prefill_time_seconds"].append(max(now - started, 0.0))

    def note_step(self, *, has_output: bool) -> None:
        """Record that the executor has sent a message: output, or a heartbeat without output."""
        self.counts["steps" if has_output else "heartbeats_total"] += 1

    def note_end(self, stream: Stream, now: float) -> None:
        """Record that a request left the executor, for any reason."""
        timing = stream.timing
        self.observations["e2e_request_latency_seconds"].append(now - timing.arrived)
        if timing.first_token is not None:
            self.observations["request_decode_time_seconds"].append(now - timing.first_token)

    @property
    def num_merged(self) -> int:
        """The number of engine updates that were sent in the same message as an earlier update.

        Updates that arrive before a step is sent are merged into this step.
        """
        return max(self.counts["engine_updates"] - self.counts["steps"], 0)
