# SPDX-License-Identifier: Apache-2.0
"""What requests do to the model's logits before a token is chosen.

In the order of vLLM's sampler (docs.vllm.ai, vllm.v1.sample.sampler):

    the grammar's mask and allowed_token_ids -> bad_words_token_ids -> min_tokens
    -> logit_bias -> repetition, frequency, presence penalty -> (temperature, min_p, top_k, top_p)

What a mask takes away stays away: nothing after it brings a token back. Only positions of requests
that ask for something are touched, and all of them at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.request import Request
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.device_transfer import upload
from nereid_backend.errors import RequestError
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.penalties import TokenCounts, apply_penalties, asks_for_penalties
from nereid_backend.sampling.token_masks import Words, pack, with_masks

Integers = NDArray[np.int64]

_NONE: Integers = np.zeros(0, np.int64)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens beyond the model's vocabulary.

    Stop tokens may lie beyond it; they never come.

    Raises:
        RequestError: the message names the field, the token and the limit.
    """
    named = {
        "logit_bias": [token_id for token_id, _ in _pairs(params)],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": [t for word in params.bad_words_token_ids for t in word],
    }
    for name, token_ids in named.items():
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise RequestError(
                f"{name}: token id {highest} is outside the vocabulary (0 to {vocab_size - 1})"
            )


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks of its logits, prepared once.

    Attributes:
        owner: whose.
        is_plain: whether it asks for nothing, its guide aside.
        bias_ids: tokens of logit_bias, with bias_values beside them.
        bias_values: float32.
        allowed: a mask of allowed_token_ids.
        bad_tokens: bad words of one token.
        bad_words: the longer ones by their last token but one: what comes before the last, and it.
        stops: stop tokens within the vocabulary, kept out of reach before min_tokens.
        has_penalties: whether its text is counted.
    """

    owner: Request
    is_plain: bool
    bias_ids: Integers = field(default_factory=lambda: _NONE)
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    allowed: Words | None = None
    bad_tokens: Integers = field(default_factory=lambda: _NONE)
    bad_words: dict[int, list[tuple[list[int], int]]] = field(default_factory=dict)
    stops: Integers = field(default_factory=lambda: _NONE)
    has_penalties: bool = False

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> "Wishes":
        """Prepare a request's."""
        params = request.params
        has_penalties = asks_for_penalties(params)
        if not (
            has_penalties
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or params.min_tokens
        ):
            return cls(request, is_plain=True)
        bias = _pairs(params)
        words: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in params.bad_words_token_ids:
            if before:
                words.setdefault(before[-1], []).append((before, last))
        allowed = params.allowed_token_ids
        return cls(
            request,
            is_plain=False,
            bias_ids=np.array([token_id for token_id, _ in bias], np.int64),
            bias_values=np.array([value for _, value in bias], np.float32),
            allowed=None if allowed is None else pack(allowed, vocab_size),
            bad_tokens=np.array(
                [word[0] for word in params.bad_words_token_ids if len(word) == 1], np.int64
            ),
            bad_words=words,
            stops=np.array([t for t in request.stop_token_ids if t < vocab_size], np.int64),
            has_penalties=has_penalties,
        )

    def out_of_reach(self, position: Position) -> list[Integers]:
        """Tokens that bad words and min_tokens forbid at a position of the owner."""
        forbidden = [self.bad_tokens] if len(self.bad_tokens) else []
        if self.bad_words:
            ends = self._ends_of_bad_words(position)
            if ends:
                forbidden.append(np.array(ends, np.int64))
        if position.num_output_tokens < self.owner.params.min_tokens and len(self.stops):
            forbidden.append(self.stops)
        return forbidden

    def _ends_of_bad_words(self, position: Position) -> list[int]:
        """Last tokens of bad words whose other tokens end the answer so far."""
        num_output = position.num_output_tokens
        if num_output == 0:
            return []
        known, guessed = self.owner.token_ids, position.guessed
        newest = guessed[-1] if guessed else known[-1]
        ends = []
        for before, last in self.bad_words.get(newest, ()):
            length = len(before)
            if length <= num_output:
                tail = known[-length:] + guessed
                if tail[-length:] == before:
                    ends.append(last)
        return ends


