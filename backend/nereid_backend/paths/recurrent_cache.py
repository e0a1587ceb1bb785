# SPDX-License-Identifier: Apache-2.0
"""Caches for models that have a recurrent state for each sequence.

The cache of a batch contains the states of all rows. The first dimension of its tensors is the
number of rows. Such a cache can be split into the states of the rows, and states can be merged into
a cache for other rows. Keys and values are not in the cache, because they are in blocks.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from nereid_backend.paths.model_call import BlockCacheLayer, UnfitError, num_bytes

# The state of one sequence: a list with one dict for each layer of the cache. The dict maps the
# names of the layer's attributes to their values. Each tensor contains only the part that belongs
# to the sequence.
State = list[dict[str, Any]]


class StateAndBlockLayer(LinearAttentionLayer, BlockCacheLayer):
    """A cache layer for the recurrent state. The keys and values are in the engine's blocks."""

    def __init__(self, number_of_states: int) -> None:
        BlockCacheLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def make_cache(config: PretrainedConfig) -> DynamicCache:
    """Return an empty cache whose layers store recurrent states, but no keys and values.

    Raises:
        UnfitError: if no layer stores a state, or if a layer stores data other than keys, values
            and states.
    """
    cache: Any = DynamicCache(config=config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        raise UnfitError("the model's cache contains only keys and values, but no state")
    cache.layers = [_replace_layer(layer) for layer in cache.layers]
    return cache


def _replace_layer(layer: Any) -> Any:  # noqa: ANN401 - transformers' layers are untyped
    """Return a cache layer that replaces `layer` and stores neither keys nor values.

    Only the keys and values are left out. If `layer` also stores a recurrent state, the result is a
    `StateAndBlockLayer`, which stores the state.

    Raises:
        UnfitError: if the layer stores anything other than keys, values and states.
    """
    stores_state = isinstance(layer, LinearAttentionCacheLayerMixin)
    if stores_state and isinstance(layer, DynamicLayer):  # It also stores keys and values.
        return StateAndBlockLayer(layer.number_of_states)
    if stores_state or isinstance(layer, DummyLayer):  # A DummyLayer stores nothing.
        return layer
    # Subclasses of DynamicLayer and DynamicSlidingWindowLayer are not accepted, because a subclass
    # may store more than keys and values.
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return BlockCacheLayer()
    raise UnfitError(
        f"the model's cache has layers of the class {type(layer).__name__}, which this forward "
        "path does not support"
    )


class _BatchCache(NamedTuple):
    """The merged states of a batch.

    Attributes:
        rows: the rows of the batch (`Sequence.row`), in order.
        cache: the transformers cache with the states of these rows.
    """

    rows: list[int]
    cache: Any


class SequenceStates:
    """The recurrent states of the running sequences.

    The states of the last batch stay merged in one cache, because the next step usually computes
    the same sequences. A sequence is identified by its row in the runner's tables (`Sequence.row`).
    """

    def __init__(self, make_cache: Callable[[], Any]) -> None:
        """Create an object without states. `make_cache` creates an empty cache."""
        self._make_cache = make_cache
        # The state of each sequence, except the sequences in `_last_batch`.
        self._states: dict[int, State] = {}
        self._last_batch: _BatchCache | None = None
        # For each sequence with a state, the number of tokens that the state covers.
        self._num_tokens: dict[int, int] = {}

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens that the state of a sequence covers; 0 without a state."""
        return self._num_tokens.get(row, 0)

    def take(self, rows: list[int]) -> Any:  # noqa: ANN401 - an untyped cache
        """Remove the states of `rows` from this object, and return a cache that contains them.

        If the last batch had the same rows, its cache is returned. Otherwise, the states of the
        last batch are separated, and the states of `rows` are merged in a new cache.

        The caller stores the cache with `put` after the forward pass. If the forward pass fails,
        the caller does not store the cache, because its states may be partly changed.
        """
        for row in rows:
            del self._num_tokens[row]
        if self._last_batch is not None and self._last_batch.rows == rows:
            cache = self._last_batch.cache
            self._last_batch = None
            return cache
        self._split_last_batch()
        cache = self._make_cache()
        merge_states(cache, [self._states.pop(row) for row in rows])
        return cache

    def put(
        self,
        rows: list[int],
        cache: Any,  # noqa: ANN401 - an untyped cache
        num_tokens: list[int],
    ) -> None:
        """Store the states of several sequences that have no stored states yet.

        The caller has removed any older states of these sequences with `take` or `delete`.

        Args:
            rows: the row numbers (`Sequence.row`) of the sequences.
            cache: contains the states of the sequences, in the order of `rows`.
            num_tokens: for each state, the number of tokens that the state covers.
        """
        assert self._num_tokens.keys().isdisjoint(rows), "an older state is still stored"
        # This object stores the merged states of only one batch. The states of the previous batch
        # are split, because they may belong to sequences that still run.
        self._split_last_batch()
        self._last_batch = _BatchCache(rows, cache)
        self._num_tokens.update(zip(rows, num_tokens, strict=True))

    def store(self, row: int, state: State, num_tokens: int) -> None:
        """Store the state of one sequence. The state covers the first `num_tokens` tokens."""
        self._states[row] = state
        self._num_tokens[row] = num_tokens

    def copy(self, row: int) -> State:
        """Return a copy of one sequence's state. Later steps do not change the copy."""
        if self._last_batch is not None and row in self._last_batch.rows:
            rows, cache = self._last_batch
            state = _state_of_row(cache, rows.index(row), len(rows))
            # `_state_of_row` returns the tensors of the cache itself if there is only one row.
            return copy_state(state) if len(rows) == 1 else state
        return copy_state(self._states[row])

    def delete(self, row: int) -> None:
        """Delete the state of a sequence, if it has one."""
        if self._last_batch is not None and row in self._last_batch.rows:
            self._split_last_batch()
        self._states.pop(row, None)
        self._num_tokens.pop(row, None)

    def bytes_per_sequence(self) -> int:
        """Return the size of a state in bytes. At least one sequence must have a state."""
        self._split_last_batch()
        return num_bytes(next(iter(self._states.values())))

    def _split_last_batch(self) -> None:
        """Split the cache of the stored batch into separate states, one for each sequence."""
        if self._last_batch is None:
            return
        rows, cache = self._last_batch
        self._last_batch = None
        for index, row in enumerate(rows):
            self._states[row] = _state_of_row(cache, index, len(rows))


def _state_of_row(cache: Any, row: int, num_rows: int) -> State:  # noqa: ANN401 - an untyped cache
    """Return the state of one sequence from the cache of a batch of `num_rows` sequences."""
    return [_row_state(layer, row, num_rows) for layer in cache.layers]


def copy_state(state: State) -> State:
    """Return a copy of a state, including copies of all tensors in the state."""
    return [_copy_value(layer) for layer in state]


def _copy_value(value: Any) -> Any:  # noqa: ANN401 - any attribute of a layer
    """Return a copy of a value, in which nested tensors are copied, too."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy_value(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_copy_value(part) for part in value]
    return copy.copy(value)


def merge_states(cache: Any, states: list[State]) -> None:  # noqa: ANN401 - an untyped cache
    """Merge the recurrent states of several sequences into the cache of one batch.

    Args:
        cache: an empty cache of transformers. Mutated.
        states: the state of each sequence. A state is a list with one dict for each layer, which
            maps the names of the layer's attributes to their values.
    """
    for layer_index, layer in enumerate(cache.layers):
        layer_states = [state[layer_index] for state in states]  # one dict for each sequence
        for attribute in layer_states[0]:  # such as "recurrent_states"
            values = [layer_state[attribute] for layer_state in layer_states]
            setattr(layer, attribute, _merge_values(values))


def _row_state(layer: object, row: int, num_rows: int) -> dict[str, Any]:
    """Return the attributes of a cache layer for one row of the batch, as a dict."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    # A layer that is also a BlockCacheLayer has attributes that the engine sets before each forward
    # pass. These attributes are not part of the state.
    engine_names: frozenset[str] = getattr(layer, "engine_names", frozenset())
    return {
        name: _cut_row(value, row, num_rows)
        for name, value in vars(layer).items()
        if name not in engine_names
    }


def _cut_row(value: Any, row: int, num_rows: int) -> Any:  # noqa: ANN401 - any attribute of a layer
    """Return the part of `value`, a layer's attribute, that belongs to one sequence.

    Examples: for row 1 of 3 rows, a tensor [3, 8] gives its second row as [1, 8]. The number 5,
    which has no rows, gives 5. A tensor with only one row is returned itself, and not copied.
    """
    if isinstance(value, dict):
        return {key: _cut_row(part, row, num_rows) for key, part in value.items()}
    if not _has_rows(value, num_rows):
        return _copy_value(value)
    if num_rows == 1:
        return value
    # The row is copied, because a view would keep the memory of the whole batch allocated.
    return value[row : row + 1].clone()


def _has_rows(value: object, num_rows: int) -> bool:
    """Return whether a layer's attribute is a tensor with one row for each of `num_rows` sequences.

    Layers do not declare which tensors have rows, so only the first dimension is compared. A tensor
    without rows could have this size by chance. The self-test at load would then find wrong logits.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == num_rows


def _merge_values(parts: list[Any]) -> Any:  # noqa: ANN401 - the inverse of _cut_row
    """Merge the values that several sequences have for one attribute of a cache layer.

    `parts` contains the value of each sequence. Tensors are concatenated, the values of a dict are
    merged key by key, and other values must be equal. Examples: two tensors [1, 8] give a tensor
    [2, 8]; two dicts {0: tensor [1, 8]} give {0: tensor [2, 8]}; True and True give True.

    Raises:
        UnfitError: if values that are not tensors differ.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if len(parts) > 1 else first
    if isinstance(first, dict):
        return {key: _merge_values([part[key] for part in parts]) for key in first}
    for part in parts[1:]:
        if part != first:
            raise UnfitError(
                "sequences of this model cannot share a batch, because an attribute of their "
                f"states differs: {first} and {part}"
            )
    return first
