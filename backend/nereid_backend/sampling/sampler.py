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

import numpy as np
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
        top: the log-probabilities to report at each position whose request asks for
            log-probabilities. The key is the index of the position.
    """

    token_ids: list[int]
    logprobs: list[float]
    errors: dict[int, str] = field(default_factory=dict)
    top: dict[int, TokenLogprobs] = field(default_factory=dict)


class PendingTokens:
    """The sampled tokens of a step, which are being copied from the device to the host.

    Attributes:
        token_ids: [num_positions] int64, the sampled tokens on the device.
    """

    def __init__(self, sampler: "Sampler", parts: list[PendingSlice]) -> None:
        """Start to copy the results of all slices to the host.

        Args:
            sampler: the sampler, which samples uncertain rows again.
            parts: the slices of the step, at least one.
        """
        self._sampler = sampler
        self._parts = parts
        sampled = concatenate([part.sampled for part in parts])
        self.token_ids = sampled.token_ids
        self._sampled_copy = HostCopy(sampled)
        # `_ranked_copies` contains the copies of the log-probabilities, and `_is_certain_copies`
        # contains the copies of `UncertainRows.is_certain`. The two lists have one item for each
        # slice. The item is None if the slice has no such tensor.
        self._ranked_copies: list[HostCopy | None] = []
        self._is_certain_copies: list[HostCopy | None] = []
        for part in parts:
            ranked, uncertain = part.ranked, part.uncertain
            self._ranked_copies.append(None if ranked is None else HostCopy(ranked.tensors))
            self._is_certain_copies.append(
                None if uncertain is None else HostCopy([uncertain.is_certain])
            )

    def result(self) -> tuple[SampledTokens, list[int]]:
        """Wait for the copy and return the sampled tokens.

        Returns:
            A pair. The first item contains the sampled tokens. The second item contains the values
            of `token_ids` on the device, from which the next step may already have read its input.
            The token ids in the two items differ only in rows that were sampled again.
        """
        sampled = SampledRows(*self._sampled_copy.wait())
        device_token_ids = sampled.token_ids.tolist()
        sampled_tokens = SampledTokens(list(device_token_ids), sampled.logprobs.tolist())
        self._read_top(sampled_tokens)
        self._replace_uncertain(sampled_tokens)
        self._store_errors(sampled.has_allowed.tolist(), sampled_tokens)
        return sampled_tokens, device_token_ids

    def _read_top(self, sampled_tokens: SampledTokens) -> None:
        """Wait for the requested log-probabilities, and store them in `sampled_tokens.top`."""
        for part, ranked_copy in zip(self._parts, self._ranked_copies, strict=True):
            if part.ranked is not None and ranked_copy is not None:
                reports = part.ranked.read(*ranked_copy.wait())
                start = part.inputs.start
                for index, report in zip(part.inputs.ranked, reports, strict=True):
                    sampled_tokens.top[start + index] = report

    def _replace_uncertain(self, sampled_tokens: SampledTokens) -> None:
        """Sample a row again if its token may be wrong, and replace the token in `sampled_tokens`.

        An uncertain row was sampled from only some of its tokens. The device has computed whether
        these tokens were sufficient. If they were not, the row must be sampled again.
        """
        for part, is_certain_copy in zip(self._parts, self._is_certain_copies, strict=True):
            if part.uncertain is not None and is_certain_copy is not None:
                (is_certain,) = is_certain_copy.wait()
                wrong_rows = part.uncertain.rows[~is_certain.numpy()].tolist()
                if wrong_rows:
                    self._sample_again(part, wrong_rows, sampled_tokens)

    def _store_errors(self, has_allowed: list[bool], sampled_tokens: SampledTokens) -> None:
        """Store the reason for each position at which no token could be sampled.

        Args:
            has_allowed: for each position, whether at least one token was allowed.
            sampled_tokens: the sampled tokens of the step. Mutated.
        """
        logprobs = sampled_tokens.logprobs
        # In nearly every step, there is no error. This check is faster than the loop below.
        if all(has_allowed) and all(map(math.isfinite, logprobs)):
            return
        positions = chain.from_iterable(part.inputs.positions for part in self._parts)
        for index, position in enumerate(positions):
            if not math.isfinite(logprobs[index]):
                sampled_tokens.errors[index] = NOT_FINITE
            elif not has_allowed[index]:
                sampled_tokens.errors[index] = explain_no_token(position.sequence)

    def _sample_again(
        self, part: PendingSlice, rows: list[int], sampled_tokens: SampledTokens
    ) -> None:
        """Sample some rows of a slice a second time, and replace their tokens.

        Args:
            part: the slice.
            rows: the indices of the rows in the slice.
            sampled_tokens: the sampled tokens of the step. Mutated.
        """
        again = self._sampler.sample_again(part, rows)
        for index_in_again, row in enumerate(rows):
            index_in_step = part.inputs.start + row
            sampled_tokens.token_ids[index_in_step] = again.token_ids[index_in_again]
            sampled_tokens.logprobs[index_in_step] = again.logprobs[index_in_again]
            if index_in_again in again.top:
                sampled_tokens.top[index_in_step] = again.top[index_in_again]


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
        """Launch the sampling of one token at each position, without waiting for a GPU.

        Args:
            logits: [num_positions, vocab_size], any float dtype. Not changed.
            positions: at least one position. Either all sequences have a row (Sequence.row is set),
                or no sequence has a row. The caller must not change the requests before the result
                is read.
            masks: the token masks of the guides; None allows every token. The caller must not
                change the masks before the result is read.
        """
        params = self._table.read(positions)
        is_on_gpu = logits.device.type != "cpu"
        defers = is_on_gpu if self.defers is None else self.defers
        pending: list[PendingSlice] = []
        for rows in slices(len(positions), logits.shape[1], logits.device):
            slice_masks = {} if masks is None else masks.of_slice(rows)
            inputs = SliceInputs(rows.start, positions[rows], params[rows], slice_masks)
            pending.append(self._launch_slice(logits[rows], inputs, defers=defers))
        return PendingTokens(self, pending)

    def sample_again(self, part: PendingSlice, rows: list[int]) -> SampledTokens:
        """Sample some rows of a slice again. All tokens of the vocabulary are examined.

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
        """Launch the sampling of one token for each row of logits.

        Args:
            model_logits: [n, vocab_size], any float dtype, the model's own logits. Not changed.
            inputs: the n positions, their sampling parameters and their masks.
            defers: whether uncertain rows are sampled again only when the result is read.
        """
        if self.has_kernel:
            return self._launch_with_kernel(model_logits, inputs)
        return self._launch_without_kernel(model_logits, inputs, defers=defers)

    def _launch_with_kernel(self, model_logits: Tensor, inputs: SliceInputs) -> PendingSlice:
        """Launch the sampling with the GPU kernel; see `_launch_slice`."""
        logits = model_logits.float()
        processed = self._process(logits, inputs)
        settings = _kernel_settings(inputs)
        sampled = SampledRows(*gpu_sampling.sample(processed, logits, settings))
        ranked = _rank_positions(model_logits, sampled.token_ids, inputs)
        return PendingSlice(inputs, sampled, ranked)

    def _launch_without_kernel(
        self, model_logits: Tensor, inputs: SliceInputs, *, defers: bool
    ) -> PendingSlice:
        """Launch the sampling with torch or CPU kernels; see `_launch_slice`."""
        processed = self._process(model_logits, inputs)
        model_likeliest, logsumexp = argmax_logsumexp(model_logits)
        # The likeliest tokens of `model_logits` are used only if `_process` has not changed the
        # logits.
        likeliest = model_likeliest if processed is model_logits else None
        token_ids, uncertain = _sample_rows(processed, likeliest, inputs, defers=defers)
        column = token_ids[:, None]
        # Log-probabilities are reported for the model's own distribution, before masks and
        # penalties.
        logprobs = model_logits.gather(1, column).squeeze(1).float() - logsumexp
        # If every token of a row is forbidden, the sampled token has the logit -inf.
        has_allowed = processed.gather(1, column).squeeze(1) > float("-inf")
        sampled = SampledRows(token_ids, logprobs, has_allowed)
        ranked = _rank_positions(model_logits, token_ids, inputs, logsumexp)
        # If any row is uncertain, copy the logits, because the next forward pass may overwrite them
        # before the row is sampled again.
        saved_logits = None if uncertain is None else model_logits.clone()
        return PendingSlice(inputs, sampled, ranked, uncertain, saved_logits)

    def _process(self, logits: Tensor, inputs: SliceInputs) -> Tensor:
        """Apply masks and sampling parameters to the logits; see `LogitsProcessor.process`."""
        changed = true_indices(inputs.params["changes_logits"])
        return self._processor.process(logits, inputs.positions, changed, inputs.masks)


