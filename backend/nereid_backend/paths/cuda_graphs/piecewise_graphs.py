# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for steps with prefills. Each graph covers the work between two attention calls.

The attention of a step with prefills depends on the lengths of the sequences, so the attention
cannot be captured. All other operations of a forward pass depend only on the number of tokens.
These operations are captured as one graph for each piece of the forward pass between two attention
calls:

    graph 0: embedding, first half of layer 0, cache write -> attention of layer 0
    graph 1: second half of layer 0, first half of layer 1, cache write -> attention of layer 1
    ...
    last graph: second half of the last layer, norm, output layer -> logits

Graphs are captured for some numbers of tokens when the model is loaded. A step uses the graphs for
the next larger number. The surplus tokens are padding, as in decode_graphs.py. A graph writes the
query into one tensor. Attention reads the query from this tensor, and writes the result into a
second tensor. The next graph reads the second tensor. All layers share these two tensors.

This code has not run on a GPU yet.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention import choose_backend
from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.errors import first_line
from nereid_backend.paths.cuda_graphs.cuda_capture import (
    CapturePieces,
    Cut,
    GraphMemoryError,
    Replay,
)
from nereid_backend.paths.cuda_graphs.decode_graphs import check_replay
from nereid_backend.paths.model_call import Sizes
from nereid_backend.paths.step_batch import StepBatch

logger = logging.getLogger(__name__)

# Graphs are captured for these numbers of tokens. A step with more tokens gains nothing from a
# graph, because the GPU takes longer to run the kernels than the CPU takes to launch them.
TOKEN_COUNTS = (16, 32, *range(64, 513, 64))
_MAX_CAPTURED_TOKENS = TOKEN_COUNTS[-1]

Run = Callable[[StepBatch, PagedForward], Tensor]


class AttentionBuffers(NamedTuple):
    """Two tensors that CUDA graphs and attention share: the query, and the output of attention.

    Attributes:
        query: [num_heads, n, key_dim], where n is the largest number of tokens. The order in memory
            is [n, num_heads, key_dim], because models compute queries in this order.
        out: [n, num_heads, value_dim], the attention.
    """

    query: Tensor
    out: Tensor


