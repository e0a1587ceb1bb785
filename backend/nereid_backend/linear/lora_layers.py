# SPDX-License-Identifier: Apache-2.0
"""Adds the low-rank products of LoRA adapters to the outputs of a model's linear layers.

An adapter has two small matrices for a linear layer with the weight W:

    output = W x + up (down x)        down is [rank, in_features], up is [out_features, rank]

On a CPU, a kernel adds the products of the adapters (native_adapters.py). On other devices, each
layer has a forward hook that adds the products with torch, as follows.

One step can compute requests with different adapters. The matrices of all these adapters are
concatenated along their ranks. A layer then needs only two products for any number of adapters.
Each row belongs to one request. Between the two products, a mask sets the numbers of all adapters
except the adapter of this request to zero:

    rows x          times all down     masked                 times all up
    request with a  [1 2 | 3 4 5]      [1 2 | 0 0 0]          the product of adapter a
    request with b  [1 2 | 3 4 5]      [0 0 | 3 4 5]          the product of adapter b
    other request   [1 2 | 3 4 5]      [0 0 | 0 0 0]          zero

Merged layers have the same input (merged_linear.py), so the first matrices of these layers are also
concatenated. The first layer of a group then computes the masked numbers for all layers of the
group.

The hook does not change the layer itself, so adapters work with all classes of linear layers,
including packed, merged and quantised layers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nereid_backend.core.adapter import Adapter
from nereid_backend.core.step import Chunk
from nereid_backend.device_transfer import upload
from nereid_backend.linear import native_linear
from nereid_backend.linear.native_adapters import (
    AdapterWeights,
    LayerPair,
    NativeAdapters,
    adapter_bytes,
)
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import prepack_linears

# The number of copies of an adapter's matrices in memory, for layers that `NativeAdapters` does not
# contain.
_COPIES = 2
# The matrices that an earlier step has joined can contain more adapters than the present step
# needs. They are reused if their total rank is at most `_MAX_UNUSED` times the total rank of the
# needed adapters.
_MAX_UNUSED = 2


@dataclass(slots=True, eq=False)
class _Group:
    """Linear layers with the same input, and the adapters' first matrices for these layers.

    Attributes:
        down: a layer whose weight contains the first matrices of all linear layers and adapters.
        ranks: one tuple for each linear layer. The tuple contains the rank of each joined adapter.
        input: the last input of the linear layers in this step; None before the first call.
        hidden: the masked output of `down` for `input`, [rows, sum of ranks].
    """

    down: nn.Linear
    ranks: tuple[tuple[int, ...], ...]
    input: Tensor | None = None
    hidden: Tensor | None = None

    def clear(self) -> None:
        """Delete the last input and the last product, so that their memory is freed."""
        self.input = self.hidden = None


@dataclass(frozen=True, slots=True)
class _Joined:
    """The concatenated matrices of several adapters for one linear layer.

    Attributes:
        group: the group of the linear layer.
        columns: the columns of `_Group.hidden` that belong to the linear layer.
        up: a layer whose weight contains the second matrices of all adapters.
    """

    group: _Group
    columns: slice
    up: nn.Linear


def _join_group(pairs: list[list[LayerPair | None]]) -> list[_Joined]:
    """Join the matrices of several adapters for linear layers with the same input.

    The first matrices (`down`) of all linear layers are concatenated to one matrix. The second
    matrices (`up`) are concatenated separately for each linear layer. Example: two adapters with
    the ranks 2 and 3 change q_proj and k_proj. The joined first matrix has 10 rows, and each joined
    second matrix has 5 columns.

    Args:
        pairs: one list for each linear layer. The list contains the matrices of each adapter, or
            None for each adapter that does not change the layer.

    Returns:
        The joined matrices of each linear layer.
    """
    present = [[pair for pair in layer_pairs if pair is not None] for layer_pairs in pairs]
    all_down = torch.cat([pair.down for layer_pairs in present for pair in layer_pairs])
    all_up = [torch.cat([pair.up for pair in layer_pairs], dim=1) for layer_pairs in present]
    layers = nn.ModuleList([_linear(all_down), *map(_linear, all_up)])
    # The adapters' matrices have few rows or few columns. On a CPU, packed layers multiply such
    # matrices several times as fast as torch.
    prepack_linears(layers)
    down, *ups = cast("list[nn.Linear]", list(layers))
    ranks = tuple(
        tuple(0 if pair is None else len(pair.down) for pair in layer_pairs)
        for layer_pairs in pairs
    )
    group = _Group(down, ranks)
    joined = []
    start = 0
    for up in ups:
        joined.append(_Joined(group, slice(start, start + up.in_features), up))
        start += up.in_features
    return joined


class LoraLayers:
    """The LoRA adapters in memory, and the forward hooks that apply the adapters."""

    def __init__(self, model: nn.Module) -> None:
        """Create an object without adapters for a model."""
        self._model = model
        self._device = next(model.parameters()).device
        # For each adapter, the matrices of the layers that `_native` does not contain.
        self._weights: dict[Adapter, AdapterWeights] = {}
        # The rank of each adapter, summed over all layers in `_weights`.
        self._total_ranks: dict[Adapter, int] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        # For each adapter, the layers that need a forward hook.
        self._hooked: dict[Adapter, list[str]] = {}
        # The adapters whose matrices are joined at present, and the joined matrices of each layer.
        self._adapters: tuple[Adapter, ...] = ()
        self._joined: dict[str, _Joined] = {}
        # For each row of the running step, the index of its adapter in `_adapters`. The index is -1
        # for a row without an adapter. None while no step is running, and also if the running step
        # needs no hooks.
        self._owners: Tensor | None = None
        # For each chunk of the running step, the index of its adapter in `_adapters`, or -1.
        self._chunk_owners = np.zeros(1, dtype=np.int64)
        # The masks of the running step. A key contains the arguments of `_mask`.
        self._masks: dict[tuple[tuple[tuple[int, ...], ...], int], Tensor] = {}

    @cached_property
    def _native(self) -> NativeAdapters:
        """The adapters' matrices for those layers that are computed by the CPU kernels.

        The object is created when it is first used, not in `__init__`. The model's layers are
        packed after `__init__`, and the object needs the packed layers.
        """
        return NativeAdapters(self._model)

    def __contains__(self, adapter: Adapter) -> bool:
        """Return whether the matrices of an adapter are in memory."""
        return adapter in self._weights

    def num_bytes(self, weights: AdapterWeights) -> int:
        """Return the memory in bytes that the matrices of an adapter need during a step.

        On a GPU, the matrices are in memory twice, because a step also needs a joined copy of the
        matrices of its adapters.
        """
        return sum(
            adapter_bytes(pair)
            if name in self._native
            else _COPIES * (pair.down.nbytes + pair.up.nbytes)
            for name, pair in weights.items()
        )

    def add(self, adapter: Adapter, weights: AdapterWeights) -> None:
        """Store the matrices of an adapter, and register the forward hooks that the layers need.

        The keys of `weights` are the names of linear layers.
        """
        native = {name: pair for name, pair in weights.items() if name in self._native}
        other = {name: pair for name, pair in weights.items() if name not in native}
        self._native.add(adapter, native)
        self._weights[adapter] = other
        self._total_ranks[adapter] = sum(len(pair.down) for pair in other.values())
        self._hooked[adapter] = [*other, *filter(self._native.needs_hook, native)]
        for name in self._hooked[adapter]:
            if name in self._hooks:
                continue
            add_product = self._add_product if name in other else self._native.adapt
            layer = self._model.get_submodule(name)
            self._hooks[name] = layer.register_forward_hook(partial(add_product, name))

    def remove(self, adapter: Adapter) -> None:
        """Free the matrices of an adapter, and remove the hooks that no other adapter needs."""
        self._native.remove(adapter)
        del self._weights[adapter], self._total_ranks[adapter], self._hooked[adapter]
        self._join(())
        needed = {name for names in self._hooked.values() for name in names}
        for name in self._hooks.keys() - needed:
            self._hooks.pop(name).remove()

    @contextmanager
    def serving(self, chunks: Iterable[Chunk]) -> Iterator[bool]:
        """Return a context in which a forward pass applies the adapter of each chunk's request.

        Args:
            chunks: the chunks of one forward pass, in the order of its rows.

        Yields:
            True if any layer needs a forward hook, so the modules of the model must be called. If
            False, the CPU kernels add all products, and a compiled model may be used.
        """
        chunks = list(chunks)
        owners = [chunk.sequence.adapter for chunk in chunks]
        adapters = tuple(dict.fromkeys(owner for owner in owners if owner is not None))
        if not adapters:
            yield False
            return
        counts = [chunk.num_tokens for chunk in chunks]
        if any(self._weights[adapter] for adapter in adapters):
            self._use(adapters)
            indices = {adapter: index for index, adapter in enumerate(self._adapters)}
            self._chunk_owners = np.array(
                [-1 if adapter is None else indices[adapter] for adapter in owners]
            )
            self._owners = upload(self._chunk_owners.repeat(counts), self._device)
        try:
            with self._native.serving(owners, counts):
                yield any(self._hooked[adapter] for adapter in adapters)
        finally:
            self._end_step()

    @contextmanager
    def serving_all(self, adapter: Adapter | None) -> Iterator[None]:
        """Return a context in which every forward pass applies one adapter to all rows."""
        if adapter is None:
            yield
            return
        if self._adapters != (adapter,):
            self._join((adapter,))
        # All rows use the adapter with the index 0, so one element is broadcast to all rows.
        self._owners = torch.zeros(1, dtype=torch.int64, device=self._device)
        try:
            # The chunk with the index 0 contains all rows.
            with self._native.serving([adapter], [1]):
                yield
        finally:
            self._end_step()

    def _use(self, adapters: tuple[Adapter, ...]) -> None:
        """Join the matrices of `adapters`. Reuse the present joined matrices if possible."""
        if set(adapters) <= set(self._adapters):
            needed = sum(map(self._total_ranks.__getitem__, adapters))
            present = sum(map(self._total_ranks.__getitem__, self._adapters))
            if present <= _MAX_UNUSED * needed:
                return
        self._join(adapters)

    def _join(self, adapters: tuple[Adapter, ...]) -> None:
        """Join the matrices of some adapters, separately for each linear layer."""
        # Free the old joined matrices first, so that the old and the new matrices are not in memory
        # at the same time.
        self._joined = {}
        self._adapters = adapters
        for names in self._names_by_input(adapters):
            pairs = [[self._weights[adapter].get(name) for adapter in adapters] for name in names]
            self._joined.update(zip(names, _join_group(pairs), strict=True))

    def _names_by_input(self, adapters: tuple[Adapter, ...]) -> Iterable[list[str]]:
        """Return the names of the layers that the adapters change.

        The names of layers with the same input are in one list.
        """
        names = dict.fromkeys(name for adapter in adapters for name in self._weights[adapter])
        groups: dict[object, list[str]] = {}
        for name in names:
            group = getattr(self._model.get_submodule(name), "group", None)
            groups.setdefault(name if group is None else id(group), []).append(name)
        return groups.values()

    def _end_step(self) -> None:
        """Delete the data of the step that has just ended."""
        self._owners = None
        self._masks.clear()
        for joined in self._joined.values():
            joined.group.clear()

    def _add_product(
        self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Add the products of the adapters to the output of one layer. Mutates: `output`."""
        del module
        joined = self._joined.get(name)
        if self._owners is None or joined is None:
            return
        hidden = self._hidden(joined.group, inputs[0])[:, joined.columns]
        up = joined.up
        output.view(-1, up.out_features).add_(_product(up, hidden))

    def _hidden(self, group: _Group, layer_input: Tensor) -> Tensor:
        """Return the masked product of a layer's input and the `down` matrices of the adapters."""
        if group.input is layer_input and group.hidden is not None:
            return group.hidden
        down = group.down
        hidden = _product(down, layer_input.reshape(-1, down.in_features).to(down.weight.dtype))
        # Set the masked numbers to 0. A multiplication by 0 would turn NaN and infinity into NaN.
        hidden.masked_fill_(self._mask(group.ranks, len(hidden)), 0)
        group.input, group.hidden = layer_input, hidden
        return hidden

    def _mask(self, ranks: tuple[tuple[int, ...], ...], num_rows: int) -> Tensor:
        """Return a mask of the numbers that must be set to 0.

        A number is masked if its row does not use the adapter to which its column belongs.

        Most layers compute one row for each token of the step. A model that stores compressed keys
        and values has a layer that expands the keys and values of the whole context in every step.
        This layer computes the same number of rows for each chunk.

        Example: the rows have the adapters [0, 1], and `ranks` is ((1, 2),). The mask is
        [[False, True, True], [True, False, False]].

        Args:
            ranks: the ranks of the joined adapters, for each linear layer of a group.
            num_rows: the number of rows that the layer computes.

        Returns:
            Booleans, [num_rows or 1, sum of ranks].
        """
        assert self._owners is not None
        if (ranks, num_rows) not in self._masks:
            rows = self._owners
            if len(rows) not in (1, num_rows):
                per_chunk = num_rows // len(self._chunk_owners)
                rows = upload(self._chunk_owners.repeat(per_chunk), self._device)
            columns = torch.cat(
                [torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in ranks]
            )
            self._masks[ranks, num_rows] = rows[:, None] != columns.to(rows.device)
        return self._masks[ranks, num_rows]


def _product(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Return the output of a layer for `rows`. The layer must have no bias.

    A step calls packed layers hundreds of times. Therefore, the kernel is called directly, without
    the overhead of a module call.
    """
    if isinstance(layer, NativeLinear):
        return native_linear.linear(rows, layer.packed, None, layer.out_features)
    output: Tensor = layer(rows)
    return output


def _linear(matrix: Tensor) -> nn.Linear:
    """Return a linear layer with the weight `matrix`, [out_features, in_features], and no bias."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = matrix.shape
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    return layer
