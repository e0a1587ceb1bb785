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
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from nereid_backend.checkpoints import quantised_tensors
from nereid_backend.checkpoints.integer_weight import IntegerWeight
from nereid_backend.errors import ModelError
from nereid_backend.freed_memory import FreedMemory
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.integer_layout import inputs_per_unit
from nereid_backend.linear.prepack import change_class
from nereid_backend.linear.quantise_weights import (
    GROUP_SIZES,
    quantise_weight,
    round_layer_in_place,
)
from nereid_backend.loading_progress import report_items

if TYPE_CHECKING:
    from nereid_backend.checkpoints.gguf.gguf_weights import GgufWeight

# Panels (the blocks of weights that the CPU kernels read) store scales and zero points as float16.
# If float16 changes a scale or a zero point by more than `_MAX_HALF_ERROR` times the largest number
# in its row, the weight is not stored in panels.
_MAX_HALF_ERROR = 2.0**-10
# The numbers of bits of the integers in panels.
_PANEL_BITS = (4, 6, 8)


LazyWeight: TypeAlias = "quantised_tensors.LazyWeight | GgufWeight | RoundedWeight"
"""A weight of a checkpoint. It is read only when its elements are needed."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A weight, and an empty tensor that transformers loads in place of the weight.

    Attributes:
        weight: the weight.
        tensor: the empty tensor (the placeholder), which takes no memory.
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
    def origin(self) -> str:
        """The name of the weight and its file, for error messages."""
        return self.weight.origin

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""
        return self.weight.num_elements

    @property
    def integer_bytes(self) -> int:
        """The approximate number of bytes that the integers and their scales need in memory."""
        group_size = GROUP_SIZES[self.bits]
        # Each group has a scale of 2 bytes. If the integers have 4 bits, each group also has a zero
        # point of 1 byte.
        scale_bytes = 2 if self.bits == 8 else 3
        group_bytes = group_size * self.bits // 8 + scale_bytes
        return self.num_elements // group_size * group_bytes

    def decode(self) -> IntegerWeight:
        """Return the rounded weight."""
        values, scales, zeros = quantise_weight(self.weight[...], self.bits)
        return IntegerWeight(values, scales, zeros, GROUP_SIZES[self.bits], self.bits)

    def fill(self, layer: nn.Linear) -> None:
        """Round the weight to integers with scales, and store these in a layer.

        If the checkpoint is not quantised, a few rows are read and rounded at a time, so that
        little memory is needed. Otherwise, the whole weight is dequantised before it is rounded.

        Raises:
            ModelError: if the weight cannot be read, or if its shape does not fit the layer.

        Mutates: `layer`.
        """
        weight = self.weight
        if isinstance(weight, quantised_tensors.LazyWeight) and weight.is_unquantised_matrix:
            # The weight is one tensor of a safetensors file. `read_rows(start, end)` reads only
            # some of its rows.
            _check_shape(weight, weight.main_tensor.shape, layer)
            round_layer_in_place(layer, weight.main_tensor.read_rows, self.bits)
        else:
            # The index `...` selects the whole weight, which is read and dequantised now.
            numbers = weight[...]
            _check_shape(weight, numbers.shape, layer)
            round_layer_in_place(layer, lambda start, end: numbers[start:end], self.bits)

    def __getitem__(self, index: object) -> Tensor:
        """Return the unrounded weight.

        transformers always passes `...` as `index`, which selects the whole weight.
        """
        return self.weight[index]


def round_weights(
    weights: Mapping[str, LazyWeight], model: nn.Module, bits: int
) -> dict[str, LazyWeight]:
    """Return a copy of `weights` in which each weight of a linear layer is rounded when it is read.

    A rounded weight consists of integers with scales, so it needs less memory. The weight of the
    output layer is not rounded, because it may need more bits; see `quantise_linears`.

    Args:
        weights: the weights of a checkpoint by name.
        model: the model on the device `meta`, which has no memory for the weights.
        bits: the number of bits of an integer, 4 or 8.
    """
    rounded_names = linear_names(model)
    return {
        name: RoundedWeight(weight, bits) if name in rounded_names else weight
        for name, weight in weights.items()
    }


def linear_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers. The output layer is not included."""
    find_output_layer = getattr(model, "get_output_embeddings", None)
    output_layer = None if find_output_layer is None else find_output_layer()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not output_layer
    }


