# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read the same input, as queries, keys and values do, computed as one.

Which these are is seen by running the model once, not told by their names. The first that is called
computes all; the others hand out their part of it, if they are given the very same tensor, and else
compute for themselves. So a model whose code takes another turn stays right.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.linear.native_linear import NativeLinear, linear

_LANES = 16

# The name of what contains it, a layer, and what it was given.
_Call = tuple[str, nn.Linear, Tensor]


class _Group:
    """Layers that are called one after the other with one input; the first computes for all.

    Their weights lie one behind the other in a buffer of the first layer's, so that each one's own
    is a part of it.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        self._is_native = isinstance(layers[0], NativeLinear)
        weights = [_weight_of(layer) for layer in layers]
        merged, bias = torch.cat(weights), _joined_bias(layers)
        parts = torch.split(merged, [len(weight) for weight in weights])
        for index, (layer, part) in enumerate(zip(layers, parts, strict=True)):
            if isinstance(layer, NativeLinear):
                layer.packed = part
            else:
                layer.weight = nn.Parameter(part, requires_grad=False)
            layer.__class__ = MergedNativeLinear if self._is_native else MergedLinear
            assert isinstance(layer, _Merged)
            layer.group, layer.place = self, index
        # Buffers, so that who traces the model sees that they are the checkpoint's.
        layers[0].register_buffer("merged", merged, persistent=False)
        layers[0].register_buffer("merged_bias", bias, persistent=False)

    def compute(self, x: Tensor, merged: Tensor, bias: Tensor | None) -> None:
        """Compute every layer's output; each takes its own, a view of them all, by `take`."""
        size = sum(self._sizes)
        whole: Tensor
        if not self._is_native:
            whole = functional.linear(x, merged, bias)
        elif torch.compiler.is_compiling():
            whole = torch.ops.nereid.packed_linear(x, merged, bias, size)
        else:
            whole = linear(x, merged, bias, size)
        self._input, self._parts = x, list(torch.split(whole, self._sizes, dim=-1))

    def take(self, place: int, x: Tensor) -> Tensor | None:
        """One layer's output for an input; None: that is not what was computed."""
        if self._input is not x:
            return None
        found, self._parts[place] = self._parts[place], None
        if place == len(self._sizes) - 1:
            self._input, self._parts = None, []
        return found


class _Merged(nn.Linear):
    """A layer of a group. Inference only, and one forward pass at a time."""

    group: _Group
    place: int
    merged: Tensor
    merged_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        if self.place == 0:
            self.group.compute(input, self.merged, self.merged_bias)
        found = self.group.take(self.place, input)
        return super().forward(input) if found is None else found


class MergedLinear(_Merged):
    """A layer of a group whose weights are torch's."""


class MergedNativeLinear(_Merged, NativeLinear):
    """A layer of a group whose weights are packed."""


def merge_linears(model: nn.Module, run: Callable[[], object]) -> int:
    """Merge layers that a run of the model gives one input.

    Args:
        model: its layers packed by `prepack_linears`, or as loaded. Mutated.
        run: runs it once.

    Returns:
        How many groups there are.
    """
    calls: list[_Call] = []
    hooks = [
        module.register_forward_pre_hook(_noting(calls, name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if type(module) in (NativeLinear, nn.Linear)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[_Call]] = []
    for call in calls:
        if groups and _goes_with(groups[-1][-1], call):
            groups[-1].append(call)
        else:
            groups.append([call])
    counts: dict[int, int] = {}
    for _, layer, _ in calls:
        counts[id(layer)] = counts.get(id(layer), 0) + 1
    # A layer that is called twice is shared, and may be called otherwise next time.
    merged = [
        [layer for _, layer, _ in group]
        for group in groups
        if len(group) > 1 and all(counts[id(layer)] == 1 for _, layer, _ in group)
    ]
    for layers in merged:
        _Group(layers)
    return len(merged)


def separate_linears(model: nn.Module) -> None:
    """Undo `merge_linears`. Mutates: the model."""
    for module in model.modules():
        if isinstance(module, _Merged):
            if module.place == 0:
                del module.merged, module.merged_bias
            del module.group
            is_native = isinstance(module, NativeLinear)
            module.__class__ = NativeLinear if is_native else nn.Linear  # type: ignore[assignment]


def _noting(calls: list[_Call], parent: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        if inputs:
            calls.append((parent, module, inputs[0]))

    return note


def _goes_with(last: _Call, call: _Call) -> bool:
    """Whether a call can be served by the same product as the one before it."""
    (parent, layer, given), (next_parent, next_layer, next_given) = last, call
    weight, next_weight = _weight_of(layer), _weight_of(next_layer)
    return (
        parent == next_parent
        and given is next_given
        and type(layer) is type(next_layer)
        and weight.dtype == next_weight.dtype
        and weight.device == next_weight.device
        # What follows a packed layer begins with a whole panel.
        and (not isinstance(layer, NativeLinear) or layer.out_features % _LANES == 0)
    )


def _weight_of(layer: nn.Linear) -> Tensor:
    """What holds a layer's numbers, its first dimension that of outputs."""
    return layer.packed if isinstance(layer, NativeLinear) else layer.weight.detach()


def _joined_bias(layers: list[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        _weight_of(layer).new_zeros(layer.out_features)
        if layer.bias is None
        else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(parts)
