# SPDX-License-Identifier: Apache-2.0
"""Computes the random numbers for sampling, without stored state.

Each random number is one hash of two values: the seed of the request, and the number of tokens in
its output. Therefore, the random numbers of a request do not depend on other requests. If a request
is computed a second time after a preemption, the request gets the same random numbers.
"""

import numpy as np
from numpy.typing import NDArray


def uniform_numbers(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each pair of a seed and a counter.

    Equal pairs give equal numbers. The seed is hashed, the counter times a constant (the golden
    gamma) is added, and the sum is hashed again.

    Source: SplitMix64 (Steele, Lea, Flood 2014).
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix64(_mix64(seeds + gamma) + (counters + np.uint64(1)) * gamma)
    # A float64 number has 53 bits of precision, so the highest 53 of the 64 bits are used.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the output function of the random number generator SplitMix64 to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
