# SPDX-License-Identifier: Apache-2.0
"""Publishes the metrics of the executor, at most ten times a second."""

import time
from collections.abc import Mapping, Sequence

from nereid_backend.serving.executor.engine_metrics import EngineMetrics
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.process.supervised_process import SupervisedProcess

_PUBLISH_INTERVAL_S = 0.1


class MetricsPublisher:
    """Combines the statistics of requests and of engine processes, and publishes the metrics."""

    def __init__(
        self,
        model_name: str,
        processes: Sequence[SupervisedProcess],
        statistics: RequestStatistics,
    ) -> None:
        """Create the metrics. Each metric has the value 0.

        Args:
            model_name: the name of the Triton model, for the labels of the metrics.
            processes: the engine processes.
            statistics: the statistics of requests, to which the caller adds requests.
        """
        self._metrics = EngineMetrics(model_name, len(processes))
        self._processes = processes
        self._statistics = statistics
        # The most recent statistics of each engine process; see EngineStats.
        self._engine_stats: list[Mapping[str, int]] = [{} for _ in processes]
        # The time at which the metrics must be published again, as a value of time.monotonic(). The
        # initial value is 0, so the first publication is due immediately.
        self._publish_due = 0.0

    def note_stats(self, process: SupervisedProcess, stats: Mapping[str, int]) -> None:
        """Store the statistics that an engine process has sent."""
        self._engine_stats[process.index] = stats

    def note_death(self, process: SupervisedProcess) -> None:
        """Set the statistics of a dead process to 0. The next call of `publish` reports the death.

        The next statistics come from the new process that replaces the dead process. The counters
        of the new process start at 0.
        """
        self._engine_stats[process.index] = dict.fromkeys(self._engine_stats[process.index], 0)
        self._publish_due = 0.0

    def note_restart(self) -> None:
        """Make the next call of `publish` report the new number of restarts immediately."""
        self._publish_due = 0.0

    def publish(self, num_requests: int) -> None:
        """Publish the metrics. Do nothing if they were published less than 0.1 s ago.

        `num_requests` is the number of requests in the executor.
        """
        now = time.monotonic()
        if now < self._publish_due:
            return
        self._publish_due = now + _PUBLISH_INTERVAL_S
        engines = [
            {
                **self._engine_stats[process.index],
                "num_engine_restarts": process.num_restarts,
                "engine_up": int(process.is_running),
            }
            for process in self._processes
        ]
        self._metrics.publish(engines, num_requests, self._statistics)
