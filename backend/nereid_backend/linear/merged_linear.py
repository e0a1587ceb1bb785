# SPDX-License-Identifier: Apache-2.0
"""Merges linear layers with the same input. One matrix product then computes all these layers.

For example, the layers that compute queries, keys and values have the same input.

The model is run once to find the groups. The names of the layers are not used. In a forward pass,
the first layer of a group computes the outputs of all layers of the group:

    x -> q_proj   computes x * [q | k | v], returns the output of q, and stores the other outputs
    x -> k_proj   returns the stored output of k
    x -> v_proj   returns the stored output of v

A later layer returns its stored output only if its input is the same tensor object. Otherwise, the
layer computes its output from its own input. Therefore, the results are correct even if the model
calls the layers in another order or with other inputs.
"""

import abc
import collections
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.native_linear import LANES, NativeLinear, linear
from nereid_backend.linear.prepack import change_class


class _Call(NamedTuple):
    """One call of a linear layer, recorded during a run of the model.

    Attributes:
        parent: the name of the module that contains the layer.
        layer: the layer.
        input: the input of the call.
    """

    parent: str
    layer: nn.Linear
    input: Tensor


class _MergedGroup:
    """Linear layers that the model calls one after the other with the same input.

    In a forward pass, the first layer computes the outputs of all layers and stores them with
    `store_outputs`. Each layer then gets its own output from `take_output`, which deletes this
    output. The stored outputs belong to one input tensor, so a layer that is called with another
    tensor gets no output.
    """

    def __init__(self, sizes: list[int]) -> None:
        """Create a group of layers whose outputs are computed by one matrix product.

        No outputs are stored yet. `sizes` contains the number of outputs of each layer.
        """
        self._sizes = sizes
        # The input from which the stored outputs were computed, and the outputs. After
        # `take_output` has returned the output of a layer, `_outputs` contains None for this layer.
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    @property
    def num_outputs(self) -> int:
        """The number of outputs of all layers."""
        return sum(self._sizes)

    def store_outputs(self, x: Tensor, output: Tensor) -> None:
        """Store the outputs of all layers for `take_output`.

        Args:
            x: [..., in_features], the input of all layers.
            output: [..., num_outputs], the concatenated outputs of the layers.
        """
        self._input = x
        self._outputs = list(torch.split(output, self._sizes, dim=-1))

    def take_output(self, position: int, x: Tensor) -> Tensor | None:
        """Return the output of one layer that `store_outputs` has stored, and delete this output.

        Return None if `x` is not the tensor object for which the outputs were computed, or if the
        output was already returned. The layer must then compute its output itself.

        Args:
            position: the index of the layer in the group.
            x: the input of the layer.
        """
        if self._input is not x:
            return None
        output = self._outputs[position]
        self._outputs[position] = None
        is_last_layer = position == len(self._sizes) - 1
        if is_last_layer:
            # Free the memory of the input, and of outputs that were not needed.
            self._input = None
            self._outputs = []
        return output


class MergedLayer(nn.Linear):
    """A linear layer that is computed together with other layers in one matrix product.

    These layers form a group. Only one forward pass may run at a time.

    The first layer has buffers with the concatenated weights of all layers. The weights of each
    layer are views into these buffers.

    Attributes:
        group: the group of the layer.
        position: the index of the layer in its group.
        merged_bias: the biases of all layers of the group, or None. Only the first layer has this
            attribute.
    """

    # The names of the tensors that contain the weights of a layer. The first index of such a tensor
    # selects an output or a panel of outputs. For each name, the first layer of a group has a
    # buffer "merged_<name>". The buffer contains the tensors of all layers of the group.
    weight_names: ClassVar[tuple[str, ...]] = ("weight",)

    group: _MergedGroup
    position: int
    merged_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output [..., out_features] of the layer for an input [..., in_features]."""
        if self.position == 0:
            self.group.store_outputs(input, self._merged_outputs(input))
        output = self.group.take_output(self.position, input)
        return super().forward(input) if output is None else output

    @property
    def merged_address(self) -> int:
        """The address of the merged weights. Only the first layer of a group has this property."""
        merged: Tensor = getattr(self, f"merged_{self.weight_names[0]}")
        return merged.data_ptr()

    @abc.abstractmethod
    def _merged_outputs(self, x: Tensor) -> Tensor:
        """Compute the outputs of all layers of the group, [..., num_outputs]."""


class MergedLinear(MergedLayer):
    """A merged layer whose weights have torch's layout."""

    merged_weight: Tensor

    def _merged_outputs(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.merged_weight, self.merged_bias)


