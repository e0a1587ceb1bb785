# SPDX-License-Identifier: Apache-2.0
"""Applies LoRA adapters to linear layers on a CPU.

The kernels of native_linear.py and grouped_linear.py also compute the products of the adapters, and
add the products to the outputs (cpu_adapters.cpp). Before a step, the kernels receive the adapter
of each row. The kernels identify a layer by the address of its weights, so adapters also work with
compiled models. Other linear layers, for example the layers that oneDNN computes, have a forward
hook that calls the same code.
"""

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nereid_backend.attention.cpu.cpu_library import (
    NativeAdaptedProduct,
    NativeAdapterMatrices,
    NativeAdapterStep,
    kernels,
)
from nereid_backend.core.adapter import Adapter
from nereid_backend.linear import grouped_linear, native_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.merged_linear import MergedLayer
from nereid_backend.linear.native_linear import LANES, NativeLinear

_DTYPES = (torch.float32, torch.bfloat16)
# The number of rows of an adapter's `down` matrix that the kernels process at once.
_RANKS = 4


class LayerPair(NamedTuple):
    """The matrices of one adapter for one linear layer, with the dtype and device of the model.

    Attributes:
        down: [rank, in_features].
        up: [out_features, rank], already multiplied by the adapter's scale.
    """

    down: Tensor
    up: Tensor


AdapterWeights = Mapping[str, LayerPair]
"""The matrices of one adapter. The keys are the names of linear layers."""


class _StoredAdapter(NamedTuple):
    """An adapter in the layout that the CPU kernels read.

    Attributes:
        structs: one struct for each layer, in the order of the layer numbers. A layer that the
            adapter does not change has an empty struct.
        matrices: the matrices to which the structs point.
    """

    structs: ctypes.Array[NativeAdapterMatrices]
    matrices: list[LayerPair]


class _Step(NativeAdapterStep):
    """The C struct that contains the adapter of each row of a step.

    Attributes:
        arrays: the arrays to which the struct points. The struct keeps them in memory.
    """

    arrays: tuple[object, ...] = ()


