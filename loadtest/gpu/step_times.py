"""The times of an engine's decode steps."""

import statistics
from collections import defaultdict
from typing import Any, NamedTuple

from nereid_backend import Engine
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.step import StepPlan
from nereid_backend.device_transfer import HostCopy
from nereid_backend.paths.packed import PackedPath

from loadtest.bench.timing import CallTimer


class StepTime(NamedTuple):
    """The seconds of one step, and the seconds that two of its parts took on the host."""

    step_s: float
    forward_s: float  # launching the forward pass
    wait_s: float  # waiting for the device


class StepTimes:
    """The times of decode steps, by number of sequences.

    Attributes:
        spent: maps the number of sequences to the times of all decode steps.
    """

    def __init__(self, engine: Engine) -> None:
        """Start to measure the steps of `engine`."""
        self.spent: dict[int, list[StepTime]] = defaultdict(list)
        self._timer = CallTimer()
        # The plans whose forward passes were launched in the current step.
        self._plans: list[StepPlan] = []
        self._timer.measure(engine, "step", "step")
        self._timer.measure(PackedPath, "forward", "forward")
        self._timer.measure(HostCopy, "wait", "wait")
        run_step, forward = engine.step, PackedPath.forward

        def recorded_step() -> list[RequestUpdate]:
            self._timer.seconds.clear()
            self._plans.clear()
            updates = run_step()
            self._record()
            return updates

        def recorded_forward(path: PackedPath, plan: StepPlan, *rest: Any) -> Any:  # noqa: ANN401
            self._plans.append(plan)
            return forward(path, plan, *rest)

        setattr(engine, "step", recorded_step)  # noqa: B010 - mypy refuses to assign a method
        setattr(PackedPath, "forward", recorded_forward)  # noqa: B010

    def medians_ms(self, num_sequences: int) -> dict[str, float] | None:
        """Return the median milliseconds of the decode steps with this number of sequences.

        "host_ms" does not include waiting. The result is None if there was no such step.
        """
        times = self.spent[num_sequences]
        if not times:
            return None
        median = StepTime(*map(statistics.median, zip(*times, strict=True)))
        return {
            "step_ms": median.step_s * 1e3,
            "forward_ms": median.forward_s * 1e3,
            "host_ms": (median.step_s - median.wait_s) * 1e3,
        }

    def _record(self) -> None:
        """Store the times of the last step if it launched forward passes of decode only.

        With asynchronous scheduling, such a forward pass belongs to the next step.
        """
        sizes = {_num_decodes(plan) for plan in self._plans}
        if len(sizes) == 1 and (size := sizes.pop()):
            seconds = self._timer.seconds
            times = StepTime(seconds["step"], seconds["forward"], seconds["wait"])
            self.spent[size].append(times)


def _num_decodes(plan: StepPlan) -> int:
    """Return the number of sequences in a plan of a decode step, or 0 for another plan."""
    is_decode = all(chunk.num_tokens == 1 for chunk in plan.chunks)
    return len(plan.chunks) if is_decode else 0
