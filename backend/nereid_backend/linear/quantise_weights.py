# SPDX-License-Identifier: Apache-2.0
"""Rounds the weights of linear layers to integers of 8, 6 or 4 bits when a model is loaded.

With 8 bits, each group of 64 inputs has a scale, and with 6 bits, each group of 32 inputs. The
weight 0 has no rounding error. With 4 bits, each group of 32 inputs has a scale and a zero point.
docs/history/cpu-kernels.md contains the measured errors and speeds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.freed_memory import FreedMemory, discard_file_pages
from nereid_backend.linear import grouped_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.integer_layout import LANES
from nereid_backend.linear.prepack import (
    change_class,
    free_weight,
    output_layer_of,
    shared_weights,
)
from nereid_backend.loading_progress import no_progress, report_items

_DTYPES = (torch.float32, torch.bfloat16)
GROUP_SIZES = {4: 32, 6: 32, 8: 64}
"""Maps the number of bits to the number of inputs that share a scale."""

# The smallest scale. It is the smallest positive float16 number. A group of zeros gets this scale,
# so that its weights are not divided by 0.
_MIN_SCALE = 2.0**-24
# The largest 4-bit integer, which is unsigned.
_MAX_UINT4 = 15
# The smallest number of bits of the output layer, even if the other layers have 4 bits. Rounding
# errors in the output layer change the logits directly.
_OUTPUT_LAYER_BITS = 6
# Rows are quantised in slices. The float32 copy of one slice has at most this number of bytes. All
# temporary tensors of one slice together need about four times this number of bytes.
_SLICE_BYTES = 4 * 2**20


class QuantisedWeight(NamedTuple):
    """The integers, scales and zero points of a weight; see `GroupedLinear.from_quantised`."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None


def slow_integers_warning() -> str:
    """Return a warning if this machine has no fast kernel for integers; otherwise "".

    The caller appends the warning to a log message.
    """
    if grouped_linear.is_available():
        return ""
    return (
        ". There is no kernel for such weights, because the CPU has no AVX2 or g++ is missing. A "
        "step is several times slower than with weight_dtype=auto"
    )


@torch.inference_mode()
def quantise_linears(
    model: nn.Module, bits: int, progress: Callable[[str], None] = no_progress
) -> int:
    """Convert the weights of a model's linear layers to integers.

    Only layers of the class `nn.Linear` in float32 or bfloat16 on a CPU are converted. An output
    layer may share its weight with an embedding. In this case, the output layer gets its own
    converted copy of the weight. With bits=4, the output layer has 6 bits, because rounding errors
    in this layer change the logits directly.

    Args:
        model: the model. Mutated. Afterwards, the model cannot be trained, saved or moved.
        bits: 4 or 8.
        progress: this function is called with a line of text every few seconds.

    Returns:
        The number of converted layers.
    """
    shared = shared_weights(model)
    output_layer = output_layer_of(model)
    freed = FreedMemory()  # returns the memory of the original weights to the operating system
    count = 0
    for module in report_items(list(model.modules()), "rounding modules", progress):
        if type(module) is not nn.Linear or not can_quantise(module.weight):
            continue
        num_bytes = module.weight.nbytes
        layer_bits = max(bits, _OUTPUT_LAYER_BITS) if module is output_layer else bits
        _quantise(module, layer_bits, keep_weight=module.weight.data_ptr() in shared)
        freed.add(num_bytes)
        count += 1
    return count


