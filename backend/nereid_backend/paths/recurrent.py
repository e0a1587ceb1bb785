# SPDX-License-Identifier: Apache-2.0
"""The path of models that keep a state for each sequence besides attention's keys and values.

Convolutions and recurrences mix neighbouring tokens of a row, so a row must hold one sequence:
requests that add a single token are rows of one batch, every other chunk is a forward pass of its
own. Attention goes through the hook and the block tables as on the packed path.

    decodes   [a]  keys and values: the blocks      state: the cache of the last step, as it is,
              [b]                                   when the same rows take part again; otherwise
              [c]                                   taken apart by row and put together anew
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from nereid_backend.attention.interface import AttentionHook, PagedForward
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.request import Request
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import (
    ModelCall,
    UnfitError,
    from_the_start,
    ids_of,
    joined,
    positions_of,
)
from nereid_backend.paths.step_batch import BatchBuilder

# By cache layer: its attributes, tensors cut to one sequence.
State = list[dict[str, Any]]


class _PassLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' is untyped
    """Stands for an attention layer in a cache: the blocks hold what it would store."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - transformers' signature
        **kwargs: object,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what masks cover."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before this step, of the longest sequence."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class _StateAndPassLayer(LinearAttentionLayer, _PassLayer):  # type: ignore[no-untyped-call, override]
    """The same for layers that have a state, too."""

    def __init__(self, number_of_states: int) -> None:
        _PassLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def make_cache(config: PretrainedConfig) -> DynamicCache:
    """An empty cache whose attention layers store nothing.

    Raises:
        UnfitError: a layer keeps something that is neither keys and values nor a state by sequence.
    """
    cache: Any = DynamicCache(config=config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        raise UnfitError("its cache has no state besides keys and values")
    cache.layers = [_replaced(layer) for layer in cache.layers]
    return cache  # type: ignore[no-any-return]


def _replaced(layer: Any) -> Any:  # noqa: ANN401 - transformers' layers are untyped
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if issubclass(type(layer), DynamicLayer):
            return _StateAndPassLayer(layer.number_of_states)
        return layer
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _PassLayer()
    if isinstance(layer, DummyLayer):
        return layer
    raise UnfitError(f"its cache has layers of the kind {type(layer).__name__}")


class RowsPath:
    """Runs plans on models with a state for each sequence. Owns the states and the KV cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        hook: AttentionHook,
        layers: list[LayerSpec],
        paged: tuple[KVCache, BatchBuilder] | None,
        *,
        whole: bool,
        replays: bool = False,
    ) -> None:
        """Make a path without requests.

        Args:
            checkpoint: the model.
            hook: serves its attention.
            layers: the attention calls of a forward pass.
            paged: the KV cache and the tables that name its blocks; None: there is no attention.
            whole: chunks that continue a sequence by several tokens are not exact on this model,
                so every chunk but one of a single token starts at the sequence's beginning.
            replays: a sequence that starts again goes the way that it went at first, its prompt in
                one pass and then token by token: the two ways differ on this model.
        """
        self._call = ModelCall(checkpoint.model)
        self._config = checkpoint.model.config
        self._device = checkpoint.device
        self._vocab_size = checkpoint.vocab_size
        self._hook = hook
        self._layers = layers
        self._paged = paged
        self._whole = whole
        self._replays = replays
        self._states: dict[int, State] = {}
        self._lengths: dict[int, int] = {}
        self._resident: tuple[tuple[int, ...], Any] | None = None

    def forward(self, plan: StepPlan) -> Tensor:
        """See `ForwardPath.forward`."""
        parts: list[Tensor | None] = [None] * len(plan.chunks)
        decodes: list[int] = []
        for index, chunk in enumerate(plan.chunks):
            if chunk.is_first:
                self._forget(_row(chunk))
            if chunk.num_tokens == 1 and 0 < chunk.start == self._lengths.get(_row(chunk)):
                decodes.append(index)
        if decodes:
            logits = self._decode([plan.chunks[index] for index in decodes])
            for index, row in zip(decodes, logits, strict=True):
                parts[index] = row[: plan.chunks[index].num_logits]
        for index, chunk in enumerate(plan.chunks):
            if index not in decodes:
                parts[index] = self._prefill(chunk)
        return joined(parts, logits if decodes else None, self._vocab_size)

    def clear(self, request: Request) -> None:
        """See `ForwardPath.clear`."""
        if request.row is not None:
            self._forget(request.row)
        if self._paged is not None:
            self._paged[0].clear(request.block_table)

    def state_bytes(self) -> int:
        """Memory of one sequence's state; at least one sequence has one."""
        self._take_apart()
        state = next(iter(self._states.values()))
        return sum(_num_bytes(value) for layer in state for value in layer.values())

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        """One token of each of several sequences; returns logits [num_chunks, 1, vocab_size]."""
        rows = tuple(_row(chunk) for chunk in chunks)
        if self._resident is None or self._resident[0] != rows:
            self._take_apart()
            cache = self._put_together([self._states.pop(row) for row in rows])
        else:
            cache = self._resident[1]
        # What fails from here on leaves no state behind: the cache may be half changed.
        self._resident = None
        lengths = [self._lengths.pop(row) for row in rows]
        ids = torch.tensor([[c.request.token_ids[c.start]] for c in chunks], device=self._device)
        positions = torch.tensor([[chunk.start] for chunk in chunks], device=self._device)
        logits = self._run(chunks, ids, positions, cache, 1)
        self._resident = (rows, cache)
        self._lengths.update((row, n + 1) for row, n in zip(rows, lengths, strict=True))
        return logits

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        row = _row(chunk)
        known = self._lengths.get(row, 0)
        if self._whole:
            ends = chunk.start + chunk.num_tokens >= len(chunk.request.token_ids)
            if not ends and chunk.num_logits == 0:
                return None
        if known != chunk.start or (self._whole and chunk.num_tokens > 1):
            # Tokens were taken back, or left for this chunk: the state starts anew.
            chunk = from_the_start(chunk)
            prompt_len = chunk.request.num_prompt_tokens
            if self._replays and chunk.num_tokens > prompt_len:
                return self._replay(chunk, prompt_len)
        return self._continue(chunk)

    def _replay(self, chunk: Chunk, prompt_len: int) -> Tensor:
        """A sequence from its start: its prompt, then every token by itself."""
        steps = range(prompt_len, chunk.num_tokens)
        num_logits = max(0, chunk.num_logits - len(steps))
        parts = [self._continue(chunk._replace(num_tokens=prompt_len, num_logits=num_logits))]
        parts += [self._decode([chunk._replace(start=n, num_tokens=1)])[0] for n in steps]
        return torch.cat(parts)[-chunk.num_logits :]

    def _continue(self, chunk: Chunk) -> Tensor:
        """Several tokens of one sequence; returns logits [num_logits, vocab_size]."""
        row = _row(chunk)
        self._take_apart()
        state = self._states.pop(row, None)
        self._lengths.pop(row, None)
        started = state is not None and chunk.start > 0
        cache = self._put_together([state]) if started and state else make_cache(self._config)
        ids, positions = ids_of(chunk, self._device), positions_of(chunk, self._device)
        logits = self._run([chunk], ids, positions, cache, max(1, chunk.num_logits))
        self._resident = ((row,), cache)
        self._lengths[row] = chunk.start + chunk.num_tokens
        return logits[0, : chunk.num_logits]

    def _run(
        self,
        chunks: list[Chunk],
        ids: Tensor,
        positions: Tensor,
        cache: Any,  # noqa: ANN401 - an untyped cache
        num_logits: int,
    ) -> Tensor:
        for layer in cache.layers:
            if isinstance(layer, _PassLayer):
                layer.length = max(chunk.start for chunk in chunks)
        serving: Any = nullcontext()
        if self._paged is not None:
            kv_cache, builder = self._paged
            plan = StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks))
            batch = builder.build(plan, kv_cache.device).attention
            serving = self._hook.serving(RowsForward(PagedForward(self._layers, kv_cache, batch)))
        with serving:
            return self._call(ids, num_logits=num_logits, position_ids=positions, cache=cache)

    def _forget(self, row: int) -> None:
        if self._resident is not None and row in self._resident[0]:
            self._take_apart()
        self._states.pop(row, None)
        self._lengths.pop(row, None)

    def _take_apart(self) -> None:
        """Give each row of the last step its own part of the cache."""
        if self._resident is None:
            return
        rows, cache = self._resident
        self._resident = None
        for number, row in enumerate(rows):
            self._states[row] = [
                {
                    name: _cut(value, number, len(rows))
                    for name, value in ({} if _is_plain(layer) else vars(layer)).items()
                    if name != "length"  # of the step, not of the sequence
                }
                for layer in cache.layers
            ]

    def _put_together(self, states: list[State]) -> Any:  # noqa: ANN401 - an untyped cache
        cache: Any = make_cache(self._config)
        for layer, parts in zip(cache.layers, zip(*states, strict=True), strict=True):
            for name in parts[0]:
                setattr(layer, name, _merge([part[name] for part in parts]))
        return cache


