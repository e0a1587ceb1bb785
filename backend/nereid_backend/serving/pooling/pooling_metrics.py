# SPDX-License-Identifier: Apache-2.0
"""Metrics of the models `embedding` and `rerank` on Triton server's /metrics page."""

import time
from collections import Counter
from dataclasses import dataclass, field

from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.serving.published_metrics import (
    DURATION_BUCKETS_S,
    SIZE_BUCKETS,
    Histogram,
    MetricFamilies,
)

_PUBLISH_INTERVAL_S = 1.0
_COUNTERS = {
    "pooling_prompt_tokens_total": "Tokens of all inputs of successful requests",
    "pooling_restarts_total": "Restarts of the worker process",
}
_HISTOGRAMS = {
    "pooling_queue_time_seconds": "Time from the arrival to the first computation",
    "pooling_compute_time_seconds": "Time from the first computation to the response",
    "pooling_e2e_latency_seconds": "Time from the arrival to the response",
    "pooling_request_inputs": "Inputs of each successful request",
    "pooling_request_prompt_tokens": "Tokens of each successful request",
}


def _make_histograms() -> dict[str, Histogram]:
    """Return an empty histogram for each name in `_HISTOGRAMS`."""
    return {
        name: Histogram(DURATION_BUCKETS_S if name.endswith("_seconds") else SIZE_BUCKETS)
        for name in _HISTOGRAMS
    }


@dataclass(slots=True)
class _Values:
    """The values of all metrics since the start of this process.

    Attributes:
        num_by_outcome: the number of answered requests by outcome.
        counts: the other counts, by the name of the metric.
        histograms: the durations and the sizes of requests, by the name of the metric.
    """

    num_by_outcome: Counter[str] = field(
        default_factory=lambda: Counter({"success": 0, "refused": 0, "error": 0})
    )
    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=_make_histograms)


class PoolingMetrics:
    """The metrics of one model. Only the thread that runs the model's loop may use them.

    The other methods record values in this process, and `publish` sends the values to the metrics
    in Triton server.

    Args:
        model_name: the value of the label `model_name`.
    """

    def __init__(self, model_name: str) -> None:
        """Create the metrics in Triton server."""
        self._values = _Values()  # the values that `publish` sends to the metrics
        self._labels = {"model_name": model_name}
        # `_families` creates the metrics. They exist until `_families` is deleted.
        self._families = MetricFamilies()
        self._num_requests_gauge = self._families.gauge(
            "pooling_num_requests", "Requests without a response"
        ).Metric(self._labels)
        self._requests_by_outcome = self._families.counter(
            "pooling_requests_total", "Answered requests by outcome"
        )
        self._counters = {
            name: self._families.counter(name, text) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: self._families.histogram_counters(name, text, self._labels)
            for name, text in _HISTOGRAMS.items()
        }
        # The time of the next publication, by time.monotonic(). The first publication is due
        # immediately.
        self._publish_due = 0.0

    def note_success(
        self, arrived: float, started: float, num_inputs: int, num_tokens: int
    ) -> None:
        """Record a successful request.

        Call this method before the outputs of the request are sent, because the measured times end
        at the call. The time for sending the outputs must not count.

        Args:
            arrived: the time at which the request arrived, by time.monotonic().
            started: the time at which the computation of the request's first input started. The
                worker process measures this time, with the same clock as this process.
            num_inputs: the number of inputs of the request.
            num_tokens: the number of tokens of these inputs.
        """
        now = time.monotonic()
        values = {
            "pooling_queue_time_seconds": started - arrived,
            "pooling_compute_time_seconds": now - started,
            "pooling_e2e_latency_seconds": now - arrived,
            "pooling_request_inputs": num_inputs,
            "pooling_request_prompt_tokens": num_tokens,
        }
        for name, value in values.items():
            self._values.histograms[name].observe(value)
        self._values.counts["pooling_prompt_tokens_total"] += num_tokens

    def note_response(self, result: object) -> None:
        """Increment the counter for the outcome of a response: success, refused or error.

        Args:
            result: the output tensors, or the error that the response contains.
        """
        if not isinstance(result, Exception):
            outcome = "success"
        elif isinstance(result, CapacityError | RequestError):
            outcome = "refused"
        else:
            outcome = "error"
        self._values.num_by_outcome[outcome] += 1

    def note_restart(self) -> None:
        """Count a restart of the worker process."""
        self._values.counts["pooling_restarts_total"] += 1

    def publish(self, num_requests: int) -> None:
        """Publish all metrics. Do nothing if the last publication was less than 1 s ago."""
        now = time.monotonic()
        if now < self._publish_due:
            return
        self._publish_due = now + _PUBLISH_INTERVAL_S
        self._num_requests_gauge.set(float(num_requests))
        for outcome, count in self._values.num_by_outcome.items():
            self._requests_by_outcome.raise_to(count, {**self._labels, "outcome": outcome})
        for name, counter in self._counters.items():
            counter.raise_to(self._values.counts[name], self._labels)
        for name, histogram in self._values.histograms.items():
            self._histograms[name].publish(histogram)
