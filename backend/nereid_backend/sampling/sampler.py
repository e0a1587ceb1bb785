# SPDX-License-Identifier: Apache-2.0
"""The sampler: turns the logits of all positions of a step into tokens.

The sampler applies the fields of the requests (logits_processor.py). Then it takes the likeliest
token, or a random one (random_sampling.py). On a GPU, one kernel can do both (gpu_sampling.py).
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
from nereid_backend.sampling.logits_processor import LogitsParams, LogitsProcessor, explain_no_token
from nereid_backend.sampling.logsumexp import argmax, row_facts
from nereid_backend.sampling.random_sampling import SamplingBatch, UncertainRows, draw_or_defer
from nereid_backend.sampling.ranked_logprobs import RankedRows, rank_tokens, slices
from nereid_backend.sampling.token_masks import StepMasks, Words

NOT_FINITE = (
    "The model's logits are not finite numbers: its weights are damaged, or this dtype overflows. "
    "Try another dtype."
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of some positions.

    Attributes:
        token_ids: one token for each position. It has no meaning if the position has an error.
        logprobs: the log-probabilities of these tokens under the model's own distribution.
        errors: the reason why no token could be sampled, by the index of the position.
        top: the likeliest tokens by the index of the position, if the request asks for
            log-probabilities.
    """

    token_ids: list[int]
    logprobs: list[float]
    errors: dict[int, str] = field(default_factory=dict)
    top: dict[int, TokenLogprobs] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Consecutive positions of a step.

    Attributes:
        start: the index of the first position in the step.
        positions: the positions.
        logits_params: the logits parameters of the positions' requests.
        words: the token mask of each position; None allows every token.
    """

    start: int
    positions: Sequence[Position]
    logits_params: Sequence[LogitsParams]
    words: Sequence[Words | None]

    def rows(self, index: Sequence[int]) -> "_Piece":
        """Return the positions at `index`. The result's `start` has no meaning."""
        return _Piece(
            0,
            [self.positions[i] for i in index],
            [self.logits_params[i] for i in index],
            [self.words[i] for i in index],
        )


class _Part(NamedTuple):
    """The sampled tokens of a piece, on the device.

    Attributes:
        piece: the positions.
        columns: token ids [n] int64, their log-probabilities [n] float32, and whether any token
            was allowed [n] bool.
        asking: the indices of the positions whose requests ask for log-probabilities.
        ranked: the log-probabilities of these positions.
        uncertain: the rows that may have to be sampled again; see `UncertainRows`.
        logits: [n, vocab_size], the model's own logits, kept in case rows are sampled again.
    """

    piece: _Piece
    columns: tuple[Tensor, Tensor, Tensor]
    asking: list[int]
    ranked: RankedRows | None
    uncertain: UncertainRows | None
    logits: Tensor | None


