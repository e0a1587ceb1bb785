# SPDX-License-Identifier: Apache-2.0
"""Runs the plan of a step on the device: the forward pass, followed by sampling.

Three calls execute a step. The first two calls only launch work on the device:

    start     launch the forward pass             the previous step may still be running
    sample    fill the masks, launch sampling     after the previous step is committed
    finish    wait for the tokens and check them
"""

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, Sampled, StepPlan, StepResult
from nereid_backend.cpu_threads import CpuThreads
from nereid_backend.device_transfer import HostCopy, upload
from nereid_backend.sampling.accept_tokens import read_sampled
from nereid_backend.sampling.draft_verification import Sampling, sampling_of
from nereid_backend.sampling.ranked_logprobs import RankedRows, rank_prompt
from nereid_backend.sampling.sampler import NOT_FINITE, PendingTokens, Sampler
from nereid_backend.sampling.token_masks import Job, MaskFiller, StepMasks


class ForwardPath(Protocol):
    """The interface of a forward path, which is one way to run the forward pass of a model.

    A forward path runs the model, and owns the KV cache and the other state of the sequences.
    """

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Run a forward pass for the sequences in `plan`, and return the logits.

        Args:
            plan: the tokens to compute, as one chunk for each of one or several sequences.
            sampled: the tokens that the previous step has sampled, [n] int64 on the device, if the
                host does not know them yet. `plan.pending` lists the chunks that begin with these
                tokens. None if there are no such chunks. Only the path `packed` supports them.

        Returns:
            Logits [sum of the chunks' num_logits, vocab_size] in the model's dtype, in the order of
            the chunks. Each chunk contributes the logits of its last num_logits tokens.

        Mutates: the state of the plan's sequences, such as their KV cache blocks.
        """

    def clear(self, sequence: Sequence) -> None:
        """Reset the stored data of a sequence whose computation failed.

        The blocks of the sequence may contain NaN. Without this call, the NaN would reach the next
        sequence that gets these blocks.
        """


@dataclass(slots=True)
class RunningStep:
    """A forward pass that was started, and whose sampled tokens are not known yet.

    Attributes:
        plan: the plan of the step.
        logits: the result of `ForwardPath.forward`; None after sampling was launched.
        sampling: the positions at which tokens are sampled.
        mask_jobs: the token masks that threads are filling; None if filling has not started.
        masks: the token masks and the errors of guides at these positions. `sample` sets them.
        pending: the sampled tokens; None before sampling is launched, or if the step samples no
            token.
        prompt_logprobs: maps the index of a chunk to the log-probabilities of the chunk's prompt
            tokens. These log-probabilities are divided into slices of rows.
    """

    plan: StepPlan
    logits: Tensor | None
    sampling: Sampling
    mask_jobs: abc.Sequence[Job] | None = None
    masks: StepMasks = field(default_factory=StepMasks)
    pending: PendingTokens | None = None
    prompt_logprobs: dict[int, "list[_LogprobSlice]"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LogprobSlice:
    """The log-probabilities of some prompt tokens, while they are copied to the host."""

    ranked: RankedRows
    copy: HostCopy


class Runner:
    """Runs the forward passes of the model, and samples the next tokens of the sequences."""

    def __init__(
        self,
        path: ForwardPath,
        *,
        num_token_ids: int = 0,
        sampling_kernel: bool = False,
        cpu_threads: CpuThreads | None = None,
    ) -> None:
        """Create a runner, which runs forward passes and samples tokens.

        Args:
            path: the forward path, which runs the model.
            num_token_ids: the number of valid token ids. If the model has fewer logits, the other
                tokens get the logit -inf. Example: Llama 3.2 Vision computes no logit for the
                token of an image.
            sampling_kernel: whether a GPU kernel samples the tokens.
            cpu_threads: adjusts the number of CPU threads before each step; None if the number of
                threads never changes.
        """
        self._path = path
        self._num_token_ids = num_token_ids
        self._cpu_threads = cpu_threads
        self._sampler = Sampler(has_kernel=sampling_kernel)
        self._masks = MaskFiller()
        # The number of columns of the logits; None before the first forward pass.
        self._vocab_size: int | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Run the forward pass that `plan` describes, sample tokens, and wait for the tokens."""
        step = self.start(plan)
        self.sample(step, plan)
        return self.finish(step)

    def pause(self) -> None:
        """Ignore the CPU time of other processes until the next step; see `CpuThreads.pause`."""
        if self._cpu_threads is not None:
            self._cpu_threads.pause()

    @torch.inference_mode()
    def start(self, plan: StepPlan, previous: RunningStep | None = None) -> RunningStep:
        """Launch the forward pass of a step, without waiting for the device.

        A token mask contains the tokens that the grammar of a request allows next. If the tokens of
        the previous step are known, threads fill the masks during the forward pass. Otherwise,
        `sample` fills the masks.

        Args:
            plan: a plan with at least one chunk.
            previous: the previous step, if it has not finished; None otherwise. Its sampling must
                have been launched.

        Mutates: the state of the model.
        """
        if self._cpu_threads is not None:
            self._cpu_threads.adjust()
        sampling = sampling_of(plan)
        if previous is None:
            mask_jobs = self._start_masks(sampling)
            pending = None
        else:
            # The masks depend on the tokens of the previous step, which are not known yet.
            mask_jobs = None
            pending = previous.pending
        computed_logits = self._forward(plan, pending, mask_jobs)
        logits = _with_all_tokens(computed_logits, self._num_token_ids)
        self._vocab_size = logits.shape[1]  # `_start_masks` needs the size in the next step.
        return RunningStep(plan, logits, sampling, mask_jobs)

    def _start_masks(self, sampling: Sampling) -> abc.Sequence[Job] | None:
        """Let threads fill the token masks, and return their jobs.

        Return None if the size of a mask is not known yet. The first forward pass determines it.
        """
        if self._vocab_size is None:
            return None
        return self._masks.start(sampling.positions, self._vocab_size)

    def _forward(
        self, plan: StepPlan, pending: PendingTokens | None, mask_jobs: abc.Sequence[Job] | None
    ) -> Tensor:
        """Launch the forward pass of a step, and return its logits.

        `pending` contains the tokens of the previous step, which are still on the device; None if
        the host knows all tokens.

        If an error occurs, reset the plan's sequences, and wait for the threads that fill masks.
        """
        pending_token_ids = None if pending is None else pending.token_ids
        try:
            with self._clearing_on_error(plan):
                return self._path.forward(plan, pending_token_ids)
        except BaseException:
            self._masks.join(mask_jobs or ())
            raise

    @torch.inference_mode()
    def sample(self, step: RunningStep, plan: StepPlan) -> None:
        """Start to sample tokens from the logits of a forward pass that `start` has launched.

        Call this method only after the tokens of the previous step were added to their sequences,
        because the token masks depend on these tokens.

        Args:
            step: the step that `start` returned. Mutated: the plan and the sampling positions are
                replaced by those of `plan`, and the token masks and the pending tokens are added.
            plan: the current plan of the step. It can differ from the plan that `start` received:
                if the previous step has ended a sequence, no token is sampled for this sequence.
        """
        if plan is not step.plan:  # The previous step has ended sequences.
            step.plan = plan
            step.sampling = sampling_of(plan)
        with self._clearing_on_error(plan):
            jobs = step.mask_jobs
            if jobs is None:
                assert step.logits is not None
                jobs = self._masks.start(step.sampling.positions, step.logits.shape[1])
            step.masks = self._masks.join(jobs)
            self._launch_sampling(step)

    @torch.inference_mode()
    def finish(self, step: RunningStep) -> StepResult:
        """Wait until the tokens of a forward pass have been sampled, and return the result.

        The result contains the new tokens of each sequence, and the log-probabilities of the prompt
        tokens of requests that have asked for them.

        Mutates: the guide of each sequence that gets tokens is advanced. A guide limits the next
            tokens to a grammar. If the logits of a sequence contain NaN or infinity, the sequence's
            stored data, such as its KV cache blocks, is reset.
        """
        plan = step.plan
        with self._clearing_on_error(plan):
            prompt_logprobs = {
                index: _read_logprobs(slices) for index, slices in step.prompt_logprobs.items()
            }
            if step.pending is None:  # The step samples no token.
                return StepResult(prompt_logprobs=prompt_logprobs)
            sampled_tokens, device_token_ids = step.pending.result()
        # This call advances the guides. `step.masks` also contains an error message for each
        # sequence whose grammar has failed.
        sampled = read_sampled(step.sampling, sampled_tokens, step.masks)
        if sampled_tokens.errors:  # A position has no token. NaN in its logits is one reason.
            self._clear_not_finite(plan, sampled)
        return StepResult(
            sampled=sampled, prompt_logprobs=prompt_logprobs, device_token_ids=device_token_ids
        )

    def _clear_not_finite(self, plan: StepPlan, sampled: list[Sampled]) -> None:
        """Reset the stored data of sequences whose logits contain NaN or infinity.

        Args:
            plan: the plan of the step.
            sampled: the new tokens or the error of each chunk for which tokens were sampled.
        """
        sampling_chunks = [chunk for chunk in plan.chunks if chunk.samples]
        for chunk, outcome in zip(sampling_chunks, sampled, strict=True):
            if outcome.error == NOT_FINITE:
                self._path.clear(chunk.sequence)

    def _launch_sampling(self, step: RunningStep) -> None:
        """Start to sample tokens, and to compute the log-probabilities that requests asked for.

        Mutates: `step`. The pending results are stored in `prompt_logprobs` and `pending`. `logits`
            becomes None, so that the memory of the logits is free after sampling.
        """
        logits = step.logits
        assert logits is not None
        step.logits = None
        step.prompt_logprobs = _launch_prompt_logprobs(logits, step.plan)
        sampling = step.sampling
        if not sampling.positions:
            return
        # `sampling.rows` contains the indices of the rows of the logits from which tokens are
        # sampled, in ascending order and without repetition.
        needs_selection = len(sampling.rows) < len(logits)
        if needs_selection:
            logits = logits[upload(np.array(sampling.rows), logits.device)]
        step.pending = self._sampler.launch(logits, sampling.positions, step.masks)

    @contextmanager
    def _clearing_on_error(self, plan: StepPlan) -> Iterator[None]:
        """If the `with` block raises an error, reset the stored data of all sequences in `plan`.

        The stored data, such as KV cache blocks, may contain NaN after an error.
        """
        try:
            yield
        except BaseException:
            for chunk in plan.chunks:
                self._path.clear(chunk.sequence)
            raise


def _with_all_tokens(logits: Tensor, num_token_ids: int) -> Tensor:
    """Extend the logits to at least `num_token_ids` columns. The added columns contain -inf.

    The model computes no logits for some token ids. Prompts and sampling parameters may contain
    these token ids, so the logits need a column for each of these token ids.
    """
    num_missing = num_token_ids - logits.shape[1]
    if num_missing <= 0:  # The usual case. Do not copy the logits.
        return logits
    return torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))