class PiecewiseGraphs:
    """Captures and replays CUDA graphs of steps that contain prefills.

    Attributes:
        failure: the reason why no step is replayed; None if steps are replayed.
        num_captures: the number of different step sizes for which graphs were captured.
        num_replays: the number of replayed steps.
    """

    def __init__(
        self,
        run: Run,
        capture: CapturePieces,
        cache: KVCache,
        sizes: Sizes,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Create an object that has no graphs yet. `capture_all` captures the graphs.

        Args:
            run: computes a packed step with a given attention function, and returns its logits,
                [num_logits, vocab_size].
            capture: captures the GPU work of a function call as several CUDA graphs; see
                `GraphCapture.capture_pieces`.
            cache: the KV cache.
            sizes: the sizes of the KV cache, and the limits of a step.
            report: called with a line of text if steps are not replayed.
        """
        self._run = run
        self._capture = capture
        self._cache = cache
        self._sizes = sizes
        self._report = report
        # Maps a number of tokens to the captured CUDA graphs for steps with this number of tokens.
        self._graphs: dict[int, _StepGraphs] = {}
        # The tensor into which all graphs write their logits, [max_num_logits, vocab_size]. The
        # first capture creates the tensor.
        self._logits: Tensor | None = None
        # Maps (num_heads, key_dim, value_dim) to the buffers that all layers of this shape share;
        # see `buffers`.
        self._buffers: dict[tuple[int, int, int], AttentionBuffers] = {}
        # The attention metadata of the step that is replayed; None while graphs are captured.
        self._attention: AttentionBatch | None = None
        # The reason why a capture has failed; None if no capture has failed.
        self.failure: str | None = None
        self.num_captures = 0
        self.num_replays = 0

    @torch.inference_mode()
    def capture_all(self, token_counts: Sequence[int] = TOKEN_COUNTS) -> None:
        """Capture the CUDA graphs for all `token_counts`, from the largest to the smallest.

        In this order, the smaller graphs can use the memory of the larger graphs. If too little
        memory is free, the smaller graphs are left out. After any other error, no graph is used.

        Args:
            token_counts: the numbers of tokens, in ascending order.
        """
        for num_tokens in reversed(token_counts):
            try:
                self._graphs[num_tokens] = self._capture_and_check(num_tokens)
            except GraphMemoryError as error:
                self._report(f"No more CUDA graphs of steps with prefills are captured: {error}.")
                return
            except Exception as error:  # noqa: BLE001 - the model's code can raise any exception
                # After an error that is not caused by a lack of memory, all graphs are deleted. The
                # CPU then launches the kernels of steps with prefills one by one.
                self.failure = first_line(error)
                self._graphs.clear()
                self._report(
                    "Steps with prefills are not replayed as CUDA graphs, because they could not "
                    f"be captured: {self.failure}"
                )
                return
            self.num_captures += 1

    def forward(self, batch: StepBatch) -> Tensor | None:
        """Compute a step by replaying CUDA graphs. Return the logits, [num_logits, vocab_size].

        The graphs for the next larger number of tokens are used, and the surplus tokens are
        padding. The caller owns the returned tensor. Return None if the step cannot be replayed;
        the caller then launches the kernels of the step one by one.

        Mutates: the KV cache, unless the result is None.
        """
        num_tokens = batch.input_ids.shape[1]
        fitting_counts = [count for count in self._graphs if count >= num_tokens]
        if not fitting_counts:
            return None
        graphs = self._graphs[min(fitting_counts)]
        if batch.num_logits > graphs.static.num_logits:
            return None
        graphs.static.fill(batch)
        # Between the graphs, `replay` calls `attend`, which computes the attention in
        # `self._attention`.
        self._attention = batch.attention
        try:
            graphs.replay()
        finally:
            self._attention = None
        self.num_replays += 1
        # The caller gets a copy of the logits. The next replay of a graph overwrites the original,
        # and may run before the caller has read the logits.
        return graphs.logits[: batch.num_logits].clone()

    def _capture_and_check(self, num_tokens: int) -> "_StepGraphs":
        """Capture the CUDA graphs for steps of `num_tokens` tokens, and check the graphs' logits.

        The captured step consists of padding, for which no attention is computed. The graphs must
        compute the same logits as the same step without graphs.

        Raises:
            GraphMemoryError: if too little memory is free.
            Exception: of any class, if the step cannot be captured.
        """
        static = StaticTokens(num_tokens, self._sizes, self._cache.device)
        # This run is not captured. Its logits are the logits that the graphs must compute.
        expected = self._run(static.batch(), self._attention_between_graphs(static, _without_cut))
        graphs = self._capture_step(static, self._logits_like(expected))
        graphs.logits.zero_()  # Only a replay can write the expected logits.
        graphs.replay()
        check_replay(graphs.logits, expected)
        return graphs

    def _logits_like(self, expected: Tensor) -> Tensor:
        """Return the tensor for the logits of a step. It has the shape and type of `expected`.

        All steps share the memory of the tensor. The first step has the most logits.
        """
        if self._logits is None:
            self._logits = torch.empty_like(expected)
        return self._logits[: len(expected)]

    def _capture_step(self, static: "StaticTokens", logits: Tensor) -> "_StepGraphs":
        """Capture the CUDA graphs that compute `logits` from the inputs `static`.

        The forward pass of the model is captured as several graphs. In each attention layer, the
        model calls a function `cut`, which ends one graph and begins the next graph.
        """

        def compute_step(cut: Cut) -> None:
            attention = self._attention_between_graphs(static, cut)
            logits.copy_(self._run(static.batch(), attention))

        replay = self._capture(compute_step)
        return _StepGraphs(static, replay, logits)

    def _attention_between_graphs(
        self, static: "StaticTokens", cut: Cut
    ) -> "_AttentionBetweenGraphs":
        """Return the attention function that the model calls while CUDA graphs are captured."""
        return _AttentionBetweenGraphs(self._cache, static.attention(), self, cut)

    def buffers(self, spec: LayerSpec, computed_query: Tensor) -> AttentionBuffers:
        """Return the tensors through which graphs and attention exchange queries and results.

        All layers with the shapes in `spec` share these tensors. The first call creates them, with
        the data type and the device of `computed_query`.
        """
        shape = (spec.num_heads, spec.key_dim, spec.value_dim)
        if shape not in self._buffers:
            num_tokens = _MAX_CAPTURED_TOKENS
            query = computed_query.new_zeros(num_tokens, spec.num_heads, spec.key_dim)
            out = computed_query.new_zeros(num_tokens, spec.num_heads, spec.value_dim)
            # Attention expects the heads of the query in the first dimension.
            self._buffers[shape] = AttentionBuffers(query.transpose(0, 1), out)
        return self._buffers[shape]

    def attend(
        self,
        layer: int,
        buffers: AttentionBuffers,
        scale: float,
        sinks: Tensor | None,
    ) -> None:
        """Compute the attention of the current step in one layer.

        A replay calls this method after the graph that writes `buffers.query`, and before the graph
        that reads `buffers.out`.

        Args:
            layer: the index of the layer.
            buffers: the query, [num_heads, n, key_dim], and the result of attention,
                [n, num_heads, value_dim]. The step may have fewer than n tokens.
            scale: the factor by which the products of queries and keys are multiplied.
            sinks: the attention sinks of the layer, or None.

        Mutates: `buffers.out`.
        """
        attention = self._attention
        if attention is None:
            return  # During a capture, the step contains only padding.
        num_tokens = attention.slots.numel()
        choose_backend.attend_stored(
            buffers.query[:, :num_tokens],
            layer,
            self._cache,
            attention,
            scale=scale,
            sinks=sinks,
            out=buffers.out[:num_tokens],
        )


class _StepGraphs(NamedTuple):
    """The captured CUDA graphs of a step.

    Attributes:
        static: the tensors from which the graphs read their inputs.
        replay: replays the graphs, and computes the attention between them.
        logits: the tensor into which the last graph writes the logits of the step, [num_logits,
            vocab_size]. The graphs of all step sizes share the memory of this tensor.
    """

    static: "StaticTokens"
    replay: Replay
    logits: Tensor


class StaticTokens:
    """The inputs of a step with prefills, in tensors whose addresses do not change.

    Attributes:
        num_logits: the largest number of tokens whose logits a step can need.
    """

    def __init__(self, num_tokens: int, sizes: Sizes, device: torch.device) -> None:
        """Create the input tensors for a step with prefills. At first, they contain only padding.

        CUDA graphs read their inputs always from the same addresses. The inputs of each step are
        therefore copied into these tensors.

        Args:
            num_tokens: the number of tokens, including padding.
            sizes: the sizes of the KV cache, and the limits of a step.
            device: the device on which the tensors are created.
        """
        # A step needs the logits of at most one token for each sequence.
        self.num_logits = min(num_tokens, sizes.max_num_seqs)
        self._block_size = sizes.block_size
        # The token id, position and cache slot of a padding token, [3, 1]. Nothing is stored for
        # the slot -1.
        self._padding = torch.tensor([[0], [0], [-1]], device=device)
        # The token ids, positions and cache slots of all tokens, [3, num_tokens]. The three tensors
        # are the rows of `_inputs`, so they share its memory.
        self._inputs = self._padding.repeat(1, num_tokens)
        self._token_ids, self._positions, self._slots = self._inputs
        # The indices of the tokens whose logits are needed. Unused items at the end are 0.
        self._logits_index = torch.zeros(self.num_logits, dtype=torch.int64, device=device)

    def fill(self, batch: StepBatch) -> None:
        """Copy a step's inputs into the tensors. Fill the remaining elements with padding."""
        num_tokens = batch.input_ids.shape[1]
        self._inputs[:, num_tokens:] = self._padding
        self._token_ids[:num_tokens].copy_(batch.input_ids[0])
        self._positions[:num_tokens].copy_(batch.position_ids[0])
        self._slots[:num_tokens].copy_(batch.attention.slots)
        num_logits = batch.num_logits
        self._logits_index[:num_logits].copy_(batch.logits_index[:num_logits])
        self._logits_index[num_logits:] = 0

    def batch(self) -> StepBatch:
        """Return the inputs for one run."""
        ids, positions = self._token_ids[None], self._positions[None]
        return StepBatch(ids, positions, self.attention(), self._logits_index, self.num_logits)

    def attention(self) -> AttentionBatch:
        """Return attention metadata that contains the cache slots of all tokens, but no sequences.

        Keys and values are therefore stored, but no attention is computed.
        """
        return AttentionBatch(
            slots=self._slots, num_decodes=0, decodes=[], prefills=[], block_size=self._block_size
        )


class _AttentionBetweenGraphs(PagedForward):
    """An attention function. Each call ends the capture of one CUDA graph and starts the next."""

    def __init__(
        self,
        cache: KVCache,
        batch: AttentionBatch,
        graphs: PiecewiseGraphs,
        cut: Cut,
    ) -> None:
        """Create the attention function that the model calls while the CUDA graphs are captured.

        Each call of the attention function ends one graph and begins the next graph.

        Args:
            cache: the KV cache.
            batch: attention metadata that contains only the cache slots of the step's tokens. The
                graphs store keys and values in these slots. The graphs need no block tables and
                lengths, because the attention is computed between the graphs.
            graphs: the owner of the tensors that graphs and attention share.
            cut: ends the capture of a graph, and begins the capture of the next graph. Example:
                after `cut(compute)`, each replay runs the first graph, calls `compute`, and runs
                the second graph.
        """
        super().__init__(cache, batch)
        self._graphs = graphs
        self._cut = cut

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute one layer's attention. Each call ends one CUDA graph and begins the next graph.

        A later replay of the graphs computes the attention of the layer in three parts:

        1. The graph that ends here stores the keys and values, and copies the query to a buffer.
        2. `attend_between_graphs` computes the attention.
        3. The next graph reads the result from another buffer.

        The arguments and the result are those of `PagedForward.attend`.
        """
        (batch,) = self._batches  # All layers form one group with the same cache slots.
        choose_backend.store_layer(key.squeeze(0), value.squeeze(0), layer, self._cache, batch)
        buffers = self._graphs.buffers(self._cache.layers[layer], query)
        num_tokens = query.shape[2]  # The query is [1, num_heads, num_tokens, key_dim].
        buffers.query[:, :num_tokens].copy_(query.squeeze(0))

        def attend_between_graphs() -> None:
            self._graphs.attend(layer, buffers, scale, sinks)

        # End the capture of the current graph here, and begin the next graph.
        self._cut(attend_between_graphs)
        # Return [1, num_tokens, num_heads, value_dim]. Compiled code may overwrite the result of an
        # operator, so the result is a copy of the shared buffer.
        return buffers.out[:num_tokens].unsqueeze(0).clone()


def _without_cut(between: Callable[[], None]) -> None:
    """Call `between` (the attention of a layer) without splitting a CUDA graph.

    This function replaces `cut` in a run that is not captured, because no graph ends there.
    """
    between()