def _rank_positions(
    logits: Tensor, token_ids: Tensor, inputs: SliceInputs, logsumexp: Tensor | None = None
) -> RankedRows | None:
    """Compute the log-probabilities at the positions whose requests ask for log-probabilities.

    Args:
        logits: [n, vocab_size], the model's own logits.
        token_ids: [n] int64, the sampled tokens.
        inputs: the n positions.
        logsumexp: [n] float32, the logsumexp of each row of `logits`. None if the caller has not
            computed the values.

    Returns:
        The log-probabilities at the positions `inputs.ranked`; None if `inputs.ranked` is empty.
    """
    indices = inputs.ranked
    if not indices:
        return None
    if logsumexp is None:
        logsumexp = argmax_logsumexp(logits).logsumexp
    # For each position in `indices`, the number of likeliest tokens to report. All requests at
    # these positions set `logprobs`, so `or 0` is needed only for the type checker.
    num_top = [inputs.positions[index].sequence.params.logprobs or 0 for index in indices]
    if len(indices) == len(inputs.positions):
        return rank_tokens(logits.float(), logsumexp, token_ids, num_top)
    rows = upload(np.array(indices), logits.device)
    return rank_tokens(logits[rows].float(), logsumexp[rows], token_ids[rows], num_top)


def _sample_rows(
    logits: Tensor, likeliest: Tensor | None, inputs: SliceInputs, *, defers: bool
) -> tuple[Tensor, UncertainRows | None]:
    """Return one token for each row: the likeliest token of a greedy row, otherwise a random token.

    A row is greedy if the temperature of its request is 0.

    Args:
        logits: [n, vocab_size], after masks and penalties.
        likeliest: [n] int64, the likeliest token of each row. None if the caller has not computed
            the tokens.
        inputs: the positions of the rows, with their sampling parameters and masks.
        defers: see `sample_or_defer`.

    Returns:
        Token ids [n] int64, and the rows that may have to be sampled again.
    """
    (random_rows,) = (~inputs.params["is_greedy"]).nonzero()
    if len(random_rows) == len(inputs.positions):
        batch = SamplingBatch.of(inputs.positions, inputs.params)
        return sample_or_defer(logits, batch, defers=defers)
    likeliest_ids = argmax(logits) if likeliest is None else likeliest
    if len(random_rows) == 0:
        return likeliest_ids, None
    random_positions = [inputs.positions[row] for row in random_rows]
    batch = SamplingBatch.of(random_positions, inputs.params[random_rows])
    device_rows = upload(random_rows, logits.device)
    sampled_ids, uncertain = sample_or_defer(logits[device_rows], batch, defers=defers)
    if uncertain is not None:
        # `uncertain.rows` contains indices into `random_rows`. Convert them to row indices of
        # `logits`.
        uncertain = uncertain._replace(rows=random_rows[uncertain.rows])
    return likeliest_ids.index_copy(0, device_rows, sampled_ids), uncertain


def _kernel_settings(inputs: SliceInputs) -> gpu_sampling.Settings:
    """Return the argument `settings` of `gpu_sampling.sample`, [5, n]."""
    batch = SamplingBatch.of(inputs.positions, inputs.params)
    temperature = np.where(inputs.params["is_greedy"], 0.0, batch.temperature)
    # The kernel reads top_k as int32.
    top_k = batch.top_k.clip(max=np.iinfo(np.int32).max)
    return np.stack([temperature, batch.top_p, top_k, batch.min_p, batch.uniform])