class LogitsProcessor:
    """Applies what requests ask; keeps what it has prepared and counted by the requests' rows."""

    def __init__(self) -> None:
        self._wishes: dict[int, Wishes] = {}
        self._counts = TokenCounts()

    def wishes(self, positions: Sequence[Position], vocab_size: int) -> list[Wishes]:
        """What the positions' requests ask for."""
        found = []
        for index, position in enumerate(positions):
            request = position.request
            row = _row_of(position, index)
            wishes = self._wishes.get(row)
            if wishes is None or wishes.owner is not request:
                wishes = self._wishes[row] = Wishes.of(request, vocab_size)
            found.append(wishes)
        return found

    def process(
        self,
        logits: Tensor,
        positions: Sequence[Position],
        wishes: Sequence[Wishes],
        masks: Sequence[Words | None],
    ) -> Tensor:
        """Apply what requests ask.

        Args:
            logits: [n, vocab_size], any float dtype. Not changed.
            positions: of the rows of logits.
            wishes: of their requests.
            masks: what the positions' guides allow; None is everything.

        Returns:
            logits itself where nobody asks for anything, else new ones in float32.
        """
        asking = [i for i, wish in enumerate(wishes) if not wish.is_plain]
        if not asking and all(mask is None for mask in masks):
            return logits
        limits = [_both(wish.allowed, mask) for wish, mask in zip(wishes, masks, strict=True)]
        logits = with_masks(logits.float(), limits)
        if asking:
            self._put_out_of_reach(logits, positions, wishes, asking)
            _add_bias(logits, wishes, asking)
            self._penalise(logits, positions, [i for i in asking if wishes[i].has_penalties])
        return logits

    @staticmethod
    def _put_out_of_reach(
        logits: Tensor,
        positions: Sequence[Position],
        wishes: Sequence[Wishes],
        asking: Sequence[int],
    ) -> None:
        rows: list[Integers] = []
        columns: list[Integers] = []
        for index in asking:
            for token_ids in wishes[index].out_of_reach(positions[index]):
                rows.append(np.full(len(token_ids), index))
                columns.append(token_ids)
        if rows:
            index_pair = _to_device(rows, logits), _to_device(columns, logits)
            logits.index_put_(index_pair, logits.new_full((), float("-inf")))

    def _penalise(
        self, logits: Tensor, positions: Sequence[Position], asking: Sequence[int]
    ) -> None:
        if not asking:
            return
        chosen = [positions[i] for i in asking]
        rows = [_row_of(position, i) for position, i in zip(chosen, asking, strict=True)]
        ids, counts = self._counts.lists(rows, chosen)
        params = [position.request.params for position in chosen]
        if len(asking) == len(logits):
            apply_penalties(logits, ids, counts, params)
        else:
            index = upload(np.array(asking), logits.device)
            some = logits[index]
            apply_penalties(some, ids, counts, params)
            logits.index_copy_(0, index, some)


def why_nothing_is_left(request: Request) -> str:
    """Say which of a request's limits leave no token to choose."""
    params = request.params
    limits = [
        name
        for name, is_set in (
            ("its grammar", request.guide is not None),
            ("allowed_token_ids", params.allowed_token_ids is not None),
            ("bad_words_token_ids", bool(params.bad_words_token_ids)),
            ("min_tokens", request.num_output_tokens < params.min_tokens),
        )
        if is_set
    ]
    return (
        f"no token is left to choose after {request.num_output_tokens} tokens of the answer: "
        f"{' and '.join(limits) or 'the request'} exclude{'' if len(limits) > 1 else 's'} all"
    )


def _pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    # SamplingParams keeps a mapping as sorted pairs.
    return cast(tuple[tuple[int, float], ...], params.logit_bias)


def _row_of(position: Position, index: int) -> int:
    # A request without a row (it is not in a scheduler) takes any: what is kept there knows whose
    # it is.
    row = position.request.row
    return index if row is None else row


def _both(first: Words | None, second: Words | None) -> Words | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _add_bias(logits: Tensor, wishes: Sequence[Wishes], asking: Sequence[int]) -> None:
    biased = [i for i in asking if len(wishes[i].bias_ids)]
    if biased:
        rows = [np.full(len(wishes[i].bias_ids), i) for i in biased]
        index_pair = (
            _to_device(rows, logits),
            _to_device([wishes[i].bias_ids for i in biased], logits),
        )
        values = np.concatenate([wishes[i].bias_values for i in biased])
        logits.index_put_(index_pair, upload(values, logits.device), accumulate=True)


def _to_device(parts: Sequence[Integers], like: Tensor) -> Tensor:
    return upload(np.concatenate(parts), like.device)
