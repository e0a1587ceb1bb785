# SPDX-License-Identifier: Apache-2.0
"""Stores quantised weights as integers in the layers of a model.

The CPU kernels read weights in panels. A panel is a block of a weight matrix that is contiguous in
memory.

Weights are loaded in two steps, so that only the integers of one layer are unpacked at a time:

    1. transformers creates the model. Each weight of integers is replaced by a placeholder. A
       placeholder has the same shape as the weight, but takes no memory.
    2. For each layer with a placeholder, the integers are read, packed and stored in the layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from nereid_backend.checkpoints import quantised_tensors
from nereid_backend.checkpoints.integer_weight import IntegerWeight
from nereid_backend.errors import ModelError
from nereid_backend.freed_memory import FreedMemory
from nereid_backend.linear.grouped_linear import UNIT, GroupedLinear
from nereid_backend.linear.prepack import change_class
from nereid_backend.linear.quantise_weights import GROUP_SIZES, quantise_weight, round_layer
from nereid_backend.loading_progress import report_items

# The panels store scales and zeros as float16. If float16 changes a scale or a zero by more than
# this share of the largest number in its row, the weight is not stored in panels.
_MAX_HALF_ERROR = 2.0**-10


class LazyWeight(Protocol):
    """A weight of a checkpoint. It is read only when its elements are needed."""

    @property
    def has_integers(self) -> bool:
        """Whether `decode` returns an IntegerWeight."""

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""

    @property
    def integer_bytes(self) -> int:
        """The approximate size of the integers and their scales in memory, in bytes.

        The size is defined only if `has_integers` is true.
        """

    def decode(self) -> Tensor | IntegerWeight:
        """Return the weight."""

    def __getitem__(self, index: object) -> Tensor:
        """Return the dequantised weight."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A weight, and the placeholder that transformers loads in place of the weight.

    Attributes:
        weight: the weight.
        tensor: the placeholder, which takes no memory.
    """

    weight: LazyWeight
    tensor: Tensor

    def __getitem__(self, index: object) -> Tensor:
        """Return the placeholder.

        transformers always passes `...` as `index`, which selects the whole weight.
        """
        return self.tensor


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight that is rounded to integers when it is read.

    Attributes:
        weight: the weight.
        bits: the number of bits of an integer, 4 or 8.
    """

    weight: LazyWeight
    bits: int
    has_integers: ClassVar[bool] = True

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""
        return self.weight.num_elements

    @property
    def integer_bytes(self) -> int:
        """The approximate size of the integers and their scales in memory, in bytes."""
        # Each group has a scale of 2 bytes. With 4 bits, each group also has a zero of 2 bytes.
        group_bytes = GROUP_SIZES[self.bits] * self.bits // 8 + (2 if self.bits == 8 else 4)
        return self.num_elements // GROUP_SIZES[self.bits] * group_bytes

    def decode(self) -> IntegerWeight:
        """Return the rounded weight."""
        values, scales, zeros = quantise_weight(self.weight[...], self.bits)
        return IntegerWeight(values, scales, zeros, GROUP_SIZES[self.bits], self.bits)

    def fill(self, layer: nn.Linear) -> None:
        """Store the rounded weight in a layer. Mutates: the layer.

        If the checkpoint is not quantised, a few rows are read and rounded at a time. Otherwise,
        the whole weight is dequantised before it is rounded.

        Raises:
            ModelError: if the weight cannot be read, or if its shape does not fit the layer.
        """
        if isinstance(self.weight, quantised_tensors.LazyWeight) and self.weight.is_matrix:
            stored = self.weight.stored
            _check_shape(stored.shape, layer)
            round_layer(layer, stored.read_rows, self.bits)
            return
        weight = self.weight[...]
        _check_shape(weight.shape, layer)
        round_layer(layer, lambda start, end: weight[start:end], self.bits)

    def __getitem__(self, index: object) -> Tensor:
        """Return the unrounded weight.

        transformers always passes `...` as `index`, which selects the whole weight.
        """
        return self.weight[index]


def round_weights(
    weights: Mapping[str, LazyWeight], model: nn.Module, bits: int
) -> dict[str, LazyWeight]:
    """Replace the weights of linear layers by weights that are rounded when they are read.

    The weight of the output layer is not replaced, because it may need more bits; see
    `quantise_linears`.

    Args:
        weights: the weights of a checkpoint by name.
        model: the model on the device `meta`, which has no memory for the weights.
        bits: the number of bits of an integer, 4 or 8.
    """
    layers = linear_names(model)
    return {
        name: RoundedWeight(weight, bits) if name in layers else weight
        for name, weight in weights.items()
    }