def _launch_prompt_logprobs(logits: Tensor, plan: StepPlan) -> dict[int, list[_LogprobSlice]]:
    """For each request that asks for prompt log-probabilities, start to compute them.

    Args:
        logits: [sum of the chunks' num_logits, vocab_size].
        plan: the plan of the step.

    Returns:
        Maps the index of a chunk to the log-probabilities of its prompt tokens, which are still
        being copied to the host. There is one item for each slice of consecutive tokens, because
        `rank_prompt` divides the tokens into slices to limit the memory. Chunks of other requests
        are left out.
    """
    slices_by_chunk: dict[int, list[_LogprobSlice]] = {}
    next_row = 0  # the index of the first row of `logits` that belongs to the next chunk
    for index, chunk in enumerate(plan.chunks):
        first_row = next_row
        next_row += chunk.num_logits
        # The number of most likely tokens that are reported for each position of the prompt.
        num_top = chunk.sequence.params.prompt_logprobs
        if num_top is None:
            continue
        # The logits of the last prompt token predict an output token, so they are not used here.
        tokens = _predicted_prompt_tokens(chunk)
        if tokens:
            rows = logits[first_row : first_row + len(tokens)]
            ranked_slices = rank_prompt(rows, tokens, num_top)
            slices_by_chunk[index] = [
                _LogprobSlice(ranked, HostCopy(ranked.tensors)) for ranked in ranked_slices
            ]
    return slices_by_chunk


def _predicted_prompt_tokens(chunk: Chunk) -> list[int]:
    """Return the prompt tokens whose log-probabilities follow from the logits of a chunk.

    The logits at one token give the log-probability of the next token. Example: a chunk computes
    the tokens 0 to 3 of a prompt of 10 tokens, and has logits at each of them. The result is the
    tokens 1 to 4.
    """
    sequence = chunk.sequence
    last_predicted = chunk.start + chunk.num_tokens
    first_predicted = last_predicted - chunk.num_logits + 1
    end = min(last_predicted + 1, sequence.num_prompt_tokens)
    return sequence.token_ids[first_predicted:end]


def _read_logprobs(slices: list[_LogprobSlice]) -> list[TokenLogprobs]:
    """Wait until the log-probabilities of one sequence's prompt tokens are on the host.

    Return the log-probabilities.
    """
    logprobs: list[TokenLogprobs] = []
    for part in slices:
        logprobs += part.ranked.read(*part.copy.wait())
    return logprobs
