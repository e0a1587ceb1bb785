# SPDX-License-Identifier: Apache-2.0
"""The engine and its requests on the Triton server's own /metrics page, as `nereid:NAME`.

docs/metrics.md explains each. Every number that changed costs the stub a message to the server and
back, so few are published often, the rest once a second, and durations between
tokens, of which there are thousands a second, as counters that read like a histogram's.
"""

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid_backend.serving.executor.request_statistics import TOKEN_BUCKETS_S, Statistics

_LABELS = {"model_name": "llm"}
_SLOW_EVERY = 10

_GAUGES = {
    "num_requests_running": "Sequences that hold blocks of the KV cache",
    "num_requests_waiting": "Sequences that wait for their turn in the engine",
    "num_requests": "Requests in the executor, from arrival to last response",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use, 0 to 1",
    "kv_cache_blocks_used": "Blocks of the KV cache in use",
    "kv_cache_blocks": "Blocks of the KV cache",
    "engine_up": "1 while the engine takes requests, 0 while it is started again or was given up",
    "num_engine_restarts": "Engine processes started after the first",
}
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests that got a first token",
    "generation_tokens_total": "Generated tokens",
    "num_preemptions_total": "How often a running request had to give its blocks back",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix cache",
    "spec_decode_num_draft_tokens_total": "Tokens that speculation proposed",
    "spec_decode_num_accepted_tokens_total": "Proposed tokens that were right",
    "requests_disconnected_total": "Requests whose client went away before their end",
    "requests_refused_total": "Requests that were refused because the queue was full",
    "requests_timed_out_total": "Requests that ended by their timeout or queue_timeout",
    "merged_responses_total": "Updates of the engine that went to clients together with others",
    "heartbeats_total": "Empty steps sent to find out whether a client is there",
}
# The engine process counts these from its own start.
_OF_ENGINE = {
    "num_preemptions": "num_preemptions_total",
    "num_prefix_cache_queries": "prefix_cache_queries_total",
    "num_prefix_cache_hits": "prefix_cache_hits_total",
    "num_proposed_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
_DURATIONS = {
    "time_to_first_token_seconds": "From arrival in the executor to the first token",
    "request_queue_time_seconds": "From arrival in the executor to the first computation",
    "e2e_request_latency_seconds": "From arrival in the executor to the last response",
}
_REQUEST_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_GAPS = "inter_token_latency_seconds"
_OUTCOMES = "request_success_total"


class Metrics:
    """Publishes numbers from the executor's loop."""

    def __init__(self) -> None:
        # The families must live as long as their metrics.
        self._families: list[Any] = []
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        self._gauges = {n: self._family(n, t, gauge).Metric(_LABELS) for n, t in _GAUGES.items()}
        self._counters = {
            n: self._family(n, t, counter).Metric(_LABELS) for n, t in _COUNTERS.items()
        }
        histogram = pb_utils.MetricFamily.HISTOGRAM
        self._durations = {
            name: self._family(name, text, histogram).Metric(_LABELS, buckets=_REQUEST_BUCKETS_S)
            for name, text in _DURATIONS.items()
        }
        self._add_gaps(counter)
        self._outcomes = self._family(_OUTCOMES, "Ended answers by finish reason", counter)
        self._counters_by_reason: dict[str, Any] = {}
        self._told: dict[str, float] = {}
        self._last_stats: Mapping[str, int] = {}
        self._round = 0

    def publish(self, stats: Mapping[str, int], own: Mapping[str, int], done: Statistics) -> None:
        """Tell the server what has changed.

        Args:
            stats: how busy the engine is, and its own counts.
            own: gauges of the executor.
            done: what happened to requests.
        """
        blocks = stats.get("kv_cache_blocks", 0)
        usage = {"kv_cache_usage_perc": stats["kv_cache_blocks_used"] / blocks} if blocks else {}
        for name, value in {**stats, **usage, **own}.items():
            if name in self._gauges and self._told.get(name) != value:
                self._gauges[name].set(float(value))
                self._told[name] = value
        self._count_engine(stats, done)
        self._round += 1
        if self._round % _SLOW_EVERY == 0 or not own.get("num_requests"):
            self._publish_counts(done)

    def _publish_counts(self, done: Statistics) -> None:
        done.counts["merged_responses_total"] = done.num_merged
        for name, counter in self._counters.items():
            self._raise_to(name, counter, done.counts[name])
        for reason, count in done.finished.items():
            name = f"{_OUTCOMES}/{reason}"
            if name not in self._counters_by_reason:
                labels = _LABELS | {"finished_reason": reason}
                self._counters_by_reason[name] = self._outcomes.Metric(labels)
            self._raise_to(name, self._counters_by_reason[name], count)
        for name, seconds in done.durations.items():
            for value in seconds:
                self._durations[name].observe(value)
            seconds.clear()
        gaps = done.cumulative_gaps()
        for bound, counter, count in zip(self._bounds, self._gap_buckets, gaps, strict=True):
            self._raise_to(f"{_GAPS}/{bound}", counter, count)
        self._raise_to(f"{_GAPS}/count", self._gap_count, gaps[-1])
        self._raise_to(f"{_GAPS}/sum", self._gap_sum, done.token_gap_sum_s)

    def _raise_to(self, name: str, counter: Any, value: float) -> None:  # noqa: ANN401 - the server's
        added = value - self._told.get(name, 0.0)
        if added > 0:
            counter.increment(float(added))
            self._told[name] = value

    def _count_engine(self, stats: Mapping[str, int], done: Statistics) -> None:
        for source, name in _OF_ENGINE.items():
            before, now = self._last_stats.get(source, 0), stats.get(source, 0)
            # A lower number is that of a new process.
            done.counts[name] += now - before if now >= before else now
        self._last_stats = dict(stats)

    def _add_gaps(self, kind: Any) -> None:  # noqa: ANN401 - the server's
        self._bounds = [*(f"{bound:g}" for bound in TOKEN_BUCKETS_S), "+Inf"]
        family = self._family(f"{_GAPS}_bucket", "Time between two updates of an answer", kind)
        self._gap_buckets = [family.Metric(_LABELS | {"le": bound}) for bound in self._bounds]
        self._gap_count = self._family(f"{_GAPS}_count", "How many", kind).Metric(_LABELS)
        self._gap_sum = self._family(f"{_GAPS}_sum", "Their sum", kind).Metric(_LABELS)

    def _family(self, name: str, text: str, kind: Any) -> Any:  # noqa: ANN401 - the server's
        family = pb_utils.MetricFamily(name=f"nereid:{name}", description=text, kind=kind)
        self._families.append(family)
        return family
