"""Computes the number of servers from the waiting requests and the use of the KV cache."""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

# The number of servers does not change while the load is within 10 % of the target.
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
        """Return the wanted number of servers, and an empty state.

        Ray rounds the number up, applies the smallest and the largest number of replicas, and waits
        for the configured delays.
        """
        current = context.current_num_replicas
        loads = [
            self._load(name, values)
            for name, values in (context.aggregated_metrics or {}).items()
            if name in self._targets and values
        ]
        if not current or not loads:
            return context.target_num_replicas, {}
        load = max(loads)
        is_balanced = abs(load - 1) <= _TOLERANCE
        return (current if is_balanced else current * load), {}

    def _load(self, name: str, values: Mapping[Any, float]) -> float:
        """Return the average of a gauge over all servers, divided by the target for this gauge."""
        return sum(values.values()) / len(values) / self._targets[name]
