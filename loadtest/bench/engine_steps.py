"""Measures the steps of an engine that runs in this process."""

from collections.abc import Iterator
from typing import NamedTuple

from nereid_backend import Engine
from nereid_backend.core.outputs import RequestUpdate

from loadtest.bench.timing import Clock


class TimedStep(NamedTuple):
    """A step of an engine and its duration. `updates` contains the new tokens of the requests."""

    updates: list[RequestUpdate]
    seconds: float

    def has_token_of(self, request_id: str) -> bool:
        """Return whether a request got a token in this step."""
        return any(update.request_id == request_id for update in self.updates)


def timed_steps(engine: Engine, clock: Clock) -> Iterator[TimedStep]:
    """Run steps of an engine until all requests have ended. Yield each step with its duration."""
    while engine.has_work():
        started = clock()
        updates = engine.step()
        yield TimedStep(updates, clock() - started)
