# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read the same input, as queries, keys and values do, computed as one.

Which these are is seen by running the model once, not told by their names. The first that is called
computes all; the others hand out their part of it, if they are given the very same tensor, and else
compute for themselves. So a model whose code takes another turn stays right.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nereid_backend.execution.native_linear import NativeLinear, linear

_LANES = 16


class _Group:
    """Layers that are called one after the other with one input; the first computes for all.

    Their packed weights lie one behind the other in a buffer of the first layer's, so that each
    one's own is a part of it.
    """

    def __init__(self, layers: list[NativeLinear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        packed, bias = torch.cat([layer.packed for layer in layers]), _joined_bias(layers)
        panels = [layer.packed.shape[0] for layer in layers]
        for index, (layer, part) in enumerate(
            zip(layers, torch.split(packed, panels), strict=True)
        ):
            layer.packed = part
            layer.__class__ = MergedLinear
            assert isinstance(layer, MergedLinear)
            layer.group, layer.place = self, index
        # Buffers, so that who traces the model sees that they are the checkpoint's.
        layers[0].register_buffer("merged", packed, persistent=False)
        layers[0].register_buffer("merged_bias", bias, persistent=False)

    def compute(self, x: Tensor, merged: Tensor, bias: Tensor | None) -> None:
        """Compute every layer's output; each takes its own, a view of them all, by `take`."""
        size = sum(self._sizes)
        whole: Tensor
        if torch.compiler.is_compiling():
            whole = torch.ops.nereid.linear(x, merged, bias, size)
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


class MergedLinear(NativeLinear):
    """A layer of a group. Inference only, and one forward pass at a time."""

    group: _Group
    place: int
    merged: Tensor
    merged_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """See `NativeLinear`."""
        if self.place == 0:
            self.group.compute(input, self.merged, self.merged_bias)
        found = self.group.take(self.place, input)
        return super().forward(input) if found is None else found


def merge_linears(model: nn.Module, run: Callable[[], object]) -> int:
    """Merge layers that a run of the model gives one input.

    Args:
        model: its layers packed by `prepack_linears`. Mutated.
        run: runs it once.

    Returns:
        How many groups there are.
    """
    calls: list[tuple[str, NativeLinear, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(_noting(calls, name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if type(module) is NativeLinear
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[tuple[str, NativeLinear, Tensor]]] = []
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
        if isinstance(module, MergedLinear):
            if module.place == 0:
                del module.merged, module.merged_bias
            del module.group
            module.__class__ = NativeLinear  # type: ignore[assignment]


def _noting(
    calls: list[tuple[str, NativeLinear, Tensor]], parent: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, NativeLinear)
        if inputs:
            calls.append((parent, module, inputs[0]))

    return note


def _goes_with(
    last: tuple[str, NativeLinear, Tensor], call: tuple[str, NativeLinear, Tensor]
) -> bool:
    """Whether a call can be served by the same product as the one before it."""
    (parent, layer, given), (next_parent, next_layer, next_given) = last, call
    return (
        parent == next_parent
        and given is next_given
        and layer.packed.dtype == next_layer.packed.dtype
        # What follows a layer begins with a whole panel.
        and layer.out_features % _LANES == 0
    )


def _joined_bias(layers: list[NativeLinear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        torch.zeros(layer.out_features, dtype=layer.packed.dtype)
        if layer.bias is None
        else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(parts)
