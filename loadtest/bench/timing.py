"""Functions with which the benchmarks measure the time of calls."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable

Clock = Callable[[], float]


def seconds_of(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Call `work` once, and return the seconds that the call takes."""
    started = clock()
    work()
    return clock() - started


def call_times(
    work: Callable[[], object], num_calls: int, clock: Clock = time.perf_counter
) -> list[float]:
    """Call `work` several times, and return the seconds of each call."""
    return [seconds_of(work, clock) for _ in range(num_calls)]


class CallTimer:
    """Measures the wall time of chosen methods.

    Attributes:
        seconds: maps a label to the seconds of all calls with this label, since the dictionary was
            last cleared.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def measure(self, owner: object, name: str, label: str) -> None:
        """Measure the method `name` of an object or a class from now on.

        The method is replaced by a function that calls the method and adds the time of the call to
        `seconds[label]`.
        """
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - started

        setattr(owner, name, timed)
