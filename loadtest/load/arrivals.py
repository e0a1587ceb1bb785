# SPDX-License-Identifier: Apache-2.0
"""When a user's next request comes.

In a closed loop it waits for the answer to the one before, so a slow server is asked less. In an
open loop it comes when it comes, as from the many people of the world, and a queue shows.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """One of the classes below."""

    @property
    def is_open(self) -> bool:
        """Whether requests come without regard to the answers."""

    def gaps_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds to wait: after an answer in a closed loop, between arrivals in an open one."""


@dataclass(frozen=True)
class Closed:
    """One request after the other, with a pause of so many seconds between them."""

    least_s: float = 0.0
    most_s: float = 0.5
    is_open = False

    def gaps_s(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        while True:
            yield rng.uniform(self.least_s, self.most_s)


@dataclass(frozen=True)
class Poisson:
    """An open loop in which each moment is as likely as another: `per_second` on average."""

    per_second: float
    is_open = True

    def gaps_s(self, rng: random.Random) -> Iterator[float]:
        """See Arrivals."""
        while True:
            yield rng.expovariate(self.per_second)


@dataclass(frozen=True)
class Constant:
    """An open loop with the same time between all arrivals."""

    per_second: float
    is_open = True

    def gaps_s(self, rng: random.Random) -> Iterator[float]:  # noqa: ARG002 - see Arrivals
        """See Arrivals."""
        while True:
            yield 1.0 / self.per_second


def named(name: str, per_second: float) -> Arrivals:
    """The arrivals of a command line: closed, poisson or constant.

    Raises:
        ValueError: an open loop without a rate.
    """
    if name == "closed":
        return Closed()
    if per_second <= 0:
        raise ValueError(f"--rate: {name} arrivals need one above 0, got {per_second:g}")
    return Poisson(per_second) if name == "poisson" else Constant(per_second)