class MergedNativeLinear(MergedLayer, NativeLinear):
    """A merged layer whose weights have the layout of the CPU kernels."""

    weight_names = ("packed",)
    merged_packed: Tensor

    def _merged_outputs(self, x: Tensor) -> Tensor:
        # torch.export cannot trace `linear`, because `linear` calls a C function.
        is_exporting = torch.compiler.is_compiling()
        compute = torch.ops.nereid.packed_linear if is_exporting else linear
        output: Tensor = compute(x, self.merged_packed, self.merged_bias, self.group.num_outputs)
        return output


class MergedGroupedLinear(MergedLayer, GroupedLinear):
    """A merged layer whose weights are integers of 4, 6 or 8 bits."""

    weight_names = ("values", "scales", "zeros")
    merged_values: Tensor
    merged_scales: Tensor
    merged_zeros: Tensor | None

    def _merged_outputs(self, x: Tensor) -> Tensor:
        return self.compute(
            x,
            self.merged_values,
            self.merged_scales,
            self.merged_zeros,
            self.merged_bias,
            self.group.num_outputs,
        )


_MERGED_CLASSES: dict[type[nn.Linear], type[MergedLayer]] = {
    nn.Linear: MergedLinear,
    NativeLinear: MergedNativeLinear,
    GroupedLinear: MergedGroupedLinear,
}
_ORIGINAL_CLASSES = {merged: original for original, merged in _MERGED_CLASSES.items()}


def merge_linears(model: nn.Module, run: Callable[[], object]) -> int:
    """Merge the linear layers that get the same input in a forward pass of a model.

    Merged layers are computed in one matrix product. Example: q_proj, k_proj and v_proj get the
    same hidden states, so one product computes the outputs of all three layers.

    Args:
        model: the model. Its layers may have been packed by `prepack_linears`. Mutated.
        run: runs the model once, so that the inputs of the layers can be compared.

    Returns:
        The number of groups of merged layers.
    """
    groups = _layers_with_same_input(_record_calls(model, run))
    for layers in groups:
        _merge(layers)
    return len(groups)