def use_placeholders(
    weights: Mapping[str, LazyWeight], model: nn.Module, dtype: torch.dtype
) -> dict[str, "LazyWeight | Placeholder"]:
    """Return a copy of `weights` with placeholders for the integer weights of linear layers.

    A placeholder is a tensor whose elements all refer to one number in memory. transformers, which
    cannot load integer weights, loads the placeholders instead. Afterwards, `fill_placeholders`
    stores the integers in the layers.

    Args:
        weights: the weights of a checkpoint by name.
        model: the model on the device `meta`, which has no memory for the weights.
        dtype: the data type of the model.
    """
    linear_layers = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
    # If several modules share a weight, the weight is not replaced, because some of these modules
    # need floating point numbers. Example: tied embeddings.
    shared_names = _names_of_shared(model)
    weights_to_load: dict[str, LazyWeight | Placeholder] = {}
    for name, weight in weights.items():
        layer = linear_layers.get(name)
        if layer is None or name in shared_names or not weight.has_integers:
            weights_to_load[name] = weight
        else:
            # `expand` makes all elements of the tensor refer to one number in memory. The number
            # is NaN. If the real weight never replaces the tensor, the logits become NaN, and the
            # self-check fails.
            tensor = torch.full((1, 1), float("nan"), dtype=dtype).expand(layer.weight.shape)
            weights_to_load[name] = Placeholder(weight, tensor)
    return weights_to_load


