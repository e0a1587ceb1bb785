"""Computes the number of servers from the waiting requests and the use of the KV cache."""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

# The number of servers stays the same if the load differs from the target by at most 10 %.
_TOLERANCE = 0.1


class ScaleWithLoad:
    """An autoscaling policy for Ray Serve.

    There are two targets. For each target, the load is the average of a gauge over all servers. The
    number of servers is multiplied by the larger quotient of load and target, as the
    HorizontalPodAutoscaler of Kubernetes does. Example: there are 4 servers, 12 sequences wait in
    each server, and the target is 8. The wanted number of servers is then 4 * 12 / 8 = 6.

    Args:
        waiting_requests: the target for the number of waiting sequences in a server.
        kv_cache_usage: the target for the fraction of a KV cache in use, from 0 to 1.
    """

    def __init__(self, waiting_requests: float, kv_cache_usage: float) -> None:
        self._targets = {
            "num_requests_waiting": waiting_requests,
            "kv_cache_usage_perc": kv_cache_usage,
        }

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of servers that the load requires, and an empty state for Ray.

        If a gauge, such as the number of waiting sequences, is twice its target on average, twice
        as many servers are required. If no server has reported a gauge, Ray's previous decision
        about the number of servers stays valid.

        Ray rounds the number up, applies the smallest and the largest number of replicas, and waits
        for the configured delays.
        """
        num_servers = context.current_num_replicas
        loads = [
            self._load_per_target(gauge, values_by_server)
            for gauge, values_by_server in (context.aggregated_metrics or {}).items()
            if gauge in self._targets and values_by_server
        ]
        if not num_servers or not loads:
            # Repeat Ray's previous decision, because no server has reported a load. While servers
            # start or stop, `current_num_replicas` differs from this decision.
            return context.target_num_replicas, {}
        largest_load = max(loads)  # relative to the `num_servers` servers that reported the gauges
        is_on_target = abs(largest_load - 1) <= _TOLERANCE
        return (num_servers if is_on_target else num_servers * largest_load), {}

    def _load_per_target(self, gauge: str, values_by_server: Mapping[Any, float]) -> float:
        """Return the average of a gauge over all servers, divided by the target for this gauge."""
        average = sum(values_by_server.values()) / len(values_by_server)
        return average / self._targets[gauge]
