"""Nereid's engine in process, as a compared engine."""

import json
import os
import statistics
import time
from collections import defaultdict
from typing import Any

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.device_transfer import HostCopy

from loadtest.peers.workload import main


class StepTimes:
    """The times of decode steps, by number of sequences.

    Attributes:
        spent: for each step, the seconds of the whole step, of launching its forward pass, and of
            waiting for the device.
    """

    def __init__(self, engine: Engine) -> None:
        """Start to measure the steps of `engine`."""
        self.spent: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        self._forward_s = self._wait_s = 0.0
        self._rows: set[int] = set()
        path: Any = engine._parts.runner._path
        step, forward, wait = engine.step, path.forward, HostCopy.wait

        def timed_forward(plan: Any, *rest: Any) -> Any:  # noqa: ANN401 - as the path's
            started = time.perf_counter()
            logits = forward(plan, *rest)
            self._forward_s += time.perf_counter() - started
            is_decode = all(chunk.num_tokens == 1 for chunk in plan.chunks)
            self._rows.add(len(plan.chunks) if is_decode else 0)
            return logits

        def timed_wait(copy: HostCopy) -> Any:  # noqa: ANN401 - as HostCopy's
            started = time.perf_counter()
            tensors = wait(copy)
            self._wait_s += time.perf_counter() - started
            return tensors

        def timed_step() -> Any:  # noqa: ANN401 - as the engine's
            self._forward_s = self._wait_s = 0.0
            self._rows.clear()
            started = time.perf_counter()
            updates = step()
            spent = time.perf_counter() - started
            # With asynchronous scheduling, the forward pass belongs to the next step.
            if len(self._rows) == 1 and 0 not in self._rows:
                self.spent[self._rows.pop()].append((spent, self._forward_s, self._wait_s))
            return updates

        setattr(path, "forward", timed_forward)  # noqa: B010 - objects are typed otherwise
        setattr(engine, "step", timed_step)  # noqa: B010
        setattr(HostCopy, "wait", timed_wait)  # noqa: B010

    def summary(self, batches: list[int]) -> dict[str, dict[str, float]]:
        """Return the median milliseconds for each batch size. "host" does not include waiting."""
        found = {}
        for batch in batches:
            if times := self.spent.get(batch):
                step, forward, wait = (
                    statistics.median(column) for column in zip(*times, strict=True)
                )
                found[str(batch)] = {
                    "step_ms": step * 1e3,
                    "forward_ms": forward * 1e3,
                    "host_ms": (step - wait) * 1e3,
                }
        return found


class Nereid:
    """One engine. Its prefix cache has no effect, because every prompt is random."""

    def __init__(self, path: str, workload: dict[str, Any]) -> None:
        # The settings of the engine. Without the first default, a contestant whose settings do not
        # name compile_forward would compile the model during the measurement. A model with random
        # weights repeats itself, so speculative decoding would make the engine faster than with
        # real text.
        defaults = {"compile_forward": False, "num_speculative_tokens": 0}
        options = {**defaults, **json.loads(os.environ.get("BENCH_ENGINE", "{}"))}
        self._engine = Engine(
            EngineConfig(path, dtype=workload["dtype"], num_threads=workload["threads"], **options)
        )
        self._batches = workload["decode"]
        self._times = StepTimes(self._engine)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self._engine.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    def facts(self) -> dict[str, Any]:
        """Return the memory of weights and KV cache, and figures about the steps.

        The key `steps` has the median times of steps, and `replays` has the number of steps that
        replayed a CUDA graph.
        """
        graphs = getattr(self._engine._parts.runner._path, "graphs", None)
        info = self._engine.info
        bytes_per_token = info.kv_cache_bytes / (info.num_blocks + 1) / info.block_size
        return {
            "weights_bytes": info.weights_bytes,
            "cache_bytes_per_1000_tokens": 1000 * bytes_per_token,
            "steps": self._times.summary(self._batches),
            "replays": 0 if graphs is None else graphs.num_replays,
        }


if __name__ == "__main__":
    main(Nereid)
