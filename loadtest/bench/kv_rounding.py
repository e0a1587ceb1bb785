# SPDX-License-Identifier: Apache-2.0
"""What each way to keep keys and values costs in exactness, on numbers of several kinds.

    python -m loadtest.bench.kv_rounding

Attention of 64 queries over 1,024 keys of 128 numbers, in float32 but for the rounding; the scores
spread by 2, so that attention is neither flat nor all on one key. Prints root mean squares: of the
error of the keys over the keys, of the scores, and of the output over the output.
"""

import math
from collections.abc import Callable

import torch
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.int8_cache import Int8KVCache
from torch import Tensor

_KEYS, _QUERIES, _DIM, _ROUNDS = 1024, 64, 128, 8


def float8_alone(numbers: Tensor) -> Tensor:
    """8-bit floating point without a factor; what is too large becomes the largest."""
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda numbers: numbers.bfloat16().float(),
    "int8": lambda numbers: Int8KVCache.restored(*Int8KVCache.rounded(numbers)),
    "fp8": lambda numbers: Float8KVCache.restored(*Float8KVCache.rounded(numbers)),
    "fp8 without a factor": float8_alone,
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
    "normal, a 50th of it": lambda numbers: numbers / 50,
    "two channels 20 times the others": lambda numbers: _scaled(numbers, 20),
    "two channels 100 times the others": lambda numbers: _scaled(numbers, 100),
    "two channels shifted by 600": lambda numbers: _shifted(numbers, 600),
}


def errors(make: Callable[[Tensor], Tensor], way: Callable[[Tensor], Tensor]) -> list[float]:
    """Of keys, scores and outputs."""
    generator = torch.Generator().manual_seed(1)
    sums = [0.0, 0.0, 0.0]
    for _ in range(_ROUNDS):
        keys, values = (make(torch.randn(_KEYS, _DIM, generator=generator)) for _ in range(2))
        queries = torch.randn(_QUERIES, _DIM, generator=generator)
        plain = queries @ keys.T
        # What is the same for all keys of a query changes nothing.
        scale = 2 / (plain - plain.mean(-1, keepdim=True)).std()
        scores, rounded = plain * scale, queries @ way(keys).T * scale
        off = rounded - scores
        exact, found = scores.softmax(-1) @ values, rounded.softmax(-1) @ way(values)
        sums[0] += ((way(keys) - keys).norm() / keys.norm()).item() ** 2
        sums[1] += (off - off.mean(-1, keepdim=True)).square().mean().item()
        sums[2] += ((found - exact).norm() / exact.norm()).item() ** 2
    return [math.sqrt(total / _ROUNDS) for total in sums]


def main() -> None:
    """Print a table."""
    print("| keys and values | kept as | keys | scores | output |\n|---|---|---|---|---|")
    for kind, make in KINDS.items():
        for name, way in WAYS.items():
            found = " | ".join(f"{error:.4f}" for error in errors(make, way))
            print(f"| {kind} | {name} | {found} |")


if __name__ == "__main__":
    main()
