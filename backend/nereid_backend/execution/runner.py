# SPDX-License-Identifier: Apache-2.0
"""Runs a step plan on the model: tensors, one packed forward pass, one sampling."""

import torch
from torch import Tensor

from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.execution.batch import BatchBuilder, StepBatch
from nereid_backend.execution.sampler import sample


class PackedRunner:
    """Sends every step through the model as one row of tokens.

    Owns the KV cache and the tables that name its blocks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        hook: AttentionHook,
        layers: list[LayerSpec],
        cache: KVCache,
        builder: BatchBuilder,
    ) -> None:
        self._model = model
        self._hook = hook
        self._layers = layers
        self._cache = cache
        self._builder = builder
        self._device = cache.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's tokens and sample where it says so.

        Mutates: the KV cache. Blocks of requests that went wrong are cleared, because a NaN in them
        would reach the next request that gets them.
        """
        try:
            batch = self._builder.build(plan, self._device)
            logits = self.forward(batch)
            if not batch.sampling:
                return StepResult()
            sampled = sample(logits, batch.sampling)
        except BaseException:
            for chunk in plan.chunks:
                self._cache.clear(chunk.request.block_table)
            raise
        for request, outcome in zip(batch.sampling, sampled, strict=True):
            if outcome.error is not None:
                self._cache.clear(request.block_table)
        return StepResult(sampled)

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [len(batch.logits_index), vocab_size] of a batch, in the model's dtype."""
        with self._hook.serving(PagedForward(self._layers, self._cache, batch.attention)):
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logits_index,
            )
        logits: Tensor = output.logits
        return logits[0]