class PendingTokens:
    """Sampled tokens whose copy to the host has been launched.

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
            more += (part.uncertain.is_known,) if part.uncertain is not None else ()
        self._copy = HostCopy([*joined, *more])

    def result(self) -> tuple[SampledTokens, list[int]]:
        """Wait for the copy and return the sampled tokens.

        Returns:
            The sampled tokens, and the values of `token_ids` on the device. They differ only in
            rows that had to be sampled again.
        """
        tensors = iter(self._copy.wait())
        token_ids, logprobs, is_left = (next(tensors).tolist() for _ in range(3))
        device_token_ids = list(token_ids)
        sampled_tokens = SampledTokens(token_ids, logprobs)
        for part in self._parts:
            self._read_more(part, tensors, sampled_tokens)
        if not (all(is_left) and all(map(math.isfinite, logprobs))):
            positions = [position for part in self._parts for position in part.piece.positions]
            for index, position in enumerate(positions):
                if not math.isfinite(logprobs[index]):
                    sampled_tokens.errors[index] = NOT_FINITE
                elif not is_left[index]:
                    sampled_tokens.errors[index] = explain_no_token(position.request)
        return sampled_tokens, device_token_ids

    def _read_more(
        self, part: _Part, tensors: Iterator[Tensor], sampled_tokens: SampledTokens
    ) -> None:
        """Read the log-probabilities of a part, and sample its uncertain rows again.

        Mutates: sampled_tokens.
        """
        start = part.piece.start
        if part.ranked is not None:
            found = part.ranked.read(next(tensors), next(tensors), next(tensors))
            sampled_tokens.top.update(zip((start + i for i in part.asking), found, strict=True))
        if part.uncertain is None:
            return
        rows = part.uncertain.rows[~next(tensors).numpy()].tolist()
        if not rows:
            return
        again, _ = self._sampler.sample_again(part, rows)
        for index, row in enumerate(rows):
            sampled_tokens.token_ids[start + row] = again.token_ids[index]
            sampled_tokens.logprobs[start + row] = again.logprobs[index]
            if index in again.top:
                sampled_tokens.top[start + row] = again.top[index]


class Sampler:
    """Samples tokens, and caches the prepared logits parameters of the requests by row.

    Attributes:
        defers: whether uncertain rows are sampled again when the result is read. If not, they are
            sampled again at once, for which the host must wait for a GPU. None: True on a GPU.
        has_kernel: whether a GPU kernel samples. The kernel reads every token, so no row is
            uncertain.
    """

    def __init__(self, *, defers: bool | None = None, has_kernel: bool = False) -> None:
        self.defers = defers
        self.has_kernel = has_kernel
        self._processor = LogitsProcessor()

    def sample(
        self, logits: Tensor, positions: Sequence[Position], masks: StepMasks | None = None
    ) -> SampledTokens:
        """Sample one token at each position and wait for the result; see `launch`."""
        return self.launch(logits, positions, masks).result()[0]

    def launch(
        self, logits: Tensor, positions: Sequence[Position], masks: StepMasks | None = None
    ) -> PendingTokens:
        """Launch the sampling of one token at each position, without waiting for a GPU.

        Args:
            logits: [num_positions, vocab_size], any float dtype. Not changed.
            positions: at least one. Either all of their requests have rows, or none has. The
                requests must not change before the result is read.
            masks: the token masks of the guides; None allows every token. They must not change
                before the result is read.
        """
        words = masks.words if masks else {}
        logits_params = self._processor.logits_params(positions, logits.shape[1])
        defers = logits.device.type != "cpu" if self.defers is None else self.defers
        parts: list[_Part] = []
        for rows in slices(len(positions), logits.shape[1], logits.device):
            limits = [words.get(i) for i in range(rows.start, rows.stop)]
            piece = _Piece(rows.start, positions[rows], logits_params[rows], limits)
            parts.append(self._launch_rows(logits[rows], piece, defers=defers))
        return PendingTokens(self, parts)

    def sample_again(self, part: _Part, rows: list[int]) -> tuple[SampledTokens, list[int]]:
        """Sample some rows of a part again, this time considering every token."""
        assert part.logits is not None
        logits = part.logits[upload(np.array(rows), part.logits.device)]
        return PendingTokens(
            self, [self._launch_rows(logits, part.piece.rows(rows), defers=False)]
        ).result()

    def _launch_rows(self, given: Tensor, piece: _Piece, *, defers: bool) -> _Part:
        asking = [i for i, p in enumerate(piece.positions) if p.request.params.logprobs is not None]
        logits = given.float() if self.has_kernel else given
        processed = self._processor.process(
            logits, piece.positions, piece.logits_params, piece.words
        )
        facts = row_facts(given) if asking or not self.has_kernel else None
        uncertain, ranked, kept = None, None, None
        if self.has_kernel:
            columns = gpu_sampling.sample(processed, logits, _kernel_settings(piece.positions))
        else:
            assert facts is not None
            likeliest = facts.likeliest if processed is given else None
            token_ids, uncertain = _sample_rows(
                processed, likeliest, piece.positions, defers=defers
            )
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
        if uncertain is not None:
            # The next forward pass may overwrite these logits.
            kept = given.clone()
        return _Part(piece, columns, asking, ranked, uncertain, kept)


def _sample_rows(
    logits: Tensor, likeliest: Tensor | None, positions: Sequence[Position], *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Return the likeliest token of each greedy row and a random token of each other row.

    Args:
        logits: [n, vocab_size], after masks and penalties.
        likeliest: [n] int64, the likeliest tokens if they are known already.
        positions: the positions of the rows.
        defers: see `Sampler`.

    Returns:
        Token ids [n] int64, and the rows that may have to be sampled again.
    """
    random = [i for i, p in enumerate(positions) if not p.request.params.is_greedy]
    if len(random) == len(positions):
        return draw_or_defer(logits, SamplingBatch.of(positions), defers=defers)
    token_ids = argmax(logits) if likeliest is None else likeliest
    if not random:
        return token_ids, None
    index = np.array(random)
    rows = upload(index, logits.device)
    batch = SamplingBatch.of([positions[i] for i in random])
    drawn, uncertain = draw_or_defer(logits[rows], batch, defers=defers)
    if uncertain is not None:
        uncertain = uncertain._replace(rows=index[uncertain.rows])
    return token_ids.index_copy(0, rows, drawn), uncertain


def sample(logits: Tensor, requests: list[Request]) -> list[Sampled]:
    """Sample one token for each request, without guides, draft tokens or cached state.

    Args:
        logits: [num_requests, vocab_size], any float dtype. Not changed.
        requests: the sequences to which the rows belong, before the new token is appended.

    Returns:
        One result for each request. It has an error if no token could be sampled.
    """
    sampled_tokens = Sampler().sample(logits, [Position(request, []) for request in requests])
    return [
        Sampled([], [], sampled_tokens.errors[index])
        if index in sampled_tokens.errors
        else Sampled(
            [sampled_tokens.token_ids[index]],
            [sampled_tokens.logprobs[index]],
            top=[sampled_tokens.top[index]] if index in sampled_tokens.top else None,
        )
        for index in range(len(requests))
    ]


def _kernel_settings(positions: Sequence[Position]) -> gpu_sampling.Settings:
    """Return the settings [5, n] that `gpu_sampling.sample` reads."""
    batch = SamplingBatch.of(positions)
    is_greedy = [position.request.params.is_greedy for position in positions]
    temperature = np.where(is_greedy, 0.0, batch.temperature)
    top_k = batch.top_k.clip(max=np.iinfo(np.int32).max)
    return np.stack([temperature, batch.top_p, top_k, batch.min_p, batch.uniform])