def _record_calls(model: nn.Module, run: Callable[[], object]) -> list[_Call]:
    """Run the model by calling `run`. Return the calls of linear layers in chronological order."""
    calls: list[_Call] = []
    # The hooks append to `calls`. `name.rpartition` gives the name of the layer's parent module.
    hooks = [
        module.register_forward_pre_hook(_call_recorder(calls, name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if type(module) in _MERGED_CLASSES
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _merge(layers: list[nn.Linear]) -> None:
    """Merge the weights of layers with the same input, so that one product computes all layers.

    In a forward pass, the first layer computes the outputs of all layers, and stores these outputs
    in the object `group`, which all layers share. Each layer then takes its own output from
    `group`.

    Mutates: the layers. They remain the same objects, but their class changes to a subclass of
        `MergedLayer`.
    """
    merged_class = _MERGED_CLASSES[type(layers[0])]
    merged_bias = _merged_bias(layers)
    group = _MergedGroup([layer.out_features for layer in layers])
    merged_layers = [change_class(layer, merged_class) for layer in layers]
    for position, layer in enumerate(merged_layers):
        layer.group = group
        layer.position = position
    _register_merged_tensors(merged_layers, merged_bias)


def _register_merged_tensors(layers: list[MergedLayer], merged_bias: Tensor | None) -> None:
    """Store the merged weights and the merged bias of a group in its first layer.

    Mutates: the layers. The weight of each layer becomes a view into the merged weights.
    """
    first = layers[0]
    # The tensors are registered as buffers, so that torch.export treats them as part of the model.
    first.register_buffer("merged_bias", merged_bias, persistent=False)
    for name in first.weight_names:
        is_missing = getattr(first, name) is None  # The tensor "zeros" of integers is optional.
        merged = None if is_missing else _join(layers, name)
        first.register_buffer(f"merged_{name}", merged, persistent=False)


@torch.no_grad()
def _join(layers: list[MergedLayer], name: str) -> Tensor:
    """Copy the tensor `name` of each of several layers into one tensor, and return this tensor.

    Mutates: the tensor of each layer becomes a view into the returned tensor.
    """
    sizes = [len(getattr(layer, name)) for layer in layers]
    shape = (sum(sizes), *getattr(layers[0], name).shape[1:])
    merged: Tensor = getattr(layers[0], name).detach().new_empty(shape)
    views = torch.split(merged, sizes)  # The views share the memory of `merged`.
    for layer, view in zip(layers, views, strict=True):
        tensor: Tensor = getattr(layer, name)
        view.copy_(tensor)
        # In torch, an attribute that is a parameter can be replaced only by another parameter.
        # Buffers, such as packed weights, are plain tensors.
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(layer, name, nn.Parameter(view, requires_grad=False) if is_parameter else view)
    return merged


def _layers_with_same_input(calls: list[_Call]) -> list[list[nn.Linear]]:
    """Determine from the calls of one forward pass which groups of layers can be merged.

    Each group has at least two layers, which were called one after the other with the same input.
    If a layer of a group was called twice, the group is omitted, because the layer may get
    different inputs in the two calls of a later run.
    """
    groups: list[list[_Call]] = []
    for call in calls:
        continues_group = bool(groups) and _can_merge(groups[-1][-1], call)
        if continues_group:
            groups[-1].append(call)
        else:
            groups.append([call])
    num_calls = collections.Counter(call.layer for call in calls)
    return [
        [call.layer for call in group]
        for group in groups
        if len(group) > 1 and all(num_calls[call.layer] == 1 for call in group)
    ]


def separate_linears(model: nn.Module) -> None:
    """Undo `merge_linears`. Mutates: the model."""
    for module in model.modules():
        if isinstance(module, MergedLayer):
            if module.position == 0:
                for name in ("bias", *module.weight_names):
                    delattr(module, f"merged_{name}")
            del module.group
            change_class(module, _ORIGINAL_CLASSES[type(module)])


def _call_recorder(
    calls: list[_Call], parent: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a forward pre-hook that appends each call of a layer to `calls`.

    A call with only keyword arguments is not recorded, so its layer is not merged.

    Args:
        calls: the recorded calls. The hook mutates this list.
        parent: the name of the module that contains the layer.
    """

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        if inputs:
            calls.append(_Call(parent, module, inputs[0]))

    return record


def _can_merge(first: _Call, second: _Call) -> bool:
    """Return whether the layers of two consecutive calls can be merged.

    This is the case if the calls have the same input, and if the weight of the second layer can be
    appended to the weight of the first layer. The layers must also belong to the same module, such
    as the attention of one layer, because a model may call only one of two modules in a later pass.
    """
    if first.input is not second.input or first.parent != second.parent:
        return False
    if type(first.layer) is not type(second.layer):
        return False
    # The CPU kernels read a weight in panels of `LANES` outputs. The second weight can be appended
    # only if the first weight ends at the end of a panel.
    is_packed = type(first.layer) is not nn.Linear
    if is_packed and first.layer.out_features % LANES:
        return False
    return _weight_format(first.layer) == _weight_format(second.layer)


def _weight_format(layer: nn.Linear) -> tuple[object, ...]:
    """Return the properties of a weight that must be equal in all layers of a group."""
    if isinstance(layer, GroupedLinear):
        zeros_dtype = None if layer.zeros is None else layer.zeros.dtype
        return (layer.bits, layer.group_size, zeros_dtype, layer.values.device)
    weight = layer.packed if isinstance(layer, NativeLinear) else layer.weight
    return (weight.dtype, weight.device)


def _merged_bias(layers: list[nn.Linear]) -> Tensor | None:
    """Return the biases of all layers as one tensor, or None if no layer has a bias."""
    if all(layer.bias is None for layer in layers):
        return None
    some_bias = next(layer.bias for layer in layers if layer.bias is not None)
    parts = [
        some_bias.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(parts)
