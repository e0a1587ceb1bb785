# SPDX-License-Identifier: Apache-2.0
"""The sampler, which samples tokens from the logits of a step.

First, the sampler applies token masks, penalties and similar parameters to the logits
(logits_processor.py). Then, for a greedy request, the sampler selects the likeliest token. For any
other request, the sampler selects a random token (random_sampling.py). On a GPU, one kernel can
select the tokens of all requests (gpu_sampling.py).
"""

import math
from collections import abc
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.device_transfer import HostCopy, upload
from nereid_backend.sampling import gpu_sampling
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.logits_processor import LogitsProcessor, explain_no_token
from nereid_backend.sampling.native_logits import argmax, argmax_logsumexp
from nereid_backend.sampling.random_sampling import SamplingBatch, UncertainRows, sample_or_defer
from nereid_backend.sampling.ranked_logprobs import RankedRows, rank_tokens, slices
from nereid_backend.sampling.sampling_table import SamplingTable
from nereid_backend.sampling.step_slices import (
    PendingSlice,
    SampledRows,
    SliceInputs,
    concatenate,
    true_indices,
)
from nereid_backend.sampling.token_masks import StepMasks

NOT_FINITE = (
    "The model's logits contain NaN or infinity. Either the weights of the model are damaged, or a "
    "number was too large for the dtype. Try another dtype."
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that were sampled at some positions, with log-probabilities and errors.

    Attributes:
        token_ids: one token for each position. If a position has an error, its token is
            meaningless.
        logprobs: the log-probabilities of `token_ids` under the model's own distribution.
        errors: one sentence for each position at which no token could be sampled. The sentence
            explains the reason. The key is the index of the position.
        top: the requested log-probabilities. The key is the index of the position. Positions for
            which no log-probabilities were requested have no entry.
    """

    token_ids: list[int]
    logprobs: list[float]
    errors: dict[int, str] = field(default_factory=dict)
    top: dict[int, TokenLogprobs] = field(default_factory=dict)

    def replace(self, indices: list[int], new: "SampledTokens") -> None:
        """Replace the tokens and log-probabilities at the positions `indices` with those of `new`.

        `new` has one token for each item of `indices`.
        """
        for new_index, index in enumerate(indices):
            self.token_ids[index] = new.token_ids[new_index]
            self.logprobs[index] = new.logprobs[new_index]
            if new_index in new.top:
                self.top[index] = new.top[new_index]


class _RankedCopy(NamedTuple):
    """The log-probabilities of some consecutive positions, while they are copied to the host."""

    inputs: SliceInputs
    ranked: RankedRows
    copy: HostCopy


class _UncertainCopy(NamedTuple):
    """The uncertain rows of a slice: the rows for which a wrong token may have been sampled.

    `rows` contains the indices of these rows in the slice. `is_certain` copies one flag for each of
    these rows from the device to the host. True means that the token is right.
    """

    part: PendingSlice
    rows: NDArray[np.int64]
    is_certain: HostCopy


class PendingTokens:
    """The sampled tokens of one step, while they are copied from the device to the host.

    Attributes:
        token_ids: [num_positions] int64, the sampled tokens on the device.
    """

    def __init__(self, sampler: "Sampler", parts: list[PendingSlice]) -> None:
        """Start to copy the sampling results of a step from the device to the host.

        Three kinds of results are copied:
        - The sampled tokens of all slices, in one copy.
        - The requested log-probabilities of each slice (`ranked`).
        - For each uncertain row of a slice, whether its token is right. A row is uncertain if only
          some of its logits were examined. The indices of these rows are on the host already.

        Args:
            sampler: the sampler, which samples a row again if its token is wrong.
            parts: the slices of the step, at least one. A slice consists of the results for some
                consecutive rows of the step's logits.
        """
        self._sampler = sampler
        self._parts = parts
        sampled = concatenate([part.sampled for part in parts])
        self.token_ids = sampled.token_ids
        self._sampled_copy = HostCopy(sampled)
        self._ranked_copies = [
            _RankedCopy(part.inputs, part.ranked, HostCopy(part.ranked.tensors))
            for part in parts
            if part.ranked is not None
        ]
        self._uncertain_copies = [
            _UncertainCopy(
                part,
                rows=part.uncertain.rows,
                is_certain=HostCopy([part.uncertain.is_certain]),
            )
            for part in parts
            if part.uncertain is not None
        ]

    def result(self) -> tuple[SampledTokens, list[int]]:
        """Wait until the results are on the host, and return the sampled tokens.

        Returns:
            The final tokens, and the ids of the tokens that were first sampled on the device. An id
            differs from the final token if its row was uncertain and was sampled again. The next
            step may already have used the first id as its input. If the id differs, that part of
            the next step must be discarded.
        """
        sampled = SampledRows(*self._sampled_copy.wait())
        first_ids = sampled.token_ids.tolist()
        # The list of ids is copied, because `_resample_wrong_rows` replaces ids in the copy.
        tokens = SampledTokens(first_ids.copy(), sampled.logprobs.tolist(), top=self._read_top())
        self._resample_wrong_rows(tokens)
        self._add_errors(sampled.has_allowed.tolist(), tokens)
        return tokens, first_ids

    def _read_top(self) -> dict[int, TokenLogprobs]:
        """Wait for the requested log-probabilities, and return them; see `SampledTokens.top`."""
        top: dict[int, TokenLogprobs] = {}
        for inputs, ranked, copy in self._ranked_copies:
            reports = ranked.read(*copy.wait())
            for index, report in zip(inputs.indices_with_logprobs, reports, strict=True):
                top[inputs.start + index] = report
        return top

    def _resample_wrong_rows(self, sampled_tokens: SampledTokens) -> None:
        """Sample a row again if its token may be wrong, and replace the token in `sampled_tokens`.

        An uncertain row was sampled from only some of its tokens. The device has computed whether
        these tokens were sufficient. If they were not, the row must be sampled again.
        """
        for part, rows, is_certain_copy in self._uncertain_copies:
            (is_certain,) = is_certain_copy.wait()
            wrong_rows = rows[~is_certain.numpy()].tolist()
            if wrong_rows:
                new = self._sampler.sample_again(part, wrong_rows)
                # The indices of the rows in the whole step, not in the slice.
                indices = [part.inputs.start + row for row in wrong_rows]
                sampled_tokens.replace(indices, new)

    def _add_errors(self, has_allowed: list[bool], sampled_tokens: SampledTokens) -> None:
        """Add an error message for each position at which no token could be sampled.

        Args:
            has_allowed: for each position, whether masks and parameters allow at least one token.
            sampled_tokens: the sampled tokens of the step. Mutated.
        """
        logprobs = sampled_tokens.logprobs
        # In nearly every step, there is no error. This check is faster than the loop below.
        if all(has_allowed) and all(map(math.isfinite, logprobs)):
            return
        positions = chain.from_iterable(part.inputs.positions for part in self._parts)
        for index, position in enumerate(positions):
            if not math.isfinite(logprobs[index]):
                # If the logits are invalid, report this cause, even if the request also forbids
                # every token.
                sampled_tokens.errors[index] = NOT_FINITE
            elif not has_allowed[index]:
                sampled_tokens.errors[index] = explain_no_token(position)


class Sampler:
    """Samples tokens, and caches the prepared sampling parameters of the running requests.

    Attributes:
        defers: when uncertain rows are sampled again. True: when the result is read. False:
            immediately, so the host must wait for the GPU. None: True on a GPU, and False on a
            CPU.
        has_kernel: whether a GPU kernel samples the tokens. If so, no row is uncertain, because
            the kernel reads all logits of a row.
    """

    def __init__(self, *, defers: bool | None = None, has_kernel: bool = False) -> None:
        self.defers = defers
        self.has_kernel = has_kernel
        self._table = SamplingTable()
        self._processor = LogitsProcessor()

    def sample(
        self, logits: Tensor, positions: abc.Sequence[Position], masks: StepMasks | None = None
    ) -> SampledTokens:
        """Sample one token at each position and wait for the result; see `launch`."""
        return self.launch(logits, positions, masks).result()[0]

    def launch(
        self, logits: Tensor, positions: abc.Sequence[Position], masks: StepMasks | None = None
    ) -> PendingTokens:
        """Start to sample one token at each position. Do not wait for the GPU.

        Args:
            logits: [num_positions, vocab_size], any float dtype. Not changed.
            positions: at least one position. Either all sequences have a row (Sequence.row is set),
                or no sequence has a row. The caller must not change the requests before the result
                is read.
            masks: the token masks of the guides; None allows every token. The caller must not
                change the masks before the result is read.
        """
        params = self._table.read(positions)
        defers = self._defers_on(logits.device)
        pending: list[PendingSlice] = []
        # The rows are divided into slices, because the intermediate results of all rows together
        # could be too large.
        for rows in slices(len(positions), logits.shape[1], logits.device):
            slice_masks = {} if masks is None else masks.of_slice(rows)
            inputs = SliceInputs(rows.start, positions[rows], params[rows], slice_masks)
            pending.append(self._launch_slice(logits[rows], inputs, defers=defers))
        return PendingTokens(self, pending)

    def _defers_on(self, device: torch.device) -> bool:
        """Return True if rows with uncertain tokens are sampled again later, not at once."""
        if self.defers is not None:
            return self.defers
        return device.type != "cpu"

    def sample_again(self, part: PendingSlice, rows: list[int]) -> SampledTokens:
        """Sample some rows again, and this time examine all tokens of the vocabulary.

        Args:
            part: a slice that has uncertain rows.
            rows: the indices of the rows in the slice.
        """
        assert part.logits is not None, "a slice with uncertain rows has a copy of its logits"
        logits = part.logits[upload(np.array(rows), part.logits.device)]
        again = self._launch_slice(logits, part.inputs.select(rows), defers=False)
        return PendingTokens(self, [again]).result()[0]

    def _launch_slice(
        self, model_logits: Tensor, inputs: SliceInputs, *, defers: bool
    ) -> PendingSlice:
        """Start to sample one token for each row of logits. Do not wait for the GPU.

        Args:
            model_logits: [n, vocab_size], any float dtype, the model's own logits. Not changed.
            inputs: the n positions, their sampling parameters and their masks.
            defers: whether uncertain rows are sampled again only when the result is read. A row is
                uncertain if only some of its logits were examined. If `has_kernel` is True, no row
                is uncertain.
        """
        if self.has_kernel:
            return self._launch_with_kernel(model_logits, inputs)
        return self._launch_without_kernel(model_logits, inputs, defers=defers)

    def _launch_with_kernel(self, model_logits: Tensor, inputs: SliceInputs) -> PendingSlice:
        """Start the GPU kernel that samples a token for each row of `model_logits`."""
        logits = model_logits.float()
        processed = self._process(logits, inputs)
        settings = _kernel_settings(inputs)
        sampled = SampledRows(*gpu_sampling.sample(processed, logits, settings))
        ranked = _rank_positions(model_logits, sampled.token_ids, inputs)
        return PendingSlice(inputs, sampled, ranked)

    def _launch_without_kernel(
        self, model_logits: Tensor, inputs: SliceInputs, *, defers: bool
    ) -> PendingSlice:
        """Use torch or CPU kernels to sample a token for each row of `model_logits`.

        For speed, a random token may be chosen from only the likeliest tokens of a row. The row is
        then uncertain. `defers` states whether uncertain rows are sampled again only when the
        result is read.
        """
        # The logits after masks, penalties and similar parameters are applied.
        processed = self._process(model_logits, inputs)
        model_likeliest, logsumexp = argmax_logsumexp(model_logits)
        # If no row has a mask, a penalty or another parameter that changes logits, `_process`
        # returns `model_logits` itself. The likeliest tokens are then already known.
        likeliest = model_likeliest if processed is model_logits else None
        token_ids, uncertain = _sample_rows(processed, likeliest, inputs, defers=defers)
        sampled = SampledRows(
            token_ids,
            # The model's own distribution, before masks and penalties.
            logprobs=_logits_of(token_ids, model_logits).float() - logsumexp,
            # If every token of a row is forbidden, the sampled token has the logit -inf.
            has_allowed=_logits_of(token_ids, processed) > float("-inf"),
        )
        ranked = _rank_positions(model_logits, token_ids, inputs, logsumexp)
        # Uncertain rows may have to be sampled again later. By then, the next forward pass may have
        # overwritten the logits, so copy the logits now.
        logits_copy = None if uncertain is None else model_logits.clone()
        return PendingSlice(inputs, sampled, ranked, uncertain, logits_copy)

    def _process(self, logits: Tensor, inputs: SliceInputs) -> Tensor:
        """Apply masks and sampling parameters to the logits; see `LogitsProcessor.process`."""
        rows_with_params = true_indices(inputs.params["changes_logits"])
        return self._processor.process(logits, inputs.positions, rows_with_params, inputs.masks)


def _logits_of(token_ids: Tensor, logits: Tensor) -> Tensor:
    """Return the logit of one token in each row, [n].

    Shapes: token_ids [n] int64, logits [n, vocab_size].
    """
    return logits.gather(1, token_ids[:, None]).squeeze(1)


def _rank_positions(
    logits: Tensor, token_ids: Tensor, inputs: SliceInputs, logsumexp: Tensor | None = None
) -> RankedRows | None:
    """Compute log-probabilities, but only at the positions for which they were requested.

    Args:
        logits: [n, vocab_size], the model's own logits.
        token_ids: [n] int64, the sampled tokens.
        inputs: the n positions.
        logsumexp: [n] float32, the logsumexp of each row of `logits`. None if the caller has not
            computed the values.

    Returns:
        The log-probabilities at the positions `inputs.indices_with_logprobs`; None if no request
        asks for log-probabilities.
    """
    indices = inputs.indices_with_logprobs
    if not indices:
        return None
    if logsumexp is None:
        logsumexp = argmax_logsumexp(logits).logsumexp
    # For each position, the requested number of likeliest tokens.
    num_top = [_num_top(inputs.positions[index]) for index in indices]
    needs_all_rows = len(indices) == len(inputs.positions)
    if not needs_all_rows:
        rows = upload(np.array(indices), logits.device)
        logits = logits[rows]
        logsumexp = logsumexp[rows]
        token_ids = token_ids[rows]
    return rank_tokens(logits.float(), logsumexp, token_ids, num_top)


def _num_top(position: Position) -> int:
    """Return the number of likeliest tokens to report at a position. The number may be 0."""
    return position.sequence.params.logprobs or 0


def _sample_rows(
    logits: Tensor, likeliest: Tensor | None, inputs: SliceInputs, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Sample a token for each row of `logits`. Also return the rows whose tokens may be wrong.

    A row is greedy if the temperature of its request is 0. A greedy row gets its likeliest token,
    and any other row gets a random token. To save time, a random token is sampled from only the
    likeliest tokens of the row. It may be wrong if the filters of the request keep further tokens.

    Args:
        logits: [n, vocab_size], after masks and penalties.
        likeliest: [n] int64, the likeliest token of each row. None if the caller has not computed
            the tokens.
        inputs: the positions of the rows, with their sampling parameters and masks.
        defers: whether rows that may have a wrong token are returned (True), or are sampled again
            at once (False).

    Returns:
        Token ids [n] int64, and the rows that may have to be sampled again; None if there are none.
    """
    is_greedy = inputs.params["is_greedy"]
    if not is_greedy.any():
        batch = SamplingBatch.of(inputs.positions, inputs.params)
        return sample_or_defer(logits, batch, defers=defers)
    likeliest_ids = argmax(logits) if likeliest is None else likeliest
    if is_greedy.all():
        return likeliest_ids, None
    return _sample_non_greedy_rows(likeliest_ids, logits, inputs, defers=defers)


def _sample_non_greedy_rows(
    likeliest_ids: Tensor, logits: Tensor, inputs: SliceInputs, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Sample a random token for each row that is not greedy.

    A greedy row keeps its likeliest token. Example: of three rows with the likeliest tokens
    [7, 3, 5], only the last row is not greedy. If the random token is 8, the result is [7, 3, 8].

    Args:
        likeliest_ids: [n] int64, the likeliest token of each row. Not changed.
        logits: [n, vocab_size], after masks and penalties.
        inputs: the positions of the rows, with their sampling parameters.
        defers: whether a row whose random token may be wrong is returned (True), or is sampled
            again at once (False).

    Returns:
        The token ids of all rows, [n] int64, and the rows of `logits` whose random tokens may be
        wrong. The second item is None if there are no such rows, for example if `defers` is False.
    """
    (random_rows,) = (~inputs.params["is_greedy"]).nonzero()
    device_rows = upload(random_rows, logits.device)
    random_positions = [inputs.positions[row] for row in random_rows]
    batch = SamplingBatch.of(random_positions, inputs.params[random_rows])
    random_ids, uncertain = sample_or_defer(logits[device_rows], batch, defers=defers)
    token_ids = likeliest_ids.index_copy(0, device_rows, random_ids)
    if uncertain is None:
        return token_ids, None
    # `uncertain` contains indices of `random_rows`. The caller needs indices of `logits`.
    return token_ids, uncertain.in_batch(random_rows)


def _kernel_settings(inputs: SliceInputs) -> gpu_sampling.Settings:
    """Return the sampling settings of `n` positions for the GPU kernel, [5, n].

    The rows are the temperature, top_p, top_k, min_p and a random number.
    """
    batch = SamplingBatch.of(inputs.positions, inputs.params)
    temperature = np.where(inputs.params["is_greedy"], 0.0, batch.temperature)
    # The kernel reads top_k as int32.
    top_k = batch.top_k.clip(max=np.iinfo(np.int32).max)
    return np.stack([temperature, batch.top_p, top_k, batch.min_p, batch.uniform])