class NativeAdapters:
    """Stores LoRA adapters in the layout that the CPU kernels read."""

    def __init__(self, model: nn.Module) -> None:
        """Create an object for the linear layers of a model. The object contains no adapters yet.

        The memory addresses of the model's weights must not change afterwards. If the model is not
        on a CPU, or if this CPU has no kernels, the object contains no layers.
        """
        groups = _layers_by_product(model)  # The layers of a group are computed by one product.
        layers = {name: layer for group in groups for name, layer in group.items()}
        # The number of a layer is its index in the arrays that the kernels read.
        self._layer_numbers = {name: number for number, name in enumerate(layers)}
        self._layer_outputs = (ctypes.c_int64 * len(layers))(*map(_num_outputs, layers.values()))
        self._products = _matrix_products(groups)
        # Contains the layers that the kernels do not compute. The keys of the dictionary are the
        # names of the layers, and the values are the results of `_product_key`. The forward hook of
        # a layer passes this value to the kernels.
        self._hook_keys = _hook_keys(layers)
        self._stored: dict[Adapter, _StoredAdapter] = {}
        # Whether the matrices of the adapters are bfloat16. Otherwise, they are float32.
        self._is_bfloat16 = False
        # Whether a step with adapters is running.
        self._is_serving = False

    def __contains__(self, name: str) -> bool:
        """Return whether this object contains the linear layer with this name."""
        return name in self._layer_numbers

    def needs_hook(self, name: str) -> bool:
        """Return whether the layer `name` needs a forward hook that calls the method `adapt`."""
        return name in self._hook_keys

    def adapt(
        self,
        name: str,
        module: nn.Module,  # noqa: ARG002 - torch passes it to every hook
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        """Add the products of the LoRA adapters to the output of a layer. Mutates: `output`.

        The forward hook of a layer calls this method if the kernels do not compute the layer
        itself. If no step with adapters is running, the output stays unchanged.

        Args:
            name: the name of the layer. `needs_hook` must be True for this layer.
            module: the layer; not used.
            inputs: the arguments of the layer. The first argument is [..., in_features].
            output: [..., out_features].
        """
        if not self._is_serving:
            return
        dtype = output.dtype if output.dtype in _DTYPES else torch.float32
        x = inputs[0].to(dtype).contiguous()
        out = output.to(dtype).contiguous()
        num_inputs = x.shape[-1]
        num_outputs = out.shape[-1]
        num_rows = out.numel() // num_outputs
        # The method `serving` has already passed the adapter of each row to the kernels.
        kernels().nereid_adapt(
            out.dtype == torch.bfloat16,
            self._hook_keys[name],
            x.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            torch.get_num_threads(),
        )
        is_copy = out.data_ptr() != output.data_ptr()  # created by `to` or `contiguous`
        if is_copy:
            output.copy_(out)

    def add(self, adapter: Adapter, weights: AdapterWeights) -> None:
        """Store copies of an adapter's matrices in the layout that the kernels read.

        Args:
            adapter: the adapter.
            weights: the matrices of the adapter, by layer name. `name in self` must be True for
                each name.
        """
        matrices = [_kernel_layout(pair) for pair in weights.values()]
        # One struct for each layer. If the adapter does not change a layer, all fields of the
        # layer's struct are zero.
        structs = (NativeAdapterMatrices * len(self._layer_numbers))()
        for name, pair in zip(weights, matrices, strict=True):
            structs[self._layer_numbers[name]] = NativeAdapterMatrices(
                down=pair.down.data_ptr(), up=pair.up.data_ptr(), rank=len(pair.down)
            )
        # The structs contain only addresses, so the matrices must stay in memory.
        self._stored[adapter] = _StoredAdapter(structs, matrices)
        if matrices:
            # The matrices of all adapters have the data type of the model.
            self._is_bfloat16 = matrices[0].down.dtype == torch.bfloat16

    def remove(self, adapter: Adapter) -> None:
        """Free the matrices of an adapter."""
        del self._stored[adapter]

    @contextmanager
    def serving(
        self, chunk_adapters: Sequence[Adapter | None], chunk_lengths: Sequence[int]
    ) -> Iterator[None]:
        """Return a context manager in which the kernels apply the adapter of each sequence.

        The context applies only to layers that this thread runs.

        Args:
            chunk_adapters: the adapter of each chunk; None for a chunk without an adapter. A chunk
                contains the rows of one sequence.
            chunk_lengths: the number of rows of each chunk.

        Raises:
            RuntimeError: if a layer has computed a number of rows that cannot be divided over the
                chunks. In this case, the outputs of the step are wrong.
        """
        if not self._layer_numbers:
            # The kernels cannot apply adapters to any layer of this model.
            yield
            return
        struct = self._describe_step(chunk_adapters, chunk_lengths)
        kernels().nereid_serve_adapters(ctypes.byref(struct))
        self._is_serving = True
        try:
            yield
        finally:
            self._is_serving = False
            kernels().nereid_serve_adapters(None)
        if struct.unfit_rows:
            raise RuntimeError(
                f"a linear layer has computed {struct.unfit_rows} rows, which cannot be divided "
                f"over the {len(chunk_adapters)} chunks of the step, so the rows of each adapter "
                "are not known"
            )

    def _describe_step(
        self, chunk_adapters: Sequence[Adapter | None], chunk_lengths: Sequence[int]
    ) -> _Step:
        """Build the C struct with which the kernels find the adapter of each row.

        Example: the chunks have the adapters [a, None, b] and the lengths [1, 1, 2]. The struct
        contains the adapter indices [0, -1, 1] for the chunks, and [0, -1, 1, 1] for the rows.

        Args:
            chunk_adapters: the adapter of each chunk; None for a chunk without an adapter. A chunk
                contains the rows of one sequence.
            chunk_lengths: the number of rows of each chunk.
        """
        distinct = [adapter for adapter in dict.fromkeys(chunk_adapters) if adapter is not None]
        chunk_indices = adapter_indices(chunk_adapters, distinct)
        row_indices = chunk_indices.repeat(chunk_lengths)
        addresses = [ctypes.addressof(self._stored[adapter].structs) for adapter in distinct]
        pointers = (ctypes.c_void_p * len(distinct))(*addresses)
        # Most layers compute one row for each token of the step. The kernels then read the adapter
        # of each row from `owners`. The rows of any other layer are divided equally among the
        # chunks, and the kernels read the adapter of each chunk from `chunk_owners`.
        struct = _Step(
            products=ctypes.addressof(self._products),  # which layers each matrix product computes
            num_products=len(self._products),
            layer_outputs=ctypes.addressof(self._layer_outputs),  # the number of outputs of a layer
            adapters=ctypes.addressof(pointers),  # the matrices of each adapter for each layer
            num_adapters=len(distinct),
            is_bfloat16=self._is_bfloat16,
            owners=row_indices.ctypes.data,
            chunk_owners=chunk_indices.ctypes.data,
            num_tokens=len(row_indices),
            num_chunks=len(chunk_indices),
        )
        # The struct contains only addresses, so the arrays must stay in memory.
        struct.arrays = (chunk_indices, row_indices, pointers)
        return struct


def adapter_indices(
    chunk_adapters: Sequence[Adapter | None], adapters: Sequence[Adapter]
) -> NDArray[np.int64]:
    """Return the index in `adapters` of each chunk's adapter; -1 for a chunk without an adapter.

    Example: the chunk adapters [a, None, b] and the adapters [a, b] give [0, -1, 1].
    """
    indices: dict[Adapter | None, int] = {None: -1}
    indices |= {adapter: index for index, adapter in enumerate(adapters)}
    return np.array([indices[adapter] for adapter in chunk_adapters], dtype=np.int64)


def adapter_bytes(pair: LayerPair) -> int:
    """Return the number of bytes that the kernels need for the matrices of one layer."""
    rank, inputs, outputs = _padded_sizes(pair)
    return rank * (inputs + outputs) * pair.down.itemsize


def _kernel_layout(pair: LayerPair) -> LayerPair:
    """Convert the matrices of one layer to the layout that the CPU kernels read.

    Example: `down` has the shape [3, 20] and is padded with zeros to [4, 32]. `up` has the shape
    [20, 3] and becomes [2, 4, 16], which contains two panels of 16 outputs.
    """
    # The kernels support only matrices in bfloat16 and float32.
    dtype = torch.bfloat16 if pair.down.dtype == torch.bfloat16 else torch.float32
    rank, inputs, outputs = _padded_sizes(pair)
    down = pair.down.new_zeros(rank, inputs, dtype=dtype)
    down[: pair.down.shape[0], : pair.down.shape[1]] = pair.down
    up = pair.up.new_zeros(outputs, rank, dtype=dtype)
    up[: pair.up.shape[0], : pair.up.shape[1]] = pair.up
    return LayerPair(down, up.view(-1, LANES, rank).transpose(1, 2).contiguous())


def _padded_sizes(pair: LayerPair) -> tuple[int, int, int]:
    """Return the padded rank, the padded number of inputs and the padded number of outputs."""
    rank, inputs = pair.down.shape
    outputs = len(pair.up)
    return (-(-rank // _RANKS) * _RANKS, -(-inputs // LANES) * LANES, -(-outputs // LANES) * LANES)


def _layers_by_product(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the linear layers of a model, grouped by the matrix product that computes them.

    Merged layers are computed by one product, so they form one group, in the order in which they
    were merged. Every other layer has its own group. A group maps the name of each layer to the
    layer. Example: `[{"q_proj": q, "k_proj": k, "v_proj": v}, {"o_proj": o}]`.

    The list is empty if the kernels cannot be used.
    """
    device = next(model.parameters()).device
    if device.type != "cpu" or not native_linear.is_available():
        return []
    groups: defaultdict[object, dict[str, nn.Module]] = defaultdict(dict)
    for name, layer in model.named_modules():
        is_linear = _num_outputs(layer) > 0
        if not is_linear:
            continue
        # Merged layers have the same object `group`.
        key = layer.group if isinstance(layer, MergedLayer) else layer
        groups[key][name] = layer
    return [dict(sorted(group.items(), key=_merge_position)) for group in groups.values()]


def _hook_keys(layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the key (see `_product_key`) of each linear layer that the kernels do not compute.

    Both `layers` and the result have the names of the layers as keys.
    """
    return {
        name: _product_key(layer)
        for name, layer in layers.items()
        if _weight_address(layer) is None
    }


def _merge_position(item: tuple[str, nn.Module]) -> int:
    """Return the position of a layer in its group of merged layers; 0 for an unmerged layer.

    `item` is a pair: the name of the layer, and the layer.
    """
    _name, layer = item
    return layer.position if isinstance(layer, MergedLayer) else 0


def _matrix_products(groups: list[dict[str, nn.Module]]) -> ctypes.Array[NativeAdaptedProduct]:
    """Describe the matrix products of a model's linear layers in an array of C structs.

    When a kernel computes one of these products, it finds the struct by the product's key (the
    address of its weight; see `_product_key`), and adds the products of the LoRA adapters. Each
    layer has one product. Merged layers also have a common product, because the kernels can compute
    the whole group at once. The array is sorted by key.

    Args:
        groups: the result of `_layers_by_product`. The layers are numbered in this order.
    """
    products: list[NativeAdaptedProduct] = []
    first_number = 0  # the number of the first layer of the group
    for group in groups:
        layers = list(group.values())
        for number, layer in enumerate(layers, first_number):
            products.append(_product_of_layers(_product_key(layer), [layer], number))
        first_layer = layers[0]
        if isinstance(first_layer, MergedLayer):
            products.append(_product_of_layers(first_layer.merged_address, layers, first_number))
        first_number += len(layers)
    # The kernels find a product by a binary search for the value of its field `weight`.
    products.sort(key=lambda product: product.weight)
    return (NativeAdaptedProduct * len(products))(*products)


def _product_of_layers(
    key: int, layers: Sequence[nn.Module], first_layer: int
) -> NativeAdaptedProduct:
    """Return the C struct for the matrix product that computes `layers`.

    Args:
        key: the key under which the kernels find the struct.
        layers: the layers that the product computes, in the order of their numbers.
        first_layer: the number of the first layer.
    """
    num_outputs = sum(map(_num_outputs, layers))
    return NativeAdaptedProduct(key, num_outputs, first_layer=first_layer, num_layers=len(layers))


def _num_outputs(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer; 0 for other modules."""
    # The class Conv1D of transformers is a linear layer, too. Its attribute nf is the number of
    # outputs.
    for name in ("out_features", "nf"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
    return 0


def _product_key(layer: nn.Module) -> int:
    """Return the key under which the kernels find the adapters' matrices for a layer.

    The key is the address of the layer's weight, because the kernel that computes the layer knows
    this address. If the kernels do not compute the layer, its forward hook passes the key to a
    kernel. This key is arbitrary, but it differs from all addresses of weights.
    """
    address = _weight_address(layer)
    return id(layer) if address is None else address


def _weight_address(layer: nn.Module) -> int | None:
    """Return the address of a layer's weight, or None if the kernels do not compute the layer."""
    if isinstance(layer, NativeLinear):
        return layer.packed.data_ptr()
    if isinstance(layer, GroupedLinear) and grouped_linear.is_available():
        return layer.values.data_ptr()
    return None
