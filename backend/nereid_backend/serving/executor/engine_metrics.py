# SPDX-License-Identifier: Apache-2.0
"""Publishes metrics of the engine and of the requests on Triton server's page /metrics.

The name of each metric begins with "nereid:". The manual's page on metrics explains each metric.
Publishing a changed number costs the stub one round trip to the server. So only the gauges are
published ten times a second, and all other metrics once a second. The times between tokens, of
which there are thousands in a second, are published as counters (see published_metrics.py).
"""

from collections.abc import Mapping, Sequence

from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.published_metrics import (
    DURATION_BUCKETS_S,
    SIZE_BUCKETS,
    MetricFamilies,
)

_ENSEMBLE = "llm"
_EXECUTOR = "executor"
# Counters and histograms are published in every tenth call of `publish`.
_COUNTER_ROUNDS = 10

_ENGINE_GAUGES = {
    "num_requests_running": "Sequences that occupy blocks of the KV cache",
    "num_requests_waiting": "Sequences in the waiting queue of the engine",
    "kv_cache_usage_perc": "Share of the KV cache blocks that are in use, from 0 to 1",
    "kv_cache_blocks_used": "Blocks of the KV cache that are in use",
    "kv_cache_blocks": "Blocks of the KV cache in total",
    "engine_up": "1 while the engine accepts requests, 0 while it restarts or has given up",
    "num_engine_restarts": "Restarts of the engine process",
}
_NUM_REQUESTS = "num_requests"
_COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests whose first token was generated",
    "generation_tokens_total": "Generated tokens",
    "num_preemptions_total": "Preemptions: a running request loses its KV cache blocks",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix cache",
    "image_encodings_total": "Runs of the image encoder; known images need none",
    "spec_decode_num_drafts_total": "Drafts that the model verified",
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
    "num_image_encodings": "image_encodings_total",
    "num_drafts": "spec_decode_num_drafts_total",
    "num_proposed_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
_DURATIONS = {
    "time_to_first_token_seconds": "Time from the arrival in the executor to the first token",
    "request_queue_time_seconds": "Time from the arrival in the executor to the first computation",
    "request_prefill_time_seconds": "Time from the first computation to the first token",
    "request_decode_time_seconds": "Time from the first token to the last response",
    "e2e_request_latency_seconds": "Time from the arrival in the executor to the last response",
}
_SIZES = {
    "request_prompt_tokens": "Prompt tokens of each request whose first token was generated",
    "request_generation_tokens": "Generated tokens of each ended sequence",
}


class EngineMetrics:
    """Publishes metrics. Only the executor's loop may call it.

    Args:
        executor: the name of the executor model. The ensemble of the executor "chat-executor" has
            the name "chat", and that of "executor" has the name "llm". The label `model_name` of
            all metrics is the name of the ensemble.
        num_engines: the number of engine processes. If there are several, the gauges of each
            process have the label `engine` with the number of the process.
    """

    def __init__(self, executor: str = _EXECUTOR, num_engines: int = 1) -> None:
        """Create the metrics at the server, with the value 0."""
        self._labels = {"model_name": executor.removesuffix(f"-{_EXECUTOR}")}
        if executor == _EXECUTOR:
            self._labels = {"model_name": _ENSEMBLE}
        families = self._families = MetricFamilies()
        self._num_requests = families.gauge(
            _NUM_REQUESTS, "Requests in the executor, from their arrival to their last response"
        ).Metric(self._labels)
        engine_gauges = {name: families.gauge(name, text) for name, text in _ENGINE_GAUGES.items()}
        # The gauges of each engine process by name.
        self._gauges = [
            {
                name: family.Metric(
                    {**self._labels, "engine": str(index)} if num_engines > 1 else self._labels
                )
                for name, family in engine_gauges.items()
            }
            for index in range(num_engines)
        ]
        self._counters = {name: families.counter(name, text) for name, text in _COUNTERS.items()}
        self._histograms = {
            name: families.histogram(name, text).Metric(self._labels, buckets=list(bounds))
            for names, bounds in ((_DURATIONS, DURATION_BUCKETS_S), (_SIZES, SIZE_BUCKETS))
            for name, text in names.items()
        }
        self._token_gaps = families.histogram_counters(
            "inter_token_latency_seconds", "Time between two updates of a sequence", self._labels
        )
        self._outcomes = families.counter(
            "request_success_total", "Ended sequences by finish reason"
        )
        # The last published value of each engine's gauges, so that only changes are published.
        self._published: list[dict[str, float]] = [{} for _ in range(num_engines)]
        self._published_num_requests: int | None = None
        # The values of each engine's counters in the previous call of `publish`.
        self._last_stats: list[Mapping[str, int]] = [{} for _ in range(num_engines)]
        # The number of calls of `publish`.
        self._round = 0

    def publish(
        self, engines: Sequence[Mapping[str, int]], num_requests: int, statistics: RequestStatistics
    ) -> None:
        """Publish the metrics that have changed.

        Gauges are published in each call. To save time, counters and histograms are published only
        in every tenth call, and whenever the executor has no requests.

        Args:
            engines: the gauges and counters of each engine process.
            num_requests: the number of requests in the executor.
            statistics: the counters and the histograms' values of requests.
        """
        if num_requests != self._published_num_requests:
            self._num_requests.set(float(num_requests))
            self._published_num_requests = num_requests
        for index, stats in enumerate(engines):
            self._publish_gauges(index, stats)
            self._add_engine_counts(index, stats, statistics)
        self._round += 1
        if self._round % _COUNTER_ROUNDS == 0 or not num_requests:
            self._publish_counters(statistics)

    def _publish_gauges(self, index: int, stats: Mapping[str, int]) -> None:
        """Publish the gauges of an engine process that have changed."""
        gauges, published = self._gauges[index], self._published[index]
        blocks = stats.get("kv_cache_blocks", 0)
        usage = {"kv_cache_usage_perc": stats["kv_cache_blocks_used"] / blocks} if blocks else {}
        for name, value in {**stats, **usage}.items():
            if name in gauges and published.get(name) != value:
                gauges[name].set(float(value))
                published[name] = value

    def _publish_counters(self, statistics: RequestStatistics) -> None:
        """Publish the counters and the histograms of requests."""
        statistics.counts["merged_responses_total"] = statistics.num_merged
        for name, counter in self._counters.items():
            counter.raise_to(statistics.counts[name], self._labels)
        for reason, count in statistics.finished.items():
            self._outcomes.raise_to(count, {**self._labels, "finished_reason": reason})
        for name, values in statistics.observations.items():
            for value in values:
                self._histograms[name].observe(value)
            values.clear()
        self._token_gaps.publish(statistics.token_gaps)

    def _add_engine_counts(
        self, index: int, stats: Mapping[str, int], statistics: RequestStatistics
    ) -> None:
        """Add to `statistics` the increase of an engine's counters since the last call."""
        last = self._last_stats[index]
        for source, name in _ENGINE_COUNTERS.items():
            before = last.get(source, 0)
            now = stats.get(source, 0)
            # A smaller value comes from a new engine process, whose counters started at 0.
            statistics.counts[name] += now - before if now >= before else now
        self._last_stats[index] = dict(stats)