def linear_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers. The output layer is not included."""
    output_layer = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not output_layer
    }


def use_placeholders(
    weights: Mapping[str, LazyWeight], model: nn.Module, dtype: torch.dtype
) -> dict[str, LazyWeight | Placeholder]:
    """Replace the integer weights of linear layers by placeholders.

    Args:
        weights: the weights of a checkpoint by name.
        model: the model on the device `meta`, which has no memory for the weights.
        dtype: the data type of the model.
    """
    layers = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
    shared = _names_of_shared(model)
    replaced: dict[str, LazyWeight | Placeholder] = {}
    for name, weight in weights.items():
        layer = layers.get(name)
        # If several modules share a weight, the weight is not replaced, because some of these
        # modules need floating point numbers. Example: tied embeddings.
        if layer is None or name in shared or not weight.has_integers:
            replaced[name] = weight
            continue
        # `expand` repeats a single number without memory for the copies. The number is NaN, so that
        # the self-check fails if a placeholder was never replaced.
        tensor = torch.full((1, 1), float("nan"), dtype=dtype).expand(layer.weight.shape)
        replaced[name] = Placeholder(weight, tensor)
    return replaced


@torch.inference_mode()
def fill_placeholders(
    model: nn.Module, weights: Iterable[object], progress: Callable[[str], None]
) -> int:
    """Replace each placeholder in a model by the integers of its weight.

    Args:
        model: the model. Mutated. Afterwards, the model cannot be trained, saved or moved to
            another device.
        weights: the weights from which the model was loaded.
        progress: called with one line of text every few seconds.

    Returns:
        The number of layers whose integers are stored in panels.

    Raises:
        ModelError: if a weight cannot be read, or if a placeholder is not the weight of a layer.
    """
    waiting = {
        weight.tensor.data_ptr(): weight for weight in weights if isinstance(weight, Placeholder)
    }
    freed = FreedMemory()
    count = 0
    for module in report_items(list(model.modules()), "filling modules", progress):
        if type(module) is not nn.Linear:
            continue
        placeholder = waiting.pop(module.weight.data_ptr(), None)
        if placeholder is not None:
            weight = placeholder.weight
            if isinstance(weight, RoundedWeight):
                weight.fill(module)
                count += 1
            else:
                count += _fill(module, weight.decode())
            freed.add(placeholder.weight.num_elements)
    if waiting:
        raise ModelError(
            f"{len(waiting)} quantised weights do not belong to linear layers. Set prepack=false."
        )
    return count


def _names_of_shared(model: nn.Module) -> set[str]:
    """Return the names of the parameters that several modules share. Example: tied embeddings."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    has_ties = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    return {*tied, *(tied.values() if isinstance(tied, dict) else ())} if has_ties else set()


def _fill(layer: nn.Linear, weight: Tensor | IntegerWeight) -> bool:
    """Store a weight in a layer. Return whether panels are used. Mutates: the layer."""
    dtype = layer.weight.dtype
    _check_shape(weight.values.shape if isinstance(weight, IntegerWeight) else weight.shape, layer)
    if isinstance(weight, Tensor) or not _fits_panels(weight):
        numbers = weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantise(dtype)
        layer.weight = nn.Parameter(numbers, requires_grad=False)
        return False
    grouped = change_class(layer, GroupedLinear)
    bits = 4 if weight.bits <= 4 else 8
    grouped.set_quantised(weight.values, weight.scales, weight.zeros, weight.group_size, bits=bits)
    return True


def _check_shape(shape: Sequence[int], layer: nn.Linear) -> None:
    """Raise a ModelError if a weight of the given shape does not fit its layer."""
    if tuple(shape) != tuple(layer.weight.shape):
        raise ModelError(
            f"a quantised weight has the shape {tuple(shape)}, but its layer needs the shape "
            f"{tuple(layer.weight.shape)}. Download the checkpoint again."
        )


def _fits_panels(weight: IntegerWeight) -> bool:
    """Return whether panels can store a weight without an additional rounding error."""
    in_features = weight.values.shape[1]
    if weight.input_groups is not None:
        return False
    # The kernels process UNIT inputs together. These inputs must have the same scale, so they must
    # belong to the same group.
    if weight.group_size < in_features and weight.group_size % UNIT:
        return False
    return _fits_half(weight.scales) and (weight.zeros is None or _fits_half(weight.zeros))


def _fits_half(numbers: Tensor) -> bool:
    """Return whether float16 is accurate enough for some numbers.

    float16 has fewer digits for numbers below 6e-5, and scales of Q6_K are often that small. The
    rounding errors of small scales do not matter, because the weights of their groups are small,
    too. The errors are therefore compared with the largest number in the row.

    Args:
        numbers: the scales or zeros of a weight, [out_features, groups].
    """
    numbers = numbers.float()
    error = (numbers.half().float() - numbers).abs()
    return bool((error <= _MAX_HALF_ERROR * numbers.abs().amax(dim=1, keepdim=True)).all())
