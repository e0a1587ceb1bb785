# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms on Triton server's page /metrics. Their names begin with `nereid:`.

Publishing a changed number costs a model's stub one round trip to the server. Therefore a histogram
of many values is collected in this process, and published as counters. The counters have the names
that a Prometheus histogram would have.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb_utils

Labels = Mapping[str, str]

DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the histogram buckets for the durations of requests, in seconds."""
SIZE_BUCKETS = tuple(digit * 10.0**exponent for exponent in range(6) for digit in (1, 2, 5))
"""The upper bounds of the histogram buckets for numbers of tokens or inputs: 1, 2, 5, 10 ..."""


class Histogram:
    """A histogram of values.

    Attributes:
        bounds: the upper bounds of the buckets.
        sum: the sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """For each bound of the histogram, count the values that do not exceed the bound.

        The count of a bound is the number of values that are less than or equal to the bound. The
        last count is the number of all values. Example: with the bounds [1, 5], the values 0.5, 1,
        3 and 9 return [2, 3, 4].
        """
        return list(accumulate(self._counts))


class MetricFamilies:
    """Creates the metrics of one model. The metrics exist as long as this object exists."""

    def __init__(self) -> None:
        # The server deletes a metric family when its Python object is deleted. This list prevents
        # the deletion.
        self._families: list[Any] = []

    def gauge(self, name: str, text: str) -> Any:  # noqa: ANN401 - the server's own type
        """Return a family of gauges."""
        return self._family(name, text, pb_utils.MetricFamily.GAUGE)

    def counter(self, name: str, text: str) -> "CounterFamily":
        """Return a family of counters."""
        return CounterFamily(self._family(name, text, pb_utils.MetricFamily.COUNTER))

    def histogram(self, name: str, text: str) -> Any:  # noqa: ANN401 - the server's own type
        """Create a metric family with Triton server's metric type `HISTOGRAM`."""
        return self._family(name, text, pb_utils.MetricFamily.HISTOGRAM)

    def histogram_counters(self, name: str, text: str, labels: Labels) -> "HistogramCounters":
        """Return the counters that together form a Prometheus histogram.

        The names of the counters are NAME_bucket, NAME_count and NAME_sum.
        """
        return HistogramCounters(
            labels,
            self.counter(f"{name}_bucket", f"{text}, by upper bound"),
            self.counter(f"{name}_count", f"{text}: the number of values"),
            self.counter(f"{name}_sum", f"{text}: the sum of the values"),
        )

    def _family(self, name: str, text: str, kind: Any) -> Any:  # noqa: ANN401 - the server's
        """Create a metric family at the server."""
        family = pb_utils.MetricFamily(name=f"nereid:{name}", description=text, kind=kind)
        self._families.append(family)
        return family


class CounterFamily:
    """Counters with the same name and different labels.

    Args:
        family: the server's metric family.
    """

    def __init__(self, family: Any) -> None:  # noqa: ANN401 - the server's own type
        self._family = family
        # `_counters` contains the counters, and `_published` contains their last published values.
        # In each dict, the key is the tuple of a counter's labels. Example: (("model", "llm"),
        # ("version", "1")).
        self._counters: dict[tuple[tuple[str, str], ...], Any] = {}
        self._published: dict[tuple[tuple[str, str], ...], float] = {}

    def raise_to(self, value: float, labels: Labels) -> None:
        """Increase a counter to `value`. `labels` are the labels of the counter."""
        key = tuple(labels.items())
        if key not in self._counters:
            self._counters[key] = self._family.Metric(dict(labels))
        added = value - self._published.get(key, 0.0)
        if added > 0:
            self._counters[key].increment(float(added))
            self._published[key] = value


class HistogramCounters:
    """Publishes a histogram as counters.

    Args:
        labels: the labels of all counters.
        buckets, count, total: the counters that publish the counts of the buckets, the number of
            values, and the sum of the values.
    """

    def __init__(
        self, labels: Labels, buckets: CounterFamily, count: CounterFamily, total: CounterFamily
    ) -> None:
        self._labels = labels
        self._buckets = buckets
        self._count = count
        self._sum = total

    def publish(self, histogram: Histogram) -> None:
        """Publish the current state of `histogram`.

        Every call must pass the same histogram.
        """
        cumulative = histogram.cumulative()
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, number in zip(bounds, cumulative, strict=True):
            self._buckets.raise_to(number, {**self._labels, "le": bound})
        self._count.raise_to(cumulative[-1], self._labels)
        self._sum.raise_to(histogram.sum, self._labels)
