"""Arrival processes: they define when a user sends the next request.

In a closed loop, a user waits for the answer before sending the next request, so a slow server
receives fewer requests. In an open loop, requests arrive independently of the answers, like
requests of many independent people. A queue can therefore form.
"""

import random
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """The interface of the arrival processes below."""

    @property
    def is_open(self) -> bool:
        """Whether requests arrive independently of the answers (an open loop)."""

    def gap_s(self, rng: random.Random) -> float:
        """Return the seconds after an answer (closed loop) or since the last arrival."""


@dataclass(frozen=True)
class Closed:
    """A closed loop with a random pause of `least_s` to `most_s` seconds after each answer."""

    least_s: float = 0.0
    most_s: float = 0.5
    is_open = False

    def gap_s(self, rng: random.Random) -> float:
        """Return a random pause in seconds."""
        return rng.uniform(self.least_s, self.most_s)


@dataclass(frozen=True)
class Poisson:
    """An open loop with independent arrivals. The mean rate is `per_second`."""

    per_second: float
    is_open = True

    def gap_s(self, rng: random.Random) -> float:
        """Return the random seconds between two arrivals."""
        return rng.expovariate(self.per_second)


@dataclass(frozen=True)
class Constant:
    """An open loop with the same time between all arrivals."""

    per_second: float
    is_open = True

    def gap_s(self, rng: random.Random) -> float:  # noqa: ARG002 - see Arrivals
        """Return the seconds between two arrivals."""
        return 1.0 / self.per_second


def arrival_process(name: str, per_second: float) -> Arrivals:
    """Return the arrival process with this name: closed, poisson or constant.

    Raises:
        ValueError: an open loop needs a rate above 0.
    """
    if name == "closed":
        return Closed()
    if per_second <= 0:
        raise ValueError(
            f"--arrivals {name} requires --rate to be above 0, but --rate is {per_second:g}"
        )
    return Poisson(per_second) if name == "poisson" else Constant(per_second)
