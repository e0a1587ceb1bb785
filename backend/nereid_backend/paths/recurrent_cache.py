# SPDX-License-Identifier: Apache-2.0
"""Caches for models that have a recurrent state for each sequence.

The cache of a batch contains the states of all rows. The first dimension of its tensors is the
number of rows. Such a cache can be split into the states of the rows, and states can be merged into
a cache for other rows. Keys and values are not in the cache, because they are in blocks.
"""

import copy
from typing import Any

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

from nereid_backend.paths.model_call import BlockCacheLayer, UnfitError

# The state of one sequence: a list with one dict for each layer of the cache. The dict maps the
# names of the layer's attributes to their values. Each tensor contains only the part that belongs
# to the sequence.
State = list[dict[str, Any]]


class StateAndBlockLayer(LinearAttentionLayer, BlockCacheLayer):  # type: ignore[no-untyped-call, override]
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
    return cache  # type: ignore[no-any-return]


def _replace_layer(layer: Any) -> Any:  # noqa: ANN401 - transformers' layers are untyped
    """Return a cache layer that replaces `layer` and stores neither keys nor values.

    `layer` stores             returned
    a state, keys and values   StateAndBlockLayer, which stores only the state
    a state                    `layer`
    keys and values            BlockCacheLayer, which stores nothing
    nothing                    `layer`

    Raises:
        UnfitError: if the layer stores anything else.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        has_keys = isinstance(layer, DynamicLayer)
        return StateAndBlockLayer(layer.number_of_states) if has_keys else layer
    if isinstance(layer, DummyLayer):
        return layer
    # Subclasses of DynamicLayer and DynamicSlidingWindowLayer are not accepted, because a subclass
    # may store more than keys and values.
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return BlockCacheLayer()
    raise UnfitError(
        f"the model's cache has layers of the class {type(layer).__name__}, which this forward "
        "path does not support"
    )


def split_states(cache: Any, num_rows: int) -> list[State]:  # noqa: ANN401 - an untyped cache
    """Split the cache of a batch into separate states, one for each sequence.

    Args:
        cache: a cache from `make_cache`.
        num_rows: the number of rows of the batch.
    """
    states = []
    for row in range(num_rows):
        state = [_row_state(layer, row, num_rows) for layer in cache.layers]
        states.append(state)
    return states


def row_state(cache: Any, row: int, num_rows: int) -> State:  # noqa: ANN401 - an untyped cache
    """Return a copy of one sequence's state from the cache of a batch of `num_rows` sequences."""
    state = [_row_state(layer, row, num_rows) for layer in cache.layers]
    # For a batch of one sequence, `_row_state` returns the tensors of the cache itself, so they are
    # copied here.
    return copy_state(state) if num_rows == 1 else state


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
    # Each sequence's state is a list with one item for each layer. `zip` turns the list of states
    # into one tuple for each layer, with one item for each sequence.
    states_by_layer = zip(*states, strict=True)
    for layer, row_states in zip(cache.layers, states_by_layer, strict=True):
        for attribute in row_states[0]:  # such as "recurrent_states"
            row_values = [row_state[attribute] for row_state in row_states]
            setattr(layer, attribute, _merge_values(row_values))


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

    Example: for row 1 of 3 rows, a tensor [3, 8] gives its second row as [1, 8]. A value that is
    not divided into rows is copied. If the batch has only one row, a tensor with rows is returned
    itself, not a copy.
    """
    # If the first dimension of a tensor is `num_rows`, assume that the tensor has one row for each
    # sequence. A tensor without such rows could have this size by chance. The logits would then be
    # wrong, and the self-test, which runs when the model is loaded, would fail.
    has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == num_rows
    if has_rows:
        if num_rows == 1:
            return value
        # The row is copied, because a view would keep the memory of the whole batch allocated.
        return value[row : row + 1].clone()
    if isinstance(value, dict):
        return {key: _cut_row(part, row, num_rows) for key, part in value.items()}
    return _copy_value(value)


def _merge_values(parts: list[Any]) -> Any:  # noqa: ANN401 - the inverse of _cut_row
    """Merge the values that several sequences have for one attribute of a cache layer.

    `parts` contains the value of each sequence. Tensors are concatenated, and other values must be
    equal. Examples: two tensors [1, 8] give a tensor [2, 8], and the values True and True give
    True.

    Raises:
        UnfitError: if values that are not tensors differ.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if len(parts) > 1 else first
    if isinstance(first, dict):
        return {key: _merge_values([part[key] for part in parts]) for key in first}
    for part in parts:
        if part != first:
            raise UnfitError(
                "sequences of this model cannot share a batch, because an attribute of their "
                f"states differs: {first} and {part}"
            )
    return first
