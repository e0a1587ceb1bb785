# SPDX-License-Identifier: Apache-2.0
"""How one request wants its tokens chosen and when it wants to stop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.errors import RequestError

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters under the names of vLLM's class of the same name.

    Attributes:
        temperature: 0 picks the likeliest token (greedy); larger is more random.
        top_p: keep the fewest of the likeliest tokens whose probabilities reach this sum; 1 is off.
        top_k: keep this many of the likeliest tokens; 0 or -1 is off.
        min_p: drop tokens less likely than this times the likeliest one; 0 is off.
        seed: the same seed gives the same tokens for the same prompt, whatever else is running.
        max_tokens: at most so many new tokens; None means up to the model's length.
        min_tokens: stop tokens cannot be chosen before so many new tokens.
        stop_token_ids: token ids that end the answer, besides the checkpoint's own.
        ignore_eos: do not stop at the checkpoint's own end-of-sequence tokens.

    Raises:
        RequestError: a value is of the wrong type or out of range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise RequestError(f"temperature: must be at least 0, got {self.temperature}")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p: must be between 0 and 1, got {self.min_p}")
        _check_integer("top_k", self.top_k, minimum=-1)
        _check_integer("min_tokens", self.min_tokens, minimum=0)
        self._check_limits()
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0

    def _check_limits(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, minimum=1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens: must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}"
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=-(2**63))
            if self.seed > _MAX_SEED:
                raise RequestError(f"seed: must be below 2**64, got {self.seed}")

    def _check_stops(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: must be true or false, got {self.ignore_eos!r}")
        ids: object = self.stop_token_ids
        if not isinstance(ids, list | tuple):
            raise RequestError(f"stop_token_ids: must be a list of token ids, got {ids!r}")
        for token_id in ids:
            _check_integer("stop_token_ids", token_id, minimum=0)
        object.__setattr__(self, "stop_token_ids", tuple(ids))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name}: must be a number, got {value!r}")
    if not math.isfinite(value):
        raise RequestError(f"{name}: must be a finite number, got {value}")


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: must be an integer, got {value!r}")
    if value < minimum:
        raise RequestError(f"{name}: must be at least {minimum}, got {value}")