@torch.inference_mode()
def fill_placeholders(
    model: nn.Module, weights: Iterable[object], progress: Callable[[str], None]
) -> int:
    """Replace each placeholder in the linear layers of a model by the integers of the real weight.

    A placeholder is a tensor that transformers has loaded in place of a quantised weight. All its
    elements refer to one number in memory, so it takes almost no memory, but it has an address of
    its own. The CPU kernels read the integers in panels: blocks of a weight matrix that are
    contiguous in memory.

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
    # Maps the memory address of each placeholder tensor to its `Placeholder` object, which also
    # contains the real weight. transformers does not copy a placeholder tensor, so the tensor has
    # the same address in the layer.
    placeholders = {
        weight.tensor.data_ptr(): weight for weight in weights if isinstance(weight, Placeholder)
    }
    # `freed_memory` counts freed bytes, and returns memory to the operating system when enough
    # bytes have been freed. The number of elements is a rough estimate of the bytes that are freed
    # after a weight has been read.
    freed_memory = FreedMemory()
    num_layers_with_panels = 0
    for module in report_items(list(model.modules()), "filling modules", progress):
        if type(module) is not nn.Linear:
            continue  # `use_placeholders` has left out the layers whose class is a subclass.
        placeholder = placeholders.pop(module.weight.data_ptr(), None)
        if placeholder is not None:
            has_panels = _fill_layer(module, placeholder.weight)
            num_layers_with_panels += int(has_panels)
            freed_memory.add(placeholder.weight.num_elements)
    if placeholders:
        raise ModelError(
            f"{len(placeholders)} quantised weights do not belong to linear layers. Set "
            "prepack=false."
        )
    return num_layers_with_panels


def _names_of_shared(model: nn.Module) -> set[str]:
    """Return the names of the parameters that several modules share. Example: tied embeddings."""
    config = getattr(model, "config", None)
    has_tied_weights = getattr(config, "tie_word_embeddings", False)
    if not has_tied_weights:
        return set()
    # Depending on the model, `_tied_weights_keys` is a list of names, or a dictionary that maps the
    # name of each tied weight to the name of its source.
    tied_names = getattr(model, "_tied_weights_keys", None) or {}
    source_names = tied_names.values() if isinstance(tied_names, dict) else ()
    return {*tied_names, *source_names}


def _fill_layer(layer: nn.Linear, weight: LazyWeight) -> bool:
    """Read a weight, and store it in a layer. Return whether the layer stores it as integers.

    Mutates: `layer`.
    """
    if isinstance(weight, RoundedWeight):
        # The weight is rounded to integers while it is read, a few rows at a time.
        weight.fill(layer)
        return True
    decoded = weight.decode()
    if isinstance(decoded, IntegerWeight):
        _check_shape(weight, decoded.values.shape, layer)
        if _fits_panels(decoded):
            _store_integers(layer, decoded)
            return True
        decoded = decoded.dequantise(layer.weight.dtype)
    _check_shape(weight, decoded.shape, layer)
    layer.weight = nn.Parameter(decoded.to(layer.weight.dtype), requires_grad=False)
    return False


def _store_integers(layer: nn.Linear, weight: IntegerWeight) -> None:
    """Store the integers, scales and zero points of a weight in a layer.

    The CPU kernels must be able to read the weight; see `_fits_panels`.

    Mutates: `layer`. Its class becomes `GroupedLinear`, which stores integers.
    """
    bits = _smallest_panel_bits(weight)
    grouped = change_class(layer, GroupedLinear)
    grouped.set_quantised(weight.values, weight.scales, weight.zeros, weight.group_size, bits=bits)


def _smallest_panel_bits(weight: IntegerWeight) -> int:
    """Return the smallest number of bits with which the CPU kernels can store the integers.

    Example: integers of 5 bits are stored with 6 bits if the group size is a multiple of 16, and
    otherwise with 8 bits.
    """
    return next(
        bits for bits in _PANEL_BITS if weight.bits <= bits and _supports_groups(weight, bits)
    )


def _supports_groups(weight: IntegerWeight, bits: int) -> bool:
    """Return whether the kernels for integers of `bits` bits support the groups of a weight.

    These kernels read several consecutive inputs at a time. These inputs must have the same scale,
    so they must belong to the same group. If a row has only one group, it is padded.
    """
    has_one_group = weight.group_size >= weight.values.shape[1]
    return has_one_group or weight.group_size % inputs_per_unit(bits) == 0


def _check_shape(weight: LazyWeight, shape: Sequence[int], layer: nn.Linear) -> None:
    """Raise a ModelError if the shape of a weight differs from the shape that its layer needs."""
    if tuple(shape) != tuple(layer.weight.shape):
        raise ModelError(
            f"the weight {weight.origin} has the shape {tuple(shape)}, but its layer needs the "
            f"shape {tuple(layer.weight.shape)}. Download the checkpoint again."
        )


def _fits_panels(weight: IntegerWeight) -> bool:
    """Return whether the CPU kernels can store and read a weight without further rounding.

    The kernels read blocks of a weight matrix, the panels, whose scales and zero points are
    float16.
    """
    # Panels can store integers of 8 bits, and no weight needs more bits.
    widest_bits = max(_PANEL_BITS)
    has_consecutive_groups = weight.input_groups is None  # the kernels support no other groups
    return (
        has_consecutive_groups
        and _supports_groups(weight, widest_bits)
        and (weight.zeros is None or _fits_half(weight.zeros))
        and _fits_half(weight.scales)
    )


def _fits_half(numbers: Tensor) -> bool:
    """Return whether float16 is accurate enough for the scales or zero points of a weight.

    float16 has fewer digits for numbers below 6e-5, and scales of Q6_K are often that small. The
    rounding errors of small scales do not matter, because the weights of their groups are small,
    too. The errors are therefore compared with the largest number in the row.

    Args:
        numbers: the scales or zero points, [out_features, groups].
    """
    numbers = numbers.float()
    rounding_errors = (numbers.half().float() - numbers).abs()
    largest_in_row = numbers.abs().amax(dim=1, keepdim=True)
    return bool((rounding_errors <= _MAX_HALF_ERROR * largest_in_row).all())
