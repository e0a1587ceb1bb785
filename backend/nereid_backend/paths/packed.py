# SPDX-License-Identifier: Apache-2.0
"""The packed path: every step goes through the model as one row of tokens."""

from torch import Tensor
from transformers import PreTrainedModel

from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.gpu.gpu_attention import GpuKVCache
from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.request import Request
from nereid_backend.core.step import StepPlan
from nereid_backend.paths.compiled_forward import CompiledForward
from nereid_backend.paths.cuda_graphs import DecodeGraphs
from nereid_backend.paths.model_call import ModelCall
from nereid_backend.paths.step_batch import BatchBuilder, StepBatch


class PackedPath:
    """Runs plans on models whose state is attention's keys and values alone.

    Owns the KV cache and the tables that name its blocks.

    Attributes:
        graphs: what replays steps of decodes; None: every step is launched kernel by kernel.
    """

    def __init__(
        self,
        model: PreTrainedModel,
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
        self._selects = ModelCall(model).takes("logits_to_keep")
        self._compiled: CompiledForward | None = None
        self.graphs: DecodeGraphs | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether attention takes all from tensors, and skips tokens that have no slot."""
        return isinstance(self._cache, GpuKVCache)

    @property
    def is_native(self) -> bool:
        """Whether attention is computed by the kernels for CPUs."""
        return isinstance(self._cache, CpuKVCache)

    def use(self, compiled: CompiledForward) -> None:
        """Let a compiled forward pass of the same model take the steps from now on."""
        self._compiled = compiled

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """See `ForwardPath.forward`, and `AsyncPath.forward` for a step that was planned ahead."""
        self._cache.copy_blocks(plan.copies)
        batch = self._builder.build(plan, self._cache.device, sampled)
        if self.graphs is not None:
            logits = self.graphs.forward(batch)
            if logits is not None:
                return logits
        return self.run(batch)

    def run(self, batch: StepBatch) -> Tensor:
        """Logits of a step, [num_logits, vocab_size], launched kernel by kernel.

        Mutates: the KV cache.
        """
        attention = PagedForward(self._layers, self._cache, batch.attention)
        if self._compiled is not None:
            return self._compiled(batch, attention)
        with self._hook.serving(attention):
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                **({"logits_to_keep": batch.logits_index} if self._selects else {}),
            )
        logits: Tensor = output.logits[0]
        return (logits if self._selects else logits[batch.logits_index])[: batch.num_logits]

    def empty(self) -> None:
        """Forget all that was computed. Mutates: the KV cache."""
        for tensor in self._cache.tensors():
            tensor.zero_()

    def clear(self, request: Request) -> None:
        """See `ForwardPath.clear`."""
        self._cache.clear(request.block_table)