def can_quantise(weight: Tensor) -> bool:
    """Return whether a weight is a non-empty float32 or bfloat16 tensor on a CPU."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and 0 not in weight.shape


def quantise_weight(weight: Tensor, bits: int) -> QuantisedWeight:
    """Round a weight, [out_features, in_features], to integers with one scale for each group.

    A group consists of 64 consecutive inputs of one output with 8 bits, or of 32 inputs with 6 or 4
    bits. With 4 bits, each group also has a zero point: the integer that represents the weight 0.
    Example with 8 bits: a group with the weights [0.5, -1.27] has the scale 0.01 and the integers
    [50, -127].
    """
    # Only a few rows are rounded at a time, so that the temporary copies need little memory.
    num_rows = _rows_of_slice(weight.shape[1])
    parts = [_quantise_rows(rows.float(), bits) for rows in torch.split(weight.detach(), num_rows)]
    values, scales, zeros = zip(*parts, strict=True)
    return QuantisedWeight(
        torch.cat(values), torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)
    )


def round_layer_in_place(
    layer: nn.Linear, read_rows: Callable[[int, int], Tensor], bits: int
) -> GroupedLinear:
    """Convert a layer to a GroupedLinear, whose weights are integers of 4, 6 or 8 bits.

    The result is the same object as `layer`, but with another class. The model, and the hooks of
    the layer, therefore stay unchanged. To save memory, a few rows are rounded at a time.

    Args:
        layer: the layer. Mutated. `layer.weight` determines only the shape.
        read_rows: returns rows of the weight. Example: `read_rows(16, 32)` returns the rows 16 to
            31.
        bits: 4, 6 or 8.
    """
    num_rows, in_features = layer.weight.shape
    grouped = change_class(layer, GroupedLinear)
    # Integers of 6 and 8 bits are symmetric, so they need no zero points.
    zeros_dtype = torch.uint8 if bits == 4 else None
    grouped.allocate_panels(in_features, GROUP_SIZES[bits], bits=bits, zeros_dtype=zeros_dtype)
    rows_per_slice = _rows_of_slice(in_features)
    for start in range(0, num_rows, rows_per_slice):
        end = min(start + rows_per_slice, num_rows)
        rows = read_rows(start, end).float()
        grouped.store_rows(start, *_quantise_rows(rows, bits))
    return grouped


def model_bytes(model: nn.Module) -> int:
    """Return the size in bytes of a model's parameters and buffers.

    If several tensors share memory, the memory counts once. If a weight is divided over several
    processes, only the slice of this process counts. A tensor in the format of oneDNN (mkldnn) does
    not count, because it has no storage whose size torch can return.
    """
    storage_bytes: dict[int, int] = {}  # by the address of the storage
    for tensor in [*model.parameters(), *model.buffers()]:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # the slice of this process
        if not tensor.is_mkldnn:
            storage = tensor.untyped_storage()
            storage_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(storage_bytes.values())


def _quantise_rows(weight: Tensor, bits: int) -> QuantisedWeight:
    """Quantise some rows of a float32 weight; see `quantise_weight`.

    The rows are [num_rows, in_features].
    """
    size = GROUP_SIZES[bits]
    num_inputs = weight.shape[1]
    # The shape is [num_rows, groups, size]. The last group is padded with zeros. The padding does
    # not change the scale of the group, because the range of every group contains 0 anyway.
    groups = functional.pad(weight, (0, -num_inputs % size)).view(len(weight), -1, size)
    values, scales, zeros = _round_to_uint4(groups) if bits == 4 else _round_to_int(groups, bits)
    return QuantisedWeight(values.flatten(1)[:, :num_inputs], scales, zeros)


def _round_to_int(groups: Tensor, bits: int) -> QuantisedWeight:
    """Round groups of weights, [num_rows, groups, size], to signed integers.

    The integers are from -127 to 127 with 8 bits, and from -31 to 31 with 6 bits. The range is
    symmetric, so that a group needs no zero. Example with 8 bits: a group with the weights
    [0.5, -1.27] has the scale 0.01 and the integers [50, -127].
    """
    # `_as_positive_float16` returns only positive scales. Otherwise, a group of zeros would have
    # the scale 0, and its weights would be divided by 0.
    largest = 2 ** (bits - 1) - 1
    scales = _as_positive_float16(groups.abs().amax(2) / largest)
    values = (groups / scales.unsqueeze(2)).round().clamp(-largest, largest)
    return QuantisedWeight(values.to(torch.int8), scales, None)


def _round_to_uint4(groups: Tensor) -> QuantisedWeight:
    """Round groups of weights, [num_rows, groups, size], to integers from 0 to 15.

    The zero of a group is the integer that represents the weight 0. Example: a group with the
    weights [-0.5, 1.0] has the scale 0.1, the zero 5 and the integers [0, 15].
    """
    # The range of a group must contain 0, so that the weight 0 has no rounding error.
    lowest = groups.amin(2).clamp(max=0)
    highest = groups.amax(2).clamp(min=0)
    # `_as_positive_float16` returns only positive scales. Otherwise, a group of zeros would have
    # the scale 0, and its weights would be divided by 0.
    scales = _as_positive_float16((highest - lowest) / _MAX_UINT4)
    zeros = (-lowest / scales).round().clamp(0, _MAX_UINT4)
    values = groups / scales.unsqueeze(2) + zeros.unsqueeze(2)
    values = values.round().clamp(0, _MAX_UINT4)
    return QuantisedWeight(values.to(torch.uint8), scales, zeros)


def _as_positive_float16(scales: Tensor) -> Tensor:
    """Round float32 scales to numbers that float16 can represent exactly.

    The integers are computed with the rounded scales, so rounding the scales adds no error. The
    scale 0 becomes `_MIN_SCALE`, so that no number is divided by 0.
    """
    return scales.clamp(min=_MIN_SCALE).half().float()


def _quantise(layer: nn.Linear, bits: int, *, keep_weight: bool) -> None:
    """Convert one layer to a GroupedLinear, whose weights are integers.

    Args:
        layer: the layer. Mutated.
        bits: 4, 6 or 8.
        keep_weight: whether the weight stays in memory, because other layers share it.
    """
    weight = layer.weight.detach()

    def read_and_discard_rows(start: int, end: int) -> Tensor:
        rows = weight[start:end]
        float_rows = rows.float()
        # If the weight is in a memory-mapped file, free the memory of these rows. The data is not
        # lost, because the operating system reads the rows from the file again if they are used.
        discard_file_pages(rows)
        return float_rows

    round_layer_in_place(layer, read_and_discard_rows, bits)
    if not keep_weight:
        free_weight(layer)


def _rows_of_slice(num_inputs: int) -> int:
    """Return the number of rows that are quantised together. It is a multiple of 16."""
    return max(1, _SLICE_BYTES // (4 * LANES * num_inputs)) * LANES
