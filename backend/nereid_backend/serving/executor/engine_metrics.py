# SPDX-License-Identifier: Apache-2.0
"""Metrics of the engine and its requests on Triton server's /metrics page, named `nereid:NAME`.

The manual's page on metrics explains each metric. Publishing a changed number costs the stub one
round trip to the server. So only the gauges are published ten times a second, and all other metrics
once a second. The times between tokens, of which there are thousands in a second, are published as
counters that look like the buckets of a histogram.
"""

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid_backend.serving.executor.request_statistics import TOKEN_BUCKETS_S, RequestStatistics

_LABELS = {"model_name": "llm"}
# Counters and histograms are published in every tenth call of `publish`.
_COUNTER_ROUNDS = 10

_GAUGES = {
    "num_requests_running": "Sequences that occupy blocks of the KV cache",
    "num_requests_waiting": "Sequences in the waiting queue of the engine",
    "num_requests": "Requests in the executor, from their arrival to their last response",
    "kv_cache_usage_perc": "Share of the KV cache blocks that are in use, from 0 to 1",
    "kv_cache_blocks_used": "Blocks of the KV cache that are in use",
    "kv_cache_blocks": "Blocks of the KV cache in total",
    "engine_up": "1 while the engine accepts requests, 0 while it restarts or has given up",
    "num_engine_restarts": "Restarts of the engine process",
}
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests whose first token was generated",
    "generation_tokens_total": "Generated tokens",
    "num_preemptions_total": "Preemptions: a running request loses its KV cache blocks",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix cache",
    "spec_decode_num_draft_tokens_total": "Draft tokens that speculative decoding proposed",
    "spec_decode_num_accepted_tokens_total": "Draft tokens that the model accepted",
    "requests_disconnected_total": "Requests whose client disconnected before the end",
    "requests_refused_total": "Requests that were refused because the server had no capacity",
    "requests_timed_out_total": "Requests that exceeded their timeout or queue_timeout",
    "merged_responses_total": "Engine updates that were merged with others into one response",
    "heartbeats_total": "Empty steps that were sent to detect disconnected clients",
}
# Counters of the engine process, which start at 0 with each engine process.
_ENGINE_COUNTERS = {
    "num_preemptions": "num_preemptions_total",
    "num_prefix_cache_queries": "prefix_cache_queries_total",
    "num_prefix_cache_hits": "prefix_cache_hits_total",
    "num_proposed_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
_DURATIONS = {
    "time_to_first_token_seconds": "Time from the arrival in the executor to the first token",
    "request_queue_time_seconds": "Time from the arrival in the executor to the first computation",
    "e2e_request_latency_seconds": "Time from the arrival in the executor to the last response",
}
_REQUEST_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_GAPS = "inter_token_latency_seconds"
_OUTCOMES = "request_success_total"


class EngineMetrics:
    """Publishes metrics. Only the executor's loop may call it."""

    def __init__(self) -> None:
        # The server deletes a metric family with its Python object, so the objects are kept here.
        self._families: list[Any] = []
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        self._gauges = {
            name: self._family(name, text, gauge).Metric(_LABELS) for name, text in _GAUGES.items()
        }
        self._counters = {
            name: self._family(name, text, counter).Metric(_LABELS)
            for name, text in _COUNTERS.items()
        }
        histogram = pb_utils.MetricFamily.HISTOGRAM
        self._durations = {
            name: self._family(name, text, histogram).Metric(_LABELS, buckets=_REQUEST_BUCKETS_S)
            for name, text in _DURATIONS.items()
        }
        self._add_token_gap_counters(counter)
        self._outcomes = self._family(_OUTCOMES, "Ended sequences by finish reason", counter)
        self._counters_by_reason: dict[str, Any] = {}
        self._published: dict[str, float] = {}
        self._last_stats: Mapping[str, int] = {}
        self._round = 0

    def publish(
        self, stats: Mapping[str, int], own: Mapping[str, int], statistics: RequestStatistics
    ) -> None:
        """Publish the metrics that have changed.

        Args:
            stats: the gauges and counters of the engine process.
            own: the gauges of the executor.
            statistics: the counters and durations of requests.
        """
        blocks = stats.get("kv_cache_blocks", 0)
        usage = {"kv_cache_usage_perc": stats["kv_cache_blocks_used"] / blocks} if blocks else {}
        for name, value in {**stats, **usage, **own}.items():
            if name in self._gauges and self._published.get(name) != value:
                self._gauges[name].set(float(value))
                self._published[name] = value
        self._add_engine_counts(stats, statistics)
        self._round += 1
        if self._round % _COUNTER_ROUNDS == 0 or not own.get("num_requests"):
            self._publish_counters(statistics)

    def _publish_counters(self, statistics: RequestStatistics) -> None:
        statistics.counts["merged_responses_total"] = statistics.num_merged
        for name, counter in self._counters.items():
            self._raise_to(name, counter, statistics.counts[name])
        for reason, count in statistics.finished.items():
            name = f"{_OUTCOMES}/{reason}"
            if name not in self._counters_by_reason:
                labels = _LABELS | {"finished_reason": reason}
                self._counters_by_reason[name] = self._outcomes.Metric(labels)
            self._raise_to(name, self._counters_by_reason[name], count)
        for name, seconds in statistics.durations.items():
            for value in seconds:
                self._durations[name].observe(value)
            seconds.clear()
        gaps = statistics.cumulative_gaps()
        for bound, counter, count in zip(self._bounds, self._gap_buckets, gaps, strict=True):
            self._raise_to(f"{_GAPS}/{bound}", counter, count)
        self._raise_to(f"{_GAPS}/count", self._gap_count, gaps[-1])
        self._raise_to(f"{_GAPS}/sum", self._gap_sum, statistics.token_gap_sum_s)

    def _raise_to(self, name: str, counter: Any, value: float) -> None:  # noqa: ANN401 - the server's
        """Increment `counter` so that its published value becomes `value`."""
        added = value - self._published.get(name, 0.0)
        if added > 0:
            counter.increment(float(added))
            self._published[name] = value

    def _add_engine_counts(self, stats: Mapping[str, int], statistics: RequestStatistics) -> None:
        """Add the increase of the engine's counters since the last call to `statistics`."""
        for source, name in _ENGINE_COUNTERS.items():
            before = self._last_stats.get(source, 0)
            now = stats.get(source, 0)
            # A smaller value comes from a new engine process, which starts at 0.
            statistics.counts[name] += now - before if now >= before else now
        self._last_stats = dict(stats)

    def _add_token_gap_counters(self, kind: Any) -> None:  # noqa: ANN401 - the server's
        self._bounds = [*(f"{bound:g}" for bound in TOKEN_BUCKETS_S), "+Inf"]
        family = self._family(f"{_GAPS}_bucket", "Time between two updates of a sequence", kind)
        self._gap_buckets = [family.Metric(_LABELS | {"le": bound}) for bound in self._bounds]
        self._gap_count = self._family(
            f"{_GAPS}_count", "Number of times between two updates", kind
        ).Metric(_LABELS)
        self._gap_sum = self._family(
            f"{_GAPS}_sum", "Sum of the times between two updates", kind
        ).Metric(_LABELS)

    def _family(self, name: str, text: str, kind: Any) -> Any:  # noqa: ANN401 - the server's
        family = pb_utils.MetricFamily(name=f"nereid:{name}", description=text, kind=kind)
        self._families.append(family)
        return family
