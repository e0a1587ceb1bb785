# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters and stop conditions of one request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.errors import RequestError

_MAX_SEED = 2**64 - 1
# The largest value of logprobs and of prompt_logprobs.
MAX_LOGPROBS = 20
# The largest value of n.
MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. The names are those of vLLM's class `SamplingParams`.

    Attributes:
        temperature: 0 selects the likeliest token (greedy sampling); larger values are more random.
        top_p: sample from the smallest set of likeliest tokens whose probabilities sum to at least
            `top_p`; 1 turns the filter off.
        top_k: sample from the `top_k` likeliest tokens; 0 or -1 turns the filter off.
        min_p: remove tokens whose probability is less than `min_p` times the probability of the
            likeliest token; 0 turns the filter off.
        seed: the seed of the random numbers. A request with the same seed and prompt gets the same
            tokens, whatever other requests run at the same time. None selects a random seed.
        max_tokens: the largest number of new tokens; None allows up to the model's maximum length.
        min_tokens: the number of new tokens before which stop tokens cannot be sampled.
        stop_token_ids: token ids that end a sequence, in addition to those of the checkpoint.
        ignore_eos: if True, the checkpoint's end-of-sequence tokens do not end a sequence.
        n: the number of sequences to generate for the prompt. Each sequence has its own random
            numbers.
        presence_penalty: subtracted once from the logit of every token that the output contains.
        frequency_penalty: subtracted from the logit of a token once for each time that the output
            contains the token.
        repetition_penalty: a number by which positive logits are divided and negative logits are
            multiplied, for every token that the prompt or the output contains. 1 turns the penalty
            off (CTRL, Keskar et al. 2019).
        logit_bias: a mapping from token ids to numbers that are added to the logits of these
            tokens. The mapping is stored as sorted pairs.
        allowed_token_ids: the only token ids that can be sampled; None allows every token.
        bad_words_token_ids: sequences of token ids that must not occur in the output.
        logprobs: report the log-probability of each sampled token and of this number of likeliest
            tokens, under the model's own distribution; None reports no log-probabilities.
        prompt_logprobs: report log-probabilities of the prompt tokens from the second on, and of
            this number of likeliest tokens at each position; None reports no log-probabilities.
        grammar: the grammar that the output must match; None allows any text.
        thinking: the delimiters and the token budget of the reasoning; None if unknown.
        priority: requests with a lower number are scheduled first.
        cache_salt: a text. Two requests share cached prefixes only if their texts are equal.

    Raises:
        RequestError: if a value has the wrong type or is out of range. The message names the field.
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
            raise RequestError(
                f"temperature: the value must be at least 0, but it is {self.temperature}."
            )
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(
                f"top_p: the value must be above 0 and at most 1, but it is {self.top_p}."
            )
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p: the value must be between 0 and 1, but it is {self.min_p}.")
        _check_integer("top_k", self.top_k, minimum=-1)
        _check_integer("min_tokens", self.min_tokens, minimum=0)
        self._check_limits()
        self._check_stops()
        self._check_penalties()
        self._check_token_lists()
        self._check_reports()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always selected."""
        return self.temperature == 0

    def _check_limits(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, minimum=1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens: the value must be at most max_tokens ({self.max_tokens}), "
                    f"but it is {self.min_tokens}."
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, minimum=-(2**63))
            if self.seed > _MAX_SEED:
                raise RequestError(f"seed: the value must be below 2**64, but it is {self.seed}.")

    def _check_stops(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos: the value must be true or false, but it is {self.ignore_eos!r}."
            )
        ids: object = self.stop_token_ids
        if not isinstance(ids, list | tuple):
            raise RequestError(
                f"stop_token_ids: the value must be a list of token ids, but it is {ids!r}."
            )
        for token_id in ids:
            _check_integer("stop_token_ids", token_id, minimum=0, subject="each token id")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check_number(name, value)
            if not -2 <= value <= 2:
                raise RequestError(
                    f"{name}: the value must be between -2 and 2, but it is {value}."
                )
        _check_number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            raise RequestError(
                "repetition_penalty: the value must be above 0 (1 turns the penalty off), but it "
                f"is {self.repetition_penalty}."
            )

    def _check_token_lists(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids: the list must contain at least one token id, but it is "
                    "empty."
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        if not isinstance(self.bad_words_token_ids, list | tuple):
            value = self.bad_words_token_ids
            raise RequestError(
                "bad_words_token_ids: the value must be a list of lists of token ids, but it is "
                f"{value!r}."
            )
        words = tuple(_token_ids("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        if not all(words):
            raise RequestError(
                "bad_words_token_ids: each list must contain at least one token id, but one list "
                "is empty."
            )
        object.__setattr__(self, "bad_words_token_ids", words)

    def _check_reports(self) -> None:
        _check_integer("n", self.n, minimum=1)
        if self.n > MAX_SEQUENCES:
            raise RequestError(f"n: the value must be at most {MAX_SEQUENCES}, but it is {self.n}.")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None:
                continue
            _check_integer(name, count, minimum=0)
            if count > MAX_LOGPROBS:
                raise RequestError(
                    f"{name}: the value must be at most {MAX_LOGPROBS}, but it is {count}."
                )
        _check_integer("priority", self.priority, minimum=-(2**31))
        if not isinstance(self.cache_salt, str):
            raise RequestError(
                f"cache_salt: the value must be a string, but it is {self.cache_salt!r}."
            )
        # Another process sends specifications as plain lists.
        if self.grammar is not None:
            object.__setattr__(self, "grammar", GrammarSpec.of(self.grammar))
        if self.thinking is not None:
            object.__setattr__(self, "thinking", ThinkingSpec.of(self.thinking))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:  # noqa: ANN401 - checked here
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise RequestError(
            f"logit_bias: the value must map token ids to numbers, but it is {value!r}."
        )
    biases: dict[int, float] = {}
    for token_id, bias in pairs:
        _check_integer("logit_bias", token_id, minimum=0, subject="each token id")
        _check_number("logit_bias", bias)
        if not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias: each bias must be between -100 and 100, but one is {bias}."
            )
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name}: the value must be a list of token ids, but it is {value!r}.")
    for token_id in value:
        _check_integer(name, token_id, minimum=0, subject="each token id")
    return tuple(value)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name}: the value must be a number, but it is {value!r}.")
    if isinstance(value, int) and abs(value) > _MAX_SEED:
        raise RequestError(
            f"{name}: the value must be below 2**64, but it is an integer of "
            f"{value.bit_length()} bits."
        )
    if not math.isfinite(value):
        raise RequestError(f"{name}: the value must be a finite number, but it is {value}.")


def _check_integer(name: str, value: object, *, minimum: int, subject: str = "the value") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: {subject} must be an integer, but it is {value!r}.")
    if value < minimum:
        raise RequestError(f"{name}: {subject} must be at least {minimum}, but it is {value}.")
    if value > _MAX_SEED:
        raise RequestError(
            f"{name}: {subject} must be below 2**64, but it is an integer of "
            f"{value.bit_length()} bits."
        )
