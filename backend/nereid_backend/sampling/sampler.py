# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, for all positions of a step at once.

What requests ask is applied (logits.py), then the likeliest token is taken or one is drawn
(drawing.py); on a GPU one kernel may do either (gpu_sampling.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.request import Request
from nereid_backend.core.step import Sampled
from nereid_backend.device_transfer import HostCopy, upload
from nereid_backend.sampling import gpu_sampling
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.logits_processor import LogitsProcessor, Wishes, why_nothing_is_left
from nereid_backend.sampling.logsumexp import argmax, row_facts
from nereid_backend.sampling.random_sampling import Doubt, SamplingBatch, draw_or_doubt
from nereid_backend.sampling.ranked_logprobs import RankedRows, rank_tokens, slices
from nereid_backend.sampling.token_masks import StepMasks, Words

NOT_FINITE = "the model's logits are not finite numbers; its weights or this dtype may overflow"


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen at some positions.

    Attributes:
        token_ids: one each; meaningless where there is an error.
        logprobs: their log-probabilities under the model's own distribution.
        errors: by index of the position, why nothing could be chosen there.
        top: by index of the position, for requests that ask for log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    errors: dict[int, str] = field(default_factory=dict)
    top: dict[int, TokenLogprobs] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Some positions: where they begin, and what is known of each."""

    start: int
    positions: Sequence[Position]
    wishes: Sequence[Wishes]
    words: Sequence[Words | None]

    def rows(self, index: Sequence[int]) -> "_Piece":
        """Some of them; where they begin has no meaning then."""
        return _Piece(
            0,
            [self.positions[i] for i in index],
            [self.wishes[i] for i in index],
            [self.words[i] for i in index],
        )


class _Part(NamedTuple):
    """What was chosen for a piece, where it was computed.

    Attributes:
        piece: what is known of it.
        columns: token ids [n] int64, their log-probabilities [n] float32, and whether a choice was
            possible at all [n] bool.
        asking: positions of the piece that ask for log-probabilities.
        ranked: their log-probabilities.
        doubt: where to look again.
        logits: [n, vocab_size], the model's own, kept for that.
    """

    piece: _Piece
    columns: tuple[Tensor, Tensor, Tensor]
    asking: list[int]
    ranked: RankedRows | None
    doubt: Doubt | None
    logits: Tensor | None


class Choosing:
    """Choices on their way to the host.

    Attributes:
        token_ids: [num_positions] int64, on the device.
    """

    def __init__(self, sampler: "Sampler", parts: list[_Part]) -> None:
        self._sampler = sampler
        self._parts = parts
        columns = zip(*(part.columns for part in parts), strict=True)
        joined = [column[0] if len(parts) == 1 else torch.cat(column) for column in columns]
        self.token_ids = joined[0]
        more: list[Tensor] = []
        for part in parts:
            more += part.ranked.tensors if part.ranked is not None else ()
            more += (part.doubt.is_known,) if part.doubt is not None else ()
        self._copy = HostCopy([*joined, *more])

    def result(self) -> tuple[Choices, list[int]]:
        """Wait for the choices.

        Returns:
            What was chosen, and what token_ids holds, which is the same in nearly all cases.
        """
        tensors = iter(self._copy.wait())
        token_ids, logprobs, is_left = (next(tensors).tolist() for _ in range(3))
        drawn = list(token_ids)
        choices = Choices(token_ids, logprobs)
        for part in self._parts:
            self._read_more(part, tensors, choices)
        if not (all(is_left) and all(map(math.isfinite, logprobs))):
            positions = [position for part in self._parts for position in part.piece.positions]
            for index, position in enumerate(positions):
                if not math.isfinite(logprobs[index]):
                    choices.errors[index] = NOT_FINITE
                elif not is_left[index]:
                    choices.errors[index] = why_nothing_is_left(position.request)
        return choices, drawn

    def _read_more(self, part: _Part, tensors: Iterator[Tensor], choices: Choices) -> None:
        """Read what is reported of a part, and choose again where a choice is in doubt.

        Mutates: choices.
        """
        start = part.piece.start
        if part.ranked is not None:
            found = part.ranked.read(next(tensors), next(tensors), next(tensors))
            choices.top.update(zip((start + i for i in part.asking), found, strict=True))
        if part.doubt is None:
            return
        rows = part.doubt.rows[~next(tensors).numpy()].tolist()
        if not rows:
            return
        again, _ = self._sampler.choose_again(part, rows)
        for index, row in enumerate(rows):
            choices.token_ids[start + row] = again.token_ids[index]
            choices.logprobs[start + row] = again.logprobs[index]
            if index in again.top:
                choices.top[start + row] = again.top[index]


class Sampler:
    """Chooses tokens; remembers what it has prepared for the requests of each row.

    Attributes:
        defers: whether rows whose filters may leave more than the likeliest tokens are found out
            when the choices are read, and chosen again then; if not, when they are made, which a
            GPU would have to be waited for. None: on a GPU.
        has_kernel: whether a GPU's kernel chooses, which looks at every token and defers nothing.
    """

    def __init__(self, *, defers: bool | None = None, has_kernel: bool = False) -> None:
        self.defers = defers
        self.has_kernel = has_kernel
        self._processor = LogitsProcessor()

    def choose(
        self, logits: Tensor, positions: Sequence[Position], masks: StepMasks | None = None
    ) -> Choices:
        """Choose one token at each position; see `begin`."""
        return self.begin(logits, positions, masks).result()[0]

    def begin(
        self, logits: Tensor, positions: Sequence[Position], masks: StepMasks | None = None
    ) -> Choosing:
        """Begin to choose one token at each position. A GPU is asked to, and not waited for.

        Args:
            logits: [num_positions, vocab_size], any float dtype. Not changed.
            positions: at least one; either all of their requests have rows, or none has. Their
                requests must not change until the result is there.
            masks: what their guides allow; None is everything. Must not change either.
        """
        words = masks.words if masks else {}
        wishes = self._processor.wishes(positions, logits.shape[1])
        defers = logits.device.type != "cpu" if self.defers is None else self.defers
        parts: list[_Part] = []
        for rows in slices(len(positions), logits.shape[1], logits.device):
            limits = [words.get(i) for i in range(rows.start, rows.stop)]
            piece = _Piece(rows.start, positions[rows], wishes[rows], limits)
            parts.append(self._choose(logits[rows], piece, defers=defers))
        return Choosing(self, parts)

    def choose_again(self, part: _Part, rows: list[int]) -> tuple[Choices, list[int]]:
        """Choose at some rows of a part, looking at every token."""
        assert part.logits is not None
        logits = part.logits[upload(np.array(rows), part.logits.device)]
        return Choosing(self, [self._choose(logits, part.piece.rows(rows), defers=False)]).result()

    def _choose(self, given: Tensor, piece: _Piece, *, defers: bool) -> _Part:
        asking = [i for i, p in enumerate(piece.positions) if p.request.params.logprobs is not None]
        logits = given.float() if self.has_kernel else given
        processed = self._processor.process(logits, piece.positions, piece.wishes, piece.words)
        facts = row_facts(given) if asking or not self.has_kernel else None
        doubt, ranked, kept = None, None, None
        if self.has_kernel:
            columns = gpu_sampling.choose(processed, logits, _kernel_settings(piece.positions))
        else:
            assert facts is not None
            likeliest = facts.likeliest if processed is given else None
            token_ids, doubt = _choose_tokens(processed, likeliest, piece.positions, defers=defers)
            column = token_ids[:, None]
            is_left = processed.gather(1, column).squeeze(1) > float("-inf")
            own = given.gather(1, column).squeeze(1).float()
            columns = token_ids, own - facts.logsumexp, is_left
        if facts is not None and asking:
            counts = [piece.positions[i].request.params.logprobs or 0 for i in asking]
            is_all = len(asking) == len(piece.positions)
            rows = slice(None) if is_all else upload(np.array(asking), given.device)
            sums, chosen = facts.logsumexp[rows], columns[0][rows]
            ranked = rank_tokens(given[rows].float(), sums, chosen, counts)
        if doubt is not None:
            # The next forward pass may write over what this one gave.
            kept = given.clone()
        return _Part(piece, columns, asking, ranked, doubt, kept)


def _choose_tokens(
    logits: Tensor, likeliest: Tensor | None, positions: Sequence[Position], *, defers: bool
) -> tuple[Tensor, Doubt | None]:
    """The likeliest token, if that is not known yet, or a random one, as each wants: [n] int64."""
    random = [i for i, p in enumerate(positions) if not p.request.params.is_greedy]
    if len(random) == len(positions):
        return draw_or_doubt(logits, SamplingBatch.of(positions), defers=defers)
    token_ids = argmax(logits) if likeliest is None else likeliest
    if not random:
        return token_ids, None
    index = np.array(random)
    rows = upload(index, logits.device)
    batch = SamplingBatch.of([positions[i] for i in random])
    drawn, doubt = draw_or_doubt(logits[rows], batch, defers=defers)
    if doubt is not None:
        doubt = doubt._replace(rows=index[doubt.rows])
    return token_ids.index_copy(0, rows, drawn), doubt


def sample(logits: Tensor, requests: list[Request]) -> list[Sampled]:
    """Choose one token for each request, without guides, guesses and anything remembered.

    Args:
        logits: [num_requests, vocab_size], any float dtype. Not changed.
        requests: whose logits these are, before their new token is appended.

    Returns:
        One Sampled each; one with an error where nothing could be chosen.
    """
    choices = Sampler().choose(logits, [Position(request, []) for request in requests])
    return [
        Sampled([], [], choices.errors[index])
        if index in choices.errors
        else Sampled(
            [choices.token_ids[index]],
            [choices.logprobs[index]],
            top=[choices.top[index]] if index in choices.top else None,
        )
        for index in range(len(requests))
    ]


def _kernel_settings(positions: Sequence[Position]) -> gpu_sampling.Settings:
    """What `gpu_sampling.choose` must know of each position."""
    batch = SamplingBatch.of(positions)
    is_greedy = [position.request.params.is_greedy for position in positions]
    temperature = np.where(is_greedy, 0.0, batch.temperature)
    top_k = batch.top_k.clip(max=np.iinfo(np.int32).max)
    return np.stack([temperature, batch.top_p, top_k, batch.min_p, batch.uniform])
