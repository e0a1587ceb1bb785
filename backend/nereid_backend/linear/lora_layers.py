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

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nereid_backend.core.adapter import Adapter
from nereid_backend.core.step import Chunk
from nereid_backend.device_transfer import upload
from nereid_backend.linear.joined_adapters import (
    AdapterStep,
    JoinedLayer,
    join_group,
    product,
)
from nereid_backend.linear.native_adapters import (
    AdapterWeights,
    NativeAdapters,
    adapter_bytes,
    adapter_indices,
)

# If torch computes a layer, the matrices of an adapter for this layer are in memory `_COPIES`
# times: once separately, and once as parts of the concatenated matrices.
_COPIES = 2
# Concatenated matrices from an earlier forward pass are used again even if they include adapters
# that are no longer needed. However, their total rank must be at most `_MAX_UNUSED` times the total
# rank of the needed adapters.
_MAX_UNUSED = 2


@dataclass(frozen=True, slots=True)
class _LoadedAdapter:
    """An adapter in memory.

    Attributes:
        weights: the matrices of the layers whose products torch adds. The matrices of the other
            layers are in `LoraLayers._native`.
        total_rank: the sum of the ranks in `weights`. `LoraLayers._join_if_needed` uses this sum to
            limit the size of the concatenated matrices.
        hooked_layers: the names of the layers that need a forward hook.
    """

    weights: AdapterWeights
    total_rank: int
    hooked_layers: list[str]


