# SPDX-License-Identifier: Apache-2.0
"""Publishes metrics of the engine and of the requests on the /metrics page of Triton server.

The name of each metric begins with "nereid:". The manual's page on metrics explains each metric.
Publishing a changed number costs the stub one round trip to the server. So only the gauges are
published ten times a second. All other metrics are published once a second. Thousands of tokens are
generated per second, and the time between two tokens is a metric. This metric is published as
counters (see published_metrics.py).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.process.supervised_process import SupervisedProcess
from nereid_backend.serving.published_metrics import (
    DURATION_BUCKETS_S,
    SIZE_BUCKETS,
    MetricFamilies,
)

_ENSEMBLE = "llm"
_EXECUTOR = "executor"
_PUBLISH_INTERVAL_S = 0.1
# Counters and histograms are published in every tenth publication.
_PUBLICATIONS_PER_COUNTER_UPDATE = 10

_ENGINE_GAUGES = {
    "num_requests_running": "Sequences that occupy blocks of the KV cache",
    "num_requests_waiting": "Sequences in the waiting queue of the engine",
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
    "image_encodings_total": "Runs of the image or audio encoder; known files need none",
    "spec_decode_num_drafts_total": "Drafts that the model verified",
    "spec_decode_num_draft_tokens_total": "Draft tokens that speculative decoding proposed",
    "spec_decode_num_accepted_tokens_total": "Draft tokens that the model accepted",
    "requests_disconnected_total": "Requests whose client disconnected before the end",
    "requests_refused_total": "Requests that were refused because the server had no capacity",
    "requests_timed_out_total": "Requests that exceeded their timeout or queue_timeout",
    "merged_responses_total": "Engine updates that were merged with others into one response",
    "heartbeats_total": "Empty steps that were sent to detect disconnected clients",
}
# The counters that an engine process reports. In a restarted engine process, they start at 0 again.
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


@dataclass(slots=True)
class _EngineGauges:
    """The gauges of one engine process, and the last values that the process has reported.

    Attributes:
        gauges: the server's gauges, by name.
        stats: the most recent statistics of the process; see EngineStats.
        published: the last published value of each gauge, so that only changes are published.
        last_stats: the values of the engine's counters in the previous publication.
    """

    gauges: dict[str, Any]
    stats: Mapping[str, int] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    last_stats: Mapping[str, int] = field(default_factory=dict)


class EngineMetrics:
    """Publishes the metrics. Only the executor's loop may call its methods.

    Args:
        executor: the name of the executor model. The executor "chat-executor" belongs to the
            ensemble "chat", and the executor "executor" belongs to the ensemble "llm". The label
            `model_name` of all metrics is the name of the ensemble.
        processes: the engine processes. If there are several engine processes, the gauges of each
            process have the label `engine`. The value of the label is the number of the process.
    """

    def __init__(
        self, executor: str = _EXECUTOR, processes: Sequence[SupervisedProcess] = ()
    ) -> None:
        """Create the metrics in Triton server. The initial value of each metric is 0.

        The order of the metrics on the page /metrics is the order in which they are created here.
        """
        families = MetricFamilies()
        labels = {"model_name": _ensemble_of(executor)}
        self._families = families
        self._labels = labels
        self._processes = processes
        # The time of the next publication, by time.monotonic(). The first publication is due
        # immediately.
        self._publish_due = 0.0
        self._num_publications = 0
        self._published_num_requests: int | None = None  # None before the first publication

        # The gauges are published each time.
        self._num_requests = _create_gauge_of_requests(families, labels)
        self._gauges_of_engines = _create_gauges_of_engines(families, labels, len(processes))
        # To save time, the counters and the histograms are published only every tenth time.
        self._counters = {name: families.counter(name, text) for name, text in _COUNTERS.items()}
        self._histograms = _create_histograms(families, labels)
        # Each update of a sequence adds one value to this histogram. Passing each value to the
        # server would take too much time. Therefore, the values are counted here, and the counts
        # are published as counters, one for each bucket of the histogram.
        self._token_gaps = families.histogram_counters(
            "inter_token_latency_seconds", "Time between two updates of a sequence", labels
        )
        self._finish_reasons = families.counter(
            "request_success_total", "Ended sequences by finish reason"
        )

    def note_stats(self, process: SupervisedProcess, stats: Mapping[str, int]) -> None:
        """Store the statistics that an engine process has sent."""
        self._gauges_of_engines[process.index].stats = stats

    def note_death(self, process: SupervisedProcess) -> None:
        """Set the statistics of a dead process to 0. The next call of `publish` reports the death.

        The counters of the process that replaces the dead process start at 0.
        """
        engine = self._gauges_of_engines[process.index]
        engine.stats = dict.fromkeys(engine.stats, 0)
        self._publish_due = 0.0

    def note_restart(self) -> None:
        """Make the next call of `publish` report the new number of restarts immediately."""
        self._publish_due = 0.0

    def publish(self, num_requests: int, statistics: RequestStatistics) -> None:
        """Publish the metrics that have changed, at most ten times a second.

        Gauges are published each time. To save time, counters and histograms are published only
        every tenth time, and whenever the executor has no requests.

        Args:
            num_requests: the number of requests in the executor.
            statistics: the counters of requests, and the values for the histograms of requests.
                Mutated: the counters of all engine processes are added, because the server shows
                one sum. Published values of histograms are removed.
        """
        now = time.monotonic()
        if now < self._publish_due:
            return
        self._publish_due = now + _PUBLISH_INTERVAL_S
        self._publish_changed_gauges(num_requests)
        for process in self._processes:
            _add_counter_increases(self._gauges_of_engines[process.index], statistics)
        self._num_publications += 1
        is_tenth_time = self._num_publications % _PUBLICATIONS_PER_COUNTER_UPDATE == 0
        if is_tenth_time or num_requests == 0:
            self._publish_counters(statistics)

    def _publish_changed_gauges(self, num_requests: int) -> None:
        """Publish the gauges whose values have changed.

        These are gauges of the executor or of the engine processes. `num_requests` is the number of
        requests of the executor.
        """
        if num_requests != self._published_num_requests:
            self._num_requests.set(float(num_requests))
            self._published_num_requests = num_requests
        for process in self._processes:
            _publish_gauges(self._gauges_of_engines[process.index], process)

    def _publish_counters(self, statistics: RequestStatistics) -> None:
        """Publish the counters and the histograms of requests."""
        statistics.counts["merged_responses_total"] = statistics.num_merged
        for name, counter in self._counters.items():
            counter.raise_to(statistics.counts[name], self._labels)
        for reason, count in statistics.finished.items():
            self._finish_reasons.raise_to(count, {**self._labels, "finished_reason": reason})
        for name, values in statistics.observations.items():
            for value in values:
                self._histograms[name].observe(value)
            values.clear()
        self._token_gaps.publish(statistics.token_gaps)


def _ensemble_of(executor: str) -> str:
    """Return the name of the ensemble to which an executor belongs.

    Examples: "chat-executor" returns "chat", and "executor" returns "llm".
    """
    return _ENSEMBLE if executor == _EXECUTOR else executor.removesuffix(f"-{_EXECUTOR}")


def _create_gauge_of_requests(families: MetricFamilies, labels: Mapping[str, str]) -> Any:  # noqa: ANN401
    """Create the gauge of the number of requests in the executor."""
    text = "Requests in the executor, from their arrival to their last response"
    return families.gauge("num_requests", text).Metric(labels)


def _create_gauges_of_engines(
    families: MetricFamilies, labels: Mapping[str, str], num_engines: int
) -> list[_EngineGauges]:
    """Create the gauges of all engine processes. Return one `_EngineGauges` for each process.

    If there are several engine processes, their gauges also have the label `engine`, which is the
    number of the process. Example: nereid:num_requests_running{model_name="chat",engine="1"}.
    """
    engine_families = {name: families.gauge(name, text) for name, text in _ENGINE_GAUGES.items()}
    engines = []
    for index in range(num_engines):
        engine_labels = dict(labels)
        if num_engines > 1:
            engine_labels["engine"] = str(index)
        gauges = {name: family.Metric(engine_labels) for name, family in engine_families.items()}
        engines.append(_EngineGauges(gauges))
    return engines


def _create_histograms(families: MetricFamilies, labels: Mapping[str, str]) -> dict[str, Any]:
    """Create the histograms of requests, and return them by name."""
    histograms: dict[str, Any] = {}
    for texts, bounds in ((_DURATIONS, DURATION_BUCKETS_S), (_SIZES, SIZE_BUCKETS)):
        for name, text in texts.items():
            family = families.histogram(name, text)
            histograms[name] = family.Metric(dict(labels), buckets=list(bounds))
    return histograms


def _publish_gauges(engine: _EngineGauges, process: SupervisedProcess) -> None:
    """Publish the gauges of an engine process that have changed since the last publication."""
    stats = engine.stats
    blocks = stats.get("kv_cache_blocks", 0)  # 0 if the process has died
    values = {
        **stats,
        "num_engine_restarts": process.num_restarts,
        "engine_up": int(process.is_running),
        "kv_cache_usage_perc": stats["kv_cache_blocks_used"] / blocks if blocks else 0.0,
    }
    for name, value in values.items():
        if name in engine.gauges and engine.published.get(name) != value:
            engine.gauges[name].set(float(value))
            engine.published[name] = value


def _add_counter_increases(engine: _EngineGauges, statistics: RequestStatistics) -> None:
    """Add the increases of an engine's counters to `statistics`.

    An increase is the difference between the present value and the value at the previous call.
    Example: an engine reports 100 tokens, and 130 tokens in the next call. The second call adds 30.

    Mutates: `statistics.counts` and `engine.last_stats`.
    """
    for engine_name, metric_name in _ENGINE_COUNTERS.items():
        previous_count = engine.last_stats.get(engine_name, 0)
        count = engine.stats.get(engine_name, 0)
        if count < previous_count:
            # The engine process was restarted, so its counters started at 0 again.
            previous_count = 0
        statistics.counts[metric_name] += count - previous_count
    engine.last_stats = engine.stats