class RowsForward:
    """Hands attention over rows of one token each to the packed attention, as one row of all."""

    def __init__(self, packed: PagedForward) -> None:
        self._packed = packed

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """See `AttentionForward`; here the batch may have several rows of one token."""
        if query.shape[0] == 1:
            return self._packed(module, query, key, value, **kwargs)
        query, key, value = (part.transpose(0, 2) for part in (query, key, value))
        return self._packed(module, query, key, value, **kwargs).transpose(0, 1)


def _row(chunk: Chunk) -> int:
    assert chunk.request.row is not None
    return chunk.request.row


def _is_plain(layer: object) -> bool:
    return isinstance(layer, DummyLayer) or type(layer) is _PassLayer


def _cut(value: Any, number: int, count: int) -> Any:  # noqa: ANN401 - any attribute of a layer
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == count:
        # A copy, so that one sequence's state does not keep the whole batch's memory.
        return value[number : number + 1].clone() if count > 1 else value
    if isinstance(value, dict):
        return {key: _cut(part, number, count) for key, part in value.items()}
    return copy.copy(value)


def _merge(parts: list[Any]) -> Any:  # noqa: ANN401 - the inverse of _cut
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if len(parts) > 1 else first
    if isinstance(first, dict):
        return {key: _merge([part[key] for part in parts]) for key in first}
    if any(part != first for part in parts):
        raise UnfitError(f"its sequences cannot share a batch: {first} beside {parts[-1]}")
    return first


def _num_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value.values())) if isinstance(value, dict) else 0
