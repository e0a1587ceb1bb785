# SPDX-License-Identifier: Apache-2.0
"""Measure the rounding errors of attention for each dtype of the KV cache, on random numbers.

    python -m loadtest.bench.kv_rounding

The program computes the attention of 64 queries over 1,024 keys of dimension 128. Everything except
the rounded keys and values is float32. The scores have a standard deviation of 2, so that attention
is neither uniform nor concentrated on one key. The table shows root mean squares of three errors:
of the keys relative to the keys, of the scores, and of the output relative to the output.
"""

import math
from collections.abc import Callable

import torch
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.int8_cache import Int8KVCache
from torch import Tensor

_KEYS, _QUERIES, _DIM, _ROUNDS = 1024, 64, 128, 8


def float8_alone(numbers: Tensor) -> Tensor:
    """Round to 8-bit floating point without a scale; clamp numbers that are too large."""
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda numbers: numbers.bfloat16().float(),
    "int8": lambda numbers: Int8KVCache.restored(*Int8KVCache.rounded(numbers)),
    "fp8": lambda numbers: Float8KVCache.restored(*Float8KVCache.rounded(numbers)),
    "fp8 without a scale": float8_alone,
}


def _scaled(numbers: Tensor, factor: float) -> Tensor:
    numbers[:, :2] *= factor
    return numbers


def _shifted(numbers: Tensor, bias: float) -> Tensor:
    numbers[:, 0] += bias
    numbers[:, 1] -= bias
    return numbers


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda numbers: numbers,
    "normal, divided by 50": lambda numbers: numbers / 50,
    "two channels 20 times the others": lambda numbers: _scaled(numbers, 20),
    "two channels 100 times the others": lambda numbers: _scaled(numbers, 100),
    "two channels shifted by 600": lambda numbers: _shifted(numbers, 600),
}


def errors(make: Callable[[Tensor], Tensor], rounded: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the root mean squares of the errors of keys, scores and outputs.

    Args:
        make: a function that turns normally distributed numbers into keys or values.
        rounded: a function that rounds keys or values.
    """
    generator = torch.Generator().manual_seed(1)
    sums = [0.0, 0.0, 0.0]
    for _ in range(_ROUNDS):
        keys, values = (make(torch.randn(_KEYS, _DIM, generator=generator)) for _ in range(2))
        queries = torch.randn(_QUERIES, _DIM, generator=generator)
        plain = queries @ keys.T
        # A constant that is added to all scores of a query does not change the softmax, so means
        # are subtracted from the scores and from their errors.
        scale = 2 / (plain - plain.mean(-1, keepdim=True)).std()
        scores = plain * scale
        rounded_scores = queries @ rounded(keys).T * scale
        off = rounded_scores - scores
        exact, found = scores.softmax(-1) @ values, rounded_scores.softmax(-1) @ rounded(values)
        sums[0] += ((rounded(keys) - keys).norm() / keys.norm()).item() ** 2
        sums[1] += (off - off.mean(-1, keepdim=True)).square().mean().item()
        sums[2] += ((found - exact).norm() / exact.norm()).item() ** 2
    return [math.sqrt(total / _ROUNDS) for total in sums]


def main() -> None:
    """Print a table of all distributions and all dtypes."""
    print("| keys and values | dtype | keys | scores | output |\n|---|---|---|---|---|")
    for kind, make in KINDS.items():
        for name, rounded in ROUNDINGS.items():
            found = " | ".join(f"{error:.4f}" for error in errors(make, rounded))
            print(f"| {kind} | {name} | {found} |")


if __name__ == "__main__":
    main()
