# SPDX-License-Identifier: Apache-2.0
"""The runner: executes a step plan with a forward pass on the model's path, followed by sampling.

`run` does everything in one call. With async scheduling, the same work is divided into three calls,
of which the first two only launch work on the device:

    start     launch the forward pass             while the previous step is still running
    sample    fill the masks, launch sampling     after the previous step is committed
    finish    wait for the tokens and check them
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.request import Request
from nereid_backend.core.step import Sampled, StepPlan, StepResult
from nereid_backend.device_transfer import HostCopy, upload
from nereid_backend.sampling.draft_verification import Sampling, sampling_of
from nereid_backend.sampling.ranked_logprobs import RankedRows, rank_prompt
from nereid_backend.sampling.sampler import NOT_FINITE, PendingTokens, SampledTokens, Sampler
from nereid_backend.sampling.token_masks import MaskFiller, StepMasks, guide_of

logger = logging.getLogger(__name__)


class ForwardPath(Protocol):
    """The interface of a forward path, which owns the KV cache and other state of the model."""

    def forward(self, plan: StepPlan) -> Tensor:
        """Run the forward pass of a plan that has at least one chunk.

        Returns:
            Logits [sum of the chunks' num_logits, vocab_size] in the model's dtype. They are
            ordered by chunk; each chunk contributes the logits of its last num_logits tokens.

        Mutates: the state of the plan's sequences, such as their KV cache blocks.
        """

    def clear(self, request: Request) -> None:
        """Overwrite the state of a sequence that failed.

        Otherwise, a NaN in its blocks would reach the next sequence that gets these blocks.
        """


class AsyncPath(ForwardPath, Protocol):
    """A forward path that supports steps that were planned ahead."""

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Run the forward pass of a plan.

        Args:
            plan: a plan with at least one chunk.
            sampled: [n] int64 on the device, the tokens that the previous step sampled. The
                plan's pending chunks take their input tokens from it.
        """


@dataclass(slots=True)
class RunningStep:
    """The state of a step that was started and is not finished.

    Attributes:
        plan: the plan of the step.
        logits: the result of ForwardPath.forward; None after sampling has been launched.
        sampling: the positions at which the step samples.
        masks: the token masks and the errors of the guides at these positions.
        pending: the sampling that was launched; None if there is none, or not yet.
        reports: the log-probabilities of prompts, in pieces, by the index of their chunk.
    """

    plan: StepPlan
    logits: Tensor | None
    sampling: Sampling
    masks: StepMasks = field(default_factory=StepMasks)
    pending: PendingTokens | None = None
    reports: dict[int, "list[_Report]"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Report:
    ranked: RankedRows
    copy: HostCopy


class Runner:
    """Runs step plans on one model."""

    def __init__(self, path: ForwardPath, *, sampling_kernel: bool = False) -> None:
        """Create a runner.

        Args:
            path: the forward path of the model.
            sampling_kernel: whether the sampler uses its GPU kernel; see `Sampler`.
        """
        self._path = path
        self._sampler = Sampler(has_kernel=sampling_kernel)
        self._masks = MaskFiller()
        # The size is known after the first forward pass. The masks of the first step are therefore
        # filled after its forward pass, not at the same time.
        self._vocab_size: int | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute a plan: run its forward pass and sample its tokens.

        Mutates: the state of the model, and the guides of the sequences that get tokens. The state
        of sequences whose logits are not finite is cleared.
        """
        sampling = sampling_of(plan)
        with self._clearing(plan):
            logits, masks = self._forward(plan, sampling)
            step = RunningStep(plan, logits, sampling, masks)
            self._launch_sampling(step)
        return self.finish(step)

    @torch.inference_mode()
    def start(self, plan: StepPlan, before: RunningStep | None = None) -> RunningStep:
        """Launch the forward pass of a step.

        Args:
            plan: a plan with at least one chunk.
            before: the previous step if the plan was made ahead. Its sampling is launched already.

        Mutates: the state of the model.
        """
        with self._clearing(plan):
            if before is None or before.pending is None:
                logits = self._path.forward(plan)
            else:
                path = cast(AsyncPath, self._path)
                logits = path.forward(plan, before.pending.token_ids)
        return RunningStep(plan, logits, sampling_of(plan))

    @torch.inference_mode()
    def sample(self, step: RunningStep, plan: StepPlan) -> None:
        """Launch the sampling of a step after its forward pass.

        Args:
            step: the step that start() returned. Mutated.
            plan: the settled plan of the step, in which fewer chunks may sample.
        """
        if plan is not step.plan:
            step.plan = plan
            step.sampling = sampling_of(plan)
        assert step.logits is not None
        with self._clearing(plan):
            jobs = self._masks.start(step.sampling.positions, step.logits.shape[1])
            step.masks = self._masks.join(jobs)
            self._launch_sampling(step)

    @torch.inference_mode()
    def finish(self, step: RunningStep) -> StepResult:
        """Wait for the tokens of a step and return its result.

        Mutates: the guides of the sequences that get tokens. The state of sequences whose logits
        are not finite is cleared.
        """
        plan = step.plan
        with self._clearing(plan):
            reports = {
                index: [one for piece in pieces for one in piece.ranked.read(*piece.copy.wait())]
                for index, pieces in step.reports.items()
            }
            if step.pending is None:
                return StepResult(prompt_logprobs=reports)
            sampled_tokens, device_token_ids = step.pending.result()
        sampled = _read_sampled(step.sampling, sampled_tokens, step.masks)
        for chunk, outcome in zip((c for c in plan.chunks if c.samples), sampled, strict=True):
            if outcome.error == NOT_FINITE:
                self._path.clear(chunk.request)
        return StepResult(sampled, reports, device_token_ids)

    def _launch_sampling(self, step: RunningStep) -> None:
        """Launch the sampling of tokens and the ranking of prompt tokens. Mutates: `step`."""
        logits, step.logits = step.logits, None
        assert logits is not None
        step.reports = _prompt_logprobs(logits, step.plan)
        positions, rows, _ = step.sampling
        if not positions:
            return
        if len(rows) < len(logits):
            logits = logits[upload(np.array(rows), logits.device)]
        step.pending = self._sampler.launch(logits, positions, step.masks)

    @contextmanager
    def _clearing(self, plan: StepPlan) -> Iterator[None]:
        """Clear the state of all sequences of a plan if the body raises an exception."""
        try:
            yield
        except BaseException:
            for chunk in plan.chunks:
                self._path.clear(chunk.request)
            raise

    def _forward(self, plan: StepPlan, sampling: Sampling) -> tuple[Tensor, StepMasks]:
        """Return the logits of a plan and its masks, which are filled during the forward pass."""
        if self._vocab_size is None:
            logits = self._path.forward(plan)
            self._vocab_size = logits.shape[1]
            return logits, self._masks.join(self._masks.start(sampling.positions, self._vocab_size))
        jobs = self._masks.start(sampling.positions, self._vocab_size)
        try:
            logits = self._path.forward(plan)
        finally:
            # The threads use the guides until they are joined, even if the forward pass fails.
            masks = self._masks.join(jobs)
        return logits, masks


def _prompt_logprobs(logits: Tensor, plan: StepPlan) -> dict[int, list[_Report]]:
    """Return the reports of the chunks whose requests ask for log-probabilities of the prompt."""
    reports: dict[int, list[_Report]] = {}
    end = 0
    for index, (request, start, num_tokens, _, _, num_logits) in enumerate(plan.chunks):
        begin, end = end, end + num_logits
        num_top = request.params.prompt_logprobs
        if num_top is None:
            continue
        first = start + num_tokens - num_logits + 1
        following = request.token_ids[
            first : min(start + num_tokens + 1, request.num_prompt_tokens)
        ]
        if following:
            pieces = rank_prompt(logits[begin : begin + len(following)], following, num_top)
            reports[index] = [_Report(piece, HostCopy(piece.tensors)) for piece in pieces]
    return reports


def _read_sampled(
    sampling: Sampling, sampled_tokens: SampledTokens, masks: StepMasks
) -> list[Sampled]:
    """Return the new tokens of each chunk that samples."""
    sampled = []
    end = 0
    for count in sampling.counts:
        begin, end = end, end + count
        request = sampling.positions[begin].request
        if begin in masks.errors:
            sampled.append(Sampled([], [], masks.errors[begin]))
            continue
        try:
            drafts = sampling.positions[end - 1].drafts
            sampled.append(_accept(request, drafts, sampled_tokens, begin))
        except Exception as error:
            logger.exception("The grammar of request %s failed.", request.request_id)
            message = f"The grammar of the request failed: {type(error).__name__}: {error}"
            sampled.append(Sampled([], [], message))
    return sampled


def _accept(
    request: Request, drafts: list[int], sampled_tokens: SampledTokens, begin: int
) -> Sampled:
    """Return the sampled and forced tokens of a sequence, verified against its draft tokens.

    Each sampled token is followed by the tokens that the grammar forces after it. As long as these
    tokens equal the draft tokens, the next sampled token is valid too, because the model computed
    it after the same tokens. Draft tokens therefore never change the answer. A token that ends the
    answer is not passed to the guide.

    Example: drafts [5, 7, 9] and sampled tokens [5, 7, 4, 2]. The tokens 5 and 7 are accepted, 4
    replaces the draft 9, and 2 is discarded. The result is [5, 7, 4].

    Args:
        request: the sequence. Its guide is advanced by the new tokens.
        drafts: the draft tokens that went through the model after the known tokens.
        sampled_tokens: one token after the known tokens and one after each draft token.
        begin: the index of the first of these in `sampled_tokens`.
    """
    guide, stops = guide_of(request), request.stop_token_ids
    token_ids: list[int] = []
    logprobs: list[float] = []
    top: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
    while token_ids == drafts[: len(token_ids)]:
        index = begin + len(token_ids)
        if index in sampled_tokens.errors:
            return Sampled([], [], sampled_tokens.errors[index])
        token_ids.append(sampled_tokens.token_ids[index])
        logprobs.append(sampled_tokens.logprobs[index])
        if top is not None:
            top.append(sampled_tokens.top[index])
        if token_ids[-1] in stops:
            break
        if guide is not None:
            guide.accept(token_ids[-1:])
            forced = _forced(request, guide.forced(), len(token_ids))
            token_ids += forced
            logprobs += [0.0] * len(forced)
            if token_ids[-1] in stops:
                break
            if forced:
                guide.accept(forced)
    return Sampled(token_ids, logprobs, None, top)


def _forced(request: Request, forced: list[int], num_new: int) -> list[int]:
    """Return the tokens that the grammar forces and that are added without the model.

    Return no tokens if the request reports log-probabilities, because only the model computes them.
    Return none either if the request limits tokens by other fields, because only the mask of the
    next step combines these limits with the grammar.

    Args:
        request: the sequence.
        forced: the tokens that the grammar forces next.
        num_new: the number of tokens that this step has added already.
    """
    params = request.params
    if (
        params.logprobs is not None
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    ):
        return []
    num_output = request.num_output_tokens + num_new
    for index, token_id in enumerate(forced):
        if token_id in request.stop_token_ids:
            may_stop = num_output + index >= params.min_tokens
            return forced[: index + may_stop]
    return forced