class LoraLayers:
    """The LoRA adapters in memory, and the forward hooks that apply the adapters."""

    def __init__(self, model: nn.Module) -> None:
        """Create a collection of adapters for `model`. The collection is empty."""
        self._model = model
        self._device = next(model.parameters()).device
        self._loaded: dict[Adapter, _LoadedAdapter] = {}
        self._hooks: dict[str, RemovableHandle] = {}  # the forward hooks, by layer name
        # The adapters whose matrices are concatenated at present, usually those of the last forward
        # pass. `_joined` maps the name of each layer to its concatenated matrices.
        self._joined_adapters: tuple[Adapter, ...] = ()
        self._joined: dict[str, JoinedLayer] = {}
        # Describes the running forward pass. None if no forward pass is running, or if the running
        # forward pass needs no concatenated matrices.
        self._step: AdapterStep | None = None

    @cached_property
    def _native(self) -> NativeAdapters:
        """The object with which the CPU kernels apply the LoRA adapters.

        The object is created when it is first used, not in `__init__`, because it needs the packed
        layers of the model. The layers are packed after `__init__`.
        """
        return NativeAdapters(self._model)

    def __contains__(self, adapter: Adapter) -> bool:
        """Return whether the matrices of an adapter are in memory."""
        return adapter in self._loaded

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
        """Store the matrices of an adapter, and register the forward hooks that apply the adapter.

        The CPU kernels compute the layers in `self._native`. torch computes the other layers.

        Args:
            adapter: the adapter.
            weights: the two matrices for each changed linear layer, by the name of the layer.
        """
        for_kernels = {name: pair for name, pair in weights.items() if name in self._native}
        for_torch = {name: pair for name, pair in weights.items() if name not in self._native}
        self._native.add(adapter, for_kernels)
        # Maps the name of each layer that needs a forward hook to the hook.
        hooks = self._choose_hooks(weights)
        self._loaded[adapter] = _LoadedAdapter(
            weights=for_torch,
            # Only layers that torch computes are counted, because only torch concatenates the
            # matrices of several adapters. The sum of the ranks determines the memory for the
            # concatenated matrices.
            total_rank=sum(len(pair.down) for pair in for_torch.values()),
            hooked_layers=list(hooks),
        )
        # All adapters share the hook of a layer, so some hooks may already be registered.
        for name in hooks.keys() - self._hooks.keys():
            layer = self._model.get_submodule(name)
            self._hooks[name] = layer.register_forward_hook(partial(hooks[name], name))

    def _choose_hooks(self, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        """Return the forward hook of each layer in `names` that needs a hook, by layer name.

        A hook adds the product of the adapter to the output of the layer. A layer that the CPU
        kernels compute needs no hook, because the kernels also add the product.
        """
        hooks: dict[str, Callable[..., None]] = {}
        for name in names:
            if name not in self._native:
                hooks[name] = self._add_product  # torch computes the product
            elif self._native.needs_hook(name):
                hooks[name] = self._native.adapt  # the kernels compute only the product
        return hooks

    def remove(self, adapter: Adapter) -> None:
        """Free the matrices of an adapter. Remove the forward hooks that no other adapter needs."""
        self._native.remove(adapter)
        del self._loaded[adapter]
        self._join(())
        needed = {name for loaded in self._loaded.values() for name in loaded.hooked_layers}
        for name in self._hooks.keys() - needed:
            self._hooks.pop(name).remove()

    def serving(self, chunks: Iterable[Chunk]) -> AbstractContextManager[bool]:
        """Return a context manager in which the forward pass applies the adapter of each request.

        Args:
            chunks: the chunks of one forward pass, in the order of its rows. A chunk contains the
                tokens of one sequence.

        Returns:
            A context manager whose value is True if forward hooks apply an adapter. The forward
            pass must then call the modules of the model. Otherwise, a compiled model may be used.
        """
        chunks = list(chunks)
        chunk_adapters = [chunk.sequence.adapter for chunk in chunks]  # None: no adapter
        if all(adapter is None for adapter in chunk_adapters):
            return nullcontext(False)
        return self._serving_adapters(chunk_adapters, [chunk.num_tokens for chunk in chunks])

    @contextmanager
    def _serving_adapters(
        self, chunk_adapters: list[Adapter | None], chunk_lengths: list[int]
    ) -> Iterator[bool]:
        """In the `with` block, apply the adapter of each chunk. At least one chunk has an adapter.

        There are three kinds of layers:
        - The CPU kernels compute the layer, and add the product of the adapter to its output.
        - The CPU kernels compute only the product. A forward hook adds it to the layer's output.
        - torch computes the product, and a forward hook adds it. On a GPU, these are all layers.

        Args:
            chunk_adapters: the adapter of each chunk; None for a chunk without an adapter.
            chunk_lengths: the number of rows of each chunk.

        Yields:
            Whether the step needs forward hooks. If False, all layers are of the first kind.
        """
        distinct = tuple(
            dict.fromkeys(adapter for adapter in chunk_adapters if adapter is not None)
        )
        loaded = [self._loaded[adapter] for adapter in distinct]
        torch_computes_products = any(adapter.weights for adapter in loaded)
        needs_hooks = any(adapter.hooked_layers for adapter in loaded)
        try:
            if torch_computes_products:
                self._join_if_needed(distinct)
                self._step = self._make_step(chunk_adapters, chunk_lengths)
            with self._native.serving(chunk_adapters, chunk_lengths):
                yield needs_hooks
        finally:
            self._end_step()

    @contextmanager
    def serving_all(self, adapter: Adapter | None) -> Iterator[None]:
        """In the `with` block, apply `adapter` to all rows of every forward pass.

        If `adapter` is None, the forward passes apply no adapter.
        """
        if adapter is None:
            yield
            return
        if self._joined_adapters != (adapter,):
            self._join((adapter,))
        self._step = AdapterStep.for_all_rows(self._device)
        try:
            # The kernels assign all rows of a layer to the chunk if there is only one chunk.
            # Therefore, the length of the chunk may be any number.
            with self._native.serving([adapter], chunk_lengths=[1]):
                yield
        finally:
            self._end_step()

    def _make_step(
        self, chunk_adapters: list[Adapter | None], chunk_lengths: list[int]
    ) -> AdapterStep:
        """Return an `AdapterStep`, which contains the adapter of each input row and each sequence.

        Args:
            chunk_adapters: the adapter of each chunk; None for a chunk without an adapter.
            chunk_lengths: the number of rows of each chunk.
        """
        chunk_indices = adapter_indices(chunk_adapters, self._joined_adapters)
        row_indices = chunk_indices.repeat(chunk_lengths)
        # Almost all layers read only the adapter index of each row. Therefore, only these indices
        # are copied to the device.
        return AdapterStep(upload(row_indices, self._device), chunk_indices)

    def _join_if_needed(self, adapters: tuple[Adapter, ...]) -> None:
        """Concatenate the matrices of `adapters`, if the existing concatenation cannot be used."""
        if set(adapters) <= set(self._joined_adapters):
            needed_rank = sum(self._loaded[adapter].total_rank for adapter in adapters)
            joined_rank = sum(self._loaded[adapter].total_rank for adapter in self._joined_adapters)
            # Unneeded adapters in the concatenated matrices make a step slower, so their number is
            # limited.
            if joined_rank <= _MAX_UNUSED * needed_rank:
                return
        self._join(adapters)

    def _join(self, adapters: tuple[Adapter, ...]) -> None:
        """For each linear layer, concatenate the matrices of several adapters."""
        # Free the old concatenated matrices first. Otherwise, the old and the new matrices would be
        # in memory at the same time.
        self._joined = {}
        self._joined_adapters = adapters
        for names in self._names_by_input(adapters):
            pairs = [
                [self._loaded[adapter].weights.get(name) for adapter in adapters] for name in names
            ]
            self._joined.update(zip(names, join_group(pairs), strict=True))

    def _names_by_input(self, adapters: tuple[Adapter, ...]) -> Iterable[list[str]]:
        """Return the names of the layers that the adapters change, grouped by the layers' input.

        Example: the adapters change q_proj, k_proj and o_proj. q_proj and k_proj are merged layers,
        which have the same input. The result is [["q_proj", "k_proj"], ["o_proj"]].
        """
        names = dict.fromkeys(
            name for adapter in adapters for name in self._loaded[adapter].weights
        )
        names_of_group: dict[object, list[str]] = {}
        for name in names:
            # Merged layers with the same input refer to one shared object in the attribute `group`.
            # Every other layer forms a separate group.
            group = getattr(self._model.get_submodule(name), "group", name)
            names_of_group.setdefault(group, []).append(name)
        return names_of_group.values()

    def _end_step(self) -> None:
        """Delete the data that this object has stored for the last forward pass."""
        self._step = None
        for joined in self._joined.values():
            joined.group.clear()

    def _add_product(
        self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Add the products of the adapters to the output of one layer. Mutates: `output`."""
        del module
        joined = self._joined.get(name)
        if self._step is None or joined is None:
            return
        hidden = joined.group.masked_hidden(inputs[0], self._step)[:, joined.columns]
        up = joined.up
        output.view(-1, up.out_features).add_(product(up, hidden))
