# SPDX-License-Identifier: Apache-2.0
"""The forward path `packed`: all tokens of a step are joined into one row for one forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from nereid_backend.attention.choose_backend import use_fastest_backends, uses_gpu_kernels
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.transformers_hook import AttentionHook, PagedForward
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.compiled_forward.load_library import CompiledForward
from nereid_backend.paths.cuda_graphs.cuda_capture import CapturePieces
from nereid_backend.paths.cuda_graphs.decode_graphs import DecodeGraphs
from nereid_backend.paths.cuda_graphs.piecewise_graphs import PiecewiseGraphs
from nereid_backend.paths.model_call import ModelCall, Sizes
from nereid_backend.paths.position_embeddings import PositionEmbeddings
from nereid_backend.paths.step_batch import BatchBuilder, StepBatch


class ImageSteps(Protocol):
    """The interface through which PackedPath changes the decoder's inputs in steps with images."""

    def injecting(self, plan: StepPlan, batch: StepBatch) -> AbstractContextManager[None]:
        """Return a context manager that passes image embeddings and positions to the decoder."""
        ...


def has_images(plan: StepPlan) -> bool:
    """Return whether a step computes a sequence whose prompt has images."""
    return any(chunk.sequence.images is not None for chunk in plan.chunks)


class PackedPath:
    """Computes the forward pass of models whose only state is the keys and values of attention.

    The object owns the KV cache and the block tables.

    Attributes:
        graphs: replays decode steps as CUDA graphs; None if every decode step launches its kernels
            one by one.
        pieces: replays steps with prefills, each as several CUDA graphs; None if such steps launch
            their kernels one by one.
        images: replaces the inputs of the decoder in steps with images; None if the model gets no
            images.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        hook: AttentionHook,
        cache: KVCache,
        builder: BatchBuilder,
    ) -> None:
        """Create a forward path that runs the model's own code.

        The path uses no CUDA graphs, and supports no sequences with images, until the caller sets
        the attributes for these parts.

        Args:
            checkpoint: the model. Its attention function is `hook`.
            hook: the attention function that transformers calls in each layer. In each step, it
                calls the `PagedForward` object of the step.
            cache: the KV cache.
            builder: converts the plan of each step into the inputs of the model.
        """
        self._model = checkpoint.model
        # Whether the model can leave out the logits of tokens that are not in `logits_to_keep`.
        self._selects_logits = ModelCall(self._model).takes("logits_to_keep")
        # In some models, the embedding layers derive the token positions from the length of
        # transformers' cache. `PositionEmbeddings` passes the correct positions to these layers.
        self._position_embeddings = PositionEmbeddings(self._model)
        self._adapters = checkpoint.adapters
        self._hook = hook
        self._cache = cache
        self._builder = builder
        # The optional parts of this path. The caller sets these attributes later if the model and
        # the device support them. CUDA graphs are created after this path, because they call the
        # method `run_without_graphs`. The compiled forward pass is set later, because a compilation
        # takes minutes.
        self._compiled: CompiledForward | None = None
        self.graphs: DecodeGraphs | None = None
        self.pieces: PiecewiseGraphs | None = None
        self.images: ImageSteps | None = None

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache of the path."""
        return self._cache

    @property
    def has_kernels(self) -> bool:
        """Whether GPU kernels compute the attention. These kernels take only tensors as inputs."""
        return uses_gpu_kernels(self._cache)

    @property
    def is_native(self) -> bool:
        """Whether attention runs in the CPU kernels."""
        return isinstance(self._cache, CpuKVCache)

    def use_compiled(self, compiled: CompiledForward) -> None:
        """Run all later steps with `compiled`, a compiled forward pass of the same model."""
        self._compiled = compiled

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Compute the logits of a step, [num_logits, vocab_size]; see `ForwardPath.forward`.

        Three kinds of steps are distinguished:
        - Steps with images, and steps with adapters that need forward hooks, run the model's own
          code, because no other code calls the hooks.
        - Steps for which CUDA graphs were captured replay these graphs.
        - All other steps run the compiled forward pass if there is one, or the model's own code.

        Args:
            plan: the plan of the step.
            sampled: [n] int64, the tokens that the previous step samples; None if the plan has no
                pending chunks.

        Mutates: the KV cache.
        """
        self._cache.copy_blocks(plan.copies)
        batch = self._builder.build(plan, self._cache.device, sampled)
        with self._adapters.serving(plan.chunks) as adapters_need_hooks:
            if self.images is not None and has_images(plan):
                with self.images.injecting(plan, batch):
                    return self._run_own_code(batch, self._attention(batch))
            if adapters_need_hooks:
                return self._run_own_code(batch, self._attention(batch))
            logits = self._replay_graphs(batch)
            return self.run_without_graphs(batch) if logits is None else logits

    def _replay_graphs(self, batch: StepBatch) -> Tensor | None:
        """Compute a step by replaying captured CUDA graphs, and return the logits.

        Return None if no graph was captured for steps of this kind and size.
        """
        logits = None
        if self.graphs is not None:
            logits = self.graphs.forward(batch)
        if logits is None and self.pieces is not None:
            logits = self.pieces.forward(batch)
        return logits

    def run_without_graphs(self, batch: StepBatch, attention: PagedForward | None = None) -> Tensor:
        """Compute a step without CUDA graphs. Return the logits, [num_logits, vocab_size].

        The compiled forward pass computes the step, if there is one. Otherwise, the model's own
        code computes the step.

        Args:
            batch: the inputs of the step.
            attention: the attention function of all layers. By default, this function reads and
                writes the KV cache of the path.

        Mutates: the KV cache.
        """
        if attention is None:
            attention = self._attention(batch)
        if self._compiled is not None:
            return self._compiled(batch, attention)
        return self._run_own_code(batch, attention)

    def _attention(self, batch: StepBatch) -> PagedForward:
        """Return a function that computes the attention of a step, using this object's KV cache."""
        return PagedForward(self._cache, batch.attention)

    def _run_own_code(self, batch: StepBatch, attention: PagedForward) -> Tensor:
        """Compute a step with the model's own code. Return the logits, [num_logits, vocab_size].

        `attention` is the function that the model calls as the attention of each layer.
        """
        optional = {"logits_to_keep": batch.logits_index} if self._selects_logits else {}
        # Some embedding layers ignore the argument `position_ids`, and derive the positions from
        # the length of a cache. `_position_embeddings.using` passes the correct positions to these
        # layers.
        with self._hook.serving(attention), self._position_embeddings.using(batch.position_ids):
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                **optional,
            )
        return self._needed_logits(output.logits[0], batch)

    def _needed_logits(self, logits: Tensor, batch: StepBatch) -> Tensor:
        """Return the logits that a step needs, [num_logits, vocab_size].

        `logits` are the logits that the model has returned: those of the tokens in `logits_index`,
        or of all tokens if the model cannot select tokens. If no logits are needed, `logits_index`
        still selects one token.
        """
        if not self._selects_logits:
            logits = logits[batch.logits_index]
        return logits[: batch.num_logits]

    def piecewise_graphs(
        self, capture: CapturePieces, sizes: Sizes, report: Callable[[str], None]
    ) -> PiecewiseGraphs:
        """Return an object that captures steps with prefills as CUDA graphs and replays the graphs.

        The forward pass is captured in pieces: one graph for the work between two attention layers.
        Attention itself is computed between the graphs. The object contains no graph yet.

        Args:
            capture: captures a function call as several graphs; see `GraphCapture.capture_pieces`.
            sizes: the sizes of the KV cache, and the limits of a step.
            report: called with a line of text if steps are not replayed.
        """
        return PiecewiseGraphs(self.run_without_graphs, capture, self._cache, sizes, report)

    def choose_attention(self) -> int:
        """Find the attention libraries that are faster than Nereid's kernels, and use them.

        A library is chosen for each pair of a layer kind and a `Situation`. Return the number of
        pairs for which a library is used.
        """
        return use_fastest_backends(self._cache)

    def empty(self) -> None:
        """Set all keys and values in the KV cache to zero.

        Mutates: the KV cache.
        """
        for tensor in self._cache.tensors():
            tensor.zero_()

    def clear(self, sequence: Sequence) -> None:
        """Set the blocks of a sequence to zero; see `ForwardPath.clear`."""
        self._cache.clear(sequence.all_blocks())
