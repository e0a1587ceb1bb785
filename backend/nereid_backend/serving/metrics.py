# SPDX-License-Identifier: Apache-2.0
"""Gauges of the engine on the Triton server's own /metrics page, as `nereid:NAME`."""

from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

_GAUGES = {
    "num_requests_running": "Requests that hold blocks of the KV cache",
    "num_requests_waiting": "Requests that wait for their turn in the engine",
    "num_requests": "Requests in the executor, from arrival to last response",
    "kv_cache_blocks_used": "Blocks of the KV cache in use",
    "kv_cache_blocks": "Blocks of the KV cache",
    "num_preemptions": "How often a running request had to give its blocks back",
    "num_prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache",
    "num_prefix_cache_hits": "Prompt tokens that were found in the prefix cache",
    "num_proposed_tokens": "Tokens that speculation proposed",
    "num_accepted_tokens": "Proposed tokens that were right",
    "num_engine_restarts": "Engine processes started after the first",
}


class Gauges:
    """Publishes numbers; only changed ones cost a message to the server."""

    def __init__(self) -> None:
        # The families must live as long as their metrics.
        self._families = {
            name: pb_utils.MetricFamily(
                name=f"nereid:{name}", description=text, kind=pb_utils.MetricFamily.GAUGE
            )
            for name, text in _GAUGES.items()
        }
        self._gauges = {
            name: family.Metric(labels={"model": "llm"}) for name, family in self._families.items()
        }
        self._published: dict[str, int] = {}

    def publish(self, values: Mapping[str, int]) -> None:
        """Set the gauges of these names."""
        for name, value in values.items():
            if self._published.get(name) != value:
                self._gauges[name].set(value)
                self._published[name] = value
