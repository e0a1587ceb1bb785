# SPDX-License-Identifier: Apache-2.0
"""Runs a step plan: the forward pass on the path that the model takes, then sampling."""

from typing import Protocol

import torch
from torch import Tensor

from nereid_backend.core.request import Request
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.execution.sampler import sample


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


class Runner:
    """Runs plans on one model."""

    def __init__(self, path: ForwardPath) -> None:
        self._path = path

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's tokens and sample where it says so.

        Mutates: what the model remembers. What it remembers of requests that went wrong is cleared.
        """
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        try:
            logits = self._path.forward(plan)
            if not sampling:
                return StepResult()
            sampled = sample(logits, sampling)
        except BaseException:
            for chunk in plan.chunks:
                self._path.clear(chunk.request)
            raise
        for request, outcome in zip(sampling, sampled, strict=True):
            if outcome.error is not None:
                self._path.clear(request)
        return StepResult(sampled)
