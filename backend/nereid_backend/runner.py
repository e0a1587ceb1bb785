# SPDX-License-Identifier: Apache-2.0
"""Runs a step plan: the forward pass on the path that the model takes, then sampling.

In one call, or in three of which the first two only tell a GPU what to do:

    start     the forward pass              of the next step, while this one is computed
    sample    masks, and the choice         once this one is finished: what it brought is known then
    finish    tokens are read and checked
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
from nereid_backend.sampling.sampler import NOT_FINITE, Choices, Choosing, Sampler
from nereid_backend.sampling.token_masks import MaskFiller, StepMasks, guide_of

logger = logging.getLogger(__name__)


class ForwardPath(Protocol):
    """How a plan's tokens go through one kind of model; owns what the model remembers of them."""

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute a plan that has at least one chunk.

        Returns:
            Logits [sum of the chunks' num_logits, vocab_size] in the model's dtype: chunk by chunk,
            each one's after its last num_logits tokens.

        Mutates: what is remembered of the plan's requests.
        """

    def clear(self, request: Request) -> None:
        """Overwrite what is remembered of a request that went wrong.

        A NaN there would reach the next request that gets its blocks.
        """


class AheadPath(ForwardPath, Protocol):
    """A path that takes steps that were planned ahead."""

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Compute a plan.

        Args:
            plan: at least one chunk.
            sampled: [n] int64, on the device, the tokens that the step before gave the chunks that
                sample there. The plan's pending chunks take theirs from it.
        """


@dataclass(slots=True)
class Flight:
    """A step under way.

    Attributes:
        plan: what is computed.
        logits: as ForwardPath.forward returns them, until they are sampled from.
        sampling: where it samples.
        masks: what guides say there.
        choosing: what is chosen there; None where nothing is, or not yet.
        reports: prompts' log-probabilities, in pieces, by the index of their chunk.
    """

    plan: StepPlan
    logits: Tensor | None
    sampling: Sampling
    masks: StepMasks = field(default_factory=StepMasks)
    choosing: Choosing | None = None
    reports: dict[int, "list[_Report]"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Report:
    ranked: RankedRows
    copy: HostCopy


class Runner:
    """Runs plans on one model."""

    def __init__(self, path: ForwardPath, *, sampling_kernel: bool = False) -> None:
        """Run plans on a path; sampling_kernel: see `Sampler`."""
        self._path = path
        self._sampler = Sampler(has_kernel=sampling_kernel)
        self._masks = MaskFiller()
        # Known from the first logits on; masks of the first step are filled after its forward pass.
        self._vocab_size: int | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's tokens and sample where it says so.

        Mutates: what the model remembers, and the guides of the requests that get tokens. What is
        remembered of requests whose logits are not finite is cleared.
        """
        sampling = sampling_of(plan)
        with self._clearing(plan):
            logits, masks = self._forward(plan, sampling)
            flight = Flight(plan, logits, sampling, masks)
            self._choose(flight)
        return self.finish(flight)

    @torch.inference_mode()
    def start(self, plan: StepPlan, before: Flight | None = None) -> Flight:
        """Begin with a step's forward pass.

        Args:
            plan: at least one chunk.
            before: the step that it was planned ahead of; sampled from already.

        Mutates: what the model remembers.
        """
        with self._clearing(plan):
            if before is None or before.choosing is None:
                logits = self._path.forward(plan)
            else:
                path = cast(AheadPath, self._path)
                logits = path.forward(plan, before.choosing.token_ids)
        return Flight(plan, logits, sampling_of(plan))

    @torch.inference_mode()
    def sample(self, flight: Flight, plan: StepPlan) -> None:
        """Begin to choose tokens behind a step's forward pass.

        Args:
            flight: as start() gave it. Mutated.
            plan: its plan, with what is known by now: fewer chunks may sample.
        """
        if plan is not flight.plan:
            flight.plan = plan
            flight.sampling = sampling_of(plan)
        assert flight.logits is not None
        with self._clearing(plan):
            jobs = self._masks.start(flight.sampling.positions, flight.logits.shape[1])
            flight.masks = self._masks.join(jobs)
            self._choose(flight)

    @torch.inference_mode()
    def finish(self, flight: Flight) -> StepResult:
        """Wait for what a step brought.

        Mutates: the guides of the requests that get tokens. What is remembered of requests whose
        logits are not finite is cleared.
        """
        plan = flight.plan
        with self._clearing(plan):
            reports = {
                index: [one for piece in pieces for one in piece.ranked.read(*piece.copy.wait())]
                for index, pieces in flight.reports.items()
            }
            if flight.choosing is None:
                return StepResult(prompt_logprobs=reports)
            choices, drawn = flight.choosing.result()
        sampled = _take(flight.sampling, choices, flight.masks)
        for chunk, outcome in zip((c for c in plan.chunks if c.samples), sampled, strict=True):
            if outcome.error == NOT_FINITE:
                self._path.clear(chunk.request)
        return StepResult(sampled, reports, drawn)

    def _choose(self, flight: Flight) -> None:
        """Begin to choose tokens and to rank prompts' ones. Mutates: the flight."""
        logits, flight.logits = flight.logits, None
        assert logits is not None
        flight.reports = _prompt_logprobs(logits, flight.plan)
        positions, rows, _ = flight.sampling
        if not positions:
            return
        if len(rows) < len(logits):
            logits = logits[upload(np.array(rows), logits.device)]
        flight.choosing = self._sampler.begin(logits, positions, flight.masks)

    @contextmanager
    def _clearing(self, plan: StepPlan) -> Iterator[None]:
        """Clear what is remembered of all requests of a step that fails."""
        try:
            yield
        except BaseException:
            for chunk in plan.chunks:
                self._path.clear(chunk.request)
            raise

    def _forward(self, plan: StepPlan, sampling: Sampling) -> tuple[Tensor, StepMasks]:
        """Logits of a plan, and masks, which are filled meanwhile."""
        if self._vocab_size is None:
            logits = self._path.forward(plan)
            self._vocab_size = logits.shape[1]
            return logits, self._masks.join(self._masks.start(sampling.positions, self._vocab_size))
        jobs = self._masks.start(sampling.positions, self._vocab_size)
        try:
            logits = self._path.forward(plan)
        finally:
            # Guides belong to the threads until these are done, even if the step fails.
            masks = self._masks.join(jobs)
        return logits, masks


def _prompt_logprobs(logits: Tensor, plan: StepPlan) -> dict[int, list[_Report]]:
    """Reports of the chunks whose requests ask for their prompt's log-probabilities."""
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


def _take(sampling: Sampling, choices: Choices, masks: StepMasks) -> list[Sampled]:
    """What each chunk that samples gets."""
    sampled = []
    end = 0
    for count in sampling.counts:
        begin, end = end, end + count
        request = sampling.positions[begin].request
        if begin in masks.errors:
            sampled.append(Sampled([], [], masks.errors[begin]))
            continue
        try:
            sampled.append(_answer(request, sampling.positions[end - 1].guessed, choices, begin))
        except Exception as error:
            logger.exception("the guide of request %s failed", request.request_id)
            message = f"its grammar failed: {type(error).__name__}: {error}"
            sampled.append(Sampled([], [], message))
    return sampled


def _answer(request: Request, guessed: list[int], choices: Choices, begin: int) -> Sampled:
    """What was chosen and what is forced, as far as the guesses were right.

    Each chosen token is followed by what the guide leaves no choice about, as if it had come in a
    step of its own; only where all that equals the guesses, the choice behind them counts. So
    guesses do not change the answer, and its last token is always one that was not guessed, or its
    end. A guide is not told of a token that ends the answer.

    Args:
        request: its guide takes in the tokens.
        guessed: tokens that went through the model behind the known ones.
        choices: one behind the known tokens and one behind each guess, from index begin on.
        begin: see choices.
    """
    guide, stops = guide_of(request), request.stop_token_ids
    token_ids: list[int] = []
    logprobs: list[float] = []
    top: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
    while token_ids == guessed[: len(token_ids)]:
        index = begin + len(token_ids)
        if index in choices.errors:
            return Sampled([], [], choices.errors[index])
        token_ids.append(choices.token_ids[index])
        logprobs.append(choices.logprobs[index])
        if top is not None:
            top.append(choices.top[index])
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
    """Tokens to add without asking the model, of those that a guide leaves no choice about.

    None for a request that reports log-probabilities, which only the model knows, or that limits
    tokens by other means too, which only the next step's mask weighs against the grammar.
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
