# SPDX-License-Identifier: Apache-2.0
"""How one request wants its tokens chosen and when it wants to stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.errors import RequestError

_MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_SEQUENCES = 64


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
        n: how many answers (sequences) to generate for the prompt; each has its own random numbers.
        presence_penalty: taken from the logits of every token that the answer holds already.
        frequency_penalty: taken from them once for each time that the answer holds the token.
        repetition_penalty: divides positive and multiplies negative logits of every token that the
            prompt or the answer holds; 1 is off (CTRL, Keskar et al. 2019).
        logit_bias: added to the logits of these token ids; a mapping, kept as sorted pairs.
        allowed_token_ids: only these may be chosen; None is all.
        bad_words_token_ids: sequences of token ids that must not come about.
        logprobs: report the log-probability of each chosen token and of so many likeliest ones
            beside it, under the model's own distribution; None is off.
        prompt_logprobs: the same for the prompt's tokens, from the second on.
        grammar: what the answer must match; None is anything.
        thinking: where reasoning ends, and after how many tokens it is made to; None is unknown.
        priority: requests with a lower number go first.
        cache_salt: only requests with the same salt share cached prefixes.

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
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingSpec | None = None
    priority: int = 0
    cache_salt: str = ""

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
        self._check_penalties()
        self._check_token_lists()
        self._check_reports()

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

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check_number(name, value)
            if not -2 <= value <= 2:
                raise RequestError(f"{name}: must be between -2 and 2, got {value}")
        _check_number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty: must be above 0 (1 is off), got {self.repetition_penalty}"
            )

    def _check_token_lists(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids: is empty, so no token could be chosen")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if not isinstance(self.bad_words_token_ids, list | tuple):
            got = self.bad_words_token_ids
            raise RequestError(f"bad_words_token_ids: must be a list of lists, got {got!r}")
        words = tuple(_token_ids("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        if not all(words):
            raise RequestError("bad_words_token_ids: a word without tokens cannot be kept out")
        object.__setattr__(self, "bad_words_token_ids", words)

    def _check_reports(self) -> None:
        _check_integer("n", self.n, minimum=1)
        if self.n > MAX_SEQUENCES:
            raise RequestError(f"n: must be at most {MAX_SEQUENCES}, got {self.n}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None:
                continue
            _check_integer(name, count, minimum=0)
            if count > MAX_LOGPROBS:
                raise RequestError(f"{name}: must be at most {MAX_LOGPROBS}, got {count}")
        _check_integer("priority", self.priority, minimum=-(2**31))
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt: must be a string, got {self.cache_salt!r}")
        # What came over a wire comes as plain sequences.
        if self.grammar is not None:
            object.__setattr__(self, "grammar", GrammarSpec.of(self.grammar))
        if self.thinking is not None:
            object.__setattr__(self, "thinking", ThinkingSpec.of(self.thinking))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:  # noqa: ANN401 - checked here
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise RequestError(f"logit_bias: must map token ids to numbers, got {value!r}")
    biases: dict[int, float] = {}
    for token_id, bias in pairs:
        _check_integer("logit_bias", token_id, minimum=0)
        _check_number("logit_bias", bias)
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: must be between -100 and 100, got {bias}")
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: must be a list of token ids, got {value!r}")
    for token_id in value:
        _check_integer(name, token_id, minimum=0)
    return tuple(value)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name}: must be a number, got {value!r}")
    if isinstance(value, int) and abs(value) > _MAX_SEED:
        raise RequestError(
            f"{name}: must be a number below 2**64, got one of {value.bit_length()} bits"
        )
    if not math.isfinite(value):
        raise RequestError(f"{name}: must be a finite number, got {value}")


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: must be an integer, got {value!r}")
    if value < minimum:
        raise RequestError(f"{name}: must be at least {minimum}, got {value}")
    if value > _MAX_SEED:
        raise RequestError(f"{name}: must be below 2**64, got one of {value.bit_length()} bits")
