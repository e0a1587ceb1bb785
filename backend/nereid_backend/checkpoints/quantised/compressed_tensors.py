# SPDX-License-Identifier: Apache-2.0
"""The layouts of checkpoints that were created with the library compressed-tensors.

Source: the compressors of compressed-tensors 0.20, compressed_tensors/compressors.

pack-quantized (integers of 1 to 8 bits):

    weight_packed      int32 [out_features, words], packed along the inputs
    weight_scale       [out_features, groups], or one number
    weight_zero_point  int32 [words, groups], packed along the outputs; only for asymmetric weights;
                       before version 0.9.4, int8 [out_features, groups]
    weight_shape       int64 [2]
    weight_g_idx       int32 [in_features], the group of each input; only with activation order; if
                       it contains -1, it was never computed, and groups are consecutive

Each packed integer is stored as integer + 2**(bits - 1). weight = (integer - zero) * scale. Since
version 0.18, an integer may begin in one word and end in the next word. Before, a word contained
only whole integers. Example: with 3 bits, a word contained 10 integers and two unused bits.

int-quantized and naive-quantized:

    weight               int8
    weight_scale         as above
    weight_zero_point    as above

float-quantized:

    weight               float8
    weight_scale         as above

nvfp4-pack-quantized and mxfp4-pack-quantized:

    weight_packed        uint8, two 4-bit floating-point numbers in each byte
    weight_scale         float8 or exponents
    weight_global_scale  one number, by which the scales are divided
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import (
    IntegerWeight,
    by_row,
    scale_blocks,
    unpack_integers,
)
from nereid_backend.checkpoints.layout import Format, Layout, Settings, UnknownVariantError
from nereid_backend.checkpoints.quantised.fp8 import ACTIVATION_SCALES, float8_layouts
from nereid_backend.checkpoints.quantised.mxfp4 import float4_numbers

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
# If weight_zero_point is missing, all zero points are 0. If weight_g_idx (the group of each input)
# is missing, the inputs of each group are consecutive.
_OPTIONAL_TENSORS = (".weight_zero_point", ".weight_g_idx")
# The initial value of the elements of weight_g_idx.
_UNKNOWN_GROUP = -1
# The usual and the largest number of bits of a packed integer.
_USUAL_BITS, _MAX_BITS = 4, 8


def compressed_tensors_format(settings: Settings) -> Format:
    """Return the layouts of the weights in a compressed-tensors checkpoint.

    A layout lists the tensors of one weight, and contains the function that decodes them.
    `settings` is the field quantization_config of config.json.

    Raises:
        UnknownVariantError: if the format, a sparse layout or a rotation is not supported.
    """
    schemes = _schemes(settings)
    _check_variant(settings, schemes)
    weight_settings = [scheme.get("weights") or {} for scheme in schemes]
    # A checkpoint can contain weights of several layouts. The names and the data types of a
    # weight's tensors show which layout the weight has, so all layouts are returned.
    group_size = _common_group_size(weight_settings)
    bits = _common_bits(weight_settings)
    integers = (_packed_layout(group_size, bits), _int8_layout(group_size))
    float8 = float8_layouts(_block_shape(weight_settings))
    # The tensors that contain the scales of activations are ignored, because the engine does not
    # quantise activations.
    return Format((*integers, _FLOAT4_LAYOUT, *float8), ignored=ACTIVATION_SCALES)


def _schemes(settings: Settings) -> list[dict[str, Any]]:
    """Return the quantisation schemes in the settings.

    A scheme describes the quantisation of some layers. Example: the settings {"config_groups":
    {"group_0": {"weights": {"num_bits": 4}}}} contain the scheme {"weights": {"num_bits": 4}}.
    """
    schemes_by_name = settings.get("config_groups") or {}
    return [scheme for scheme in schemes_by_name.values() if isinstance(scheme, dict)]


def _packed_layout(group_size: int | None, bits: int) -> Layout:
    """Return the layout of weights whose integers are packed into 32-bit words.

    Args:
        group_size: the number of inputs with one scale; None if the settings contain several sizes.
        bits: the usual number of bits of an integer.
    """
    return Layout(
        main=".weight_packed",
        others=(".weight_scale", ".weight_shape"),
        decode=partial(_decode_packed, group_size=group_size, usual_bits=bits),
        optional=_OPTIONAL_TENSORS,
        main_dtypes=("I32",),
        # This number is used only to estimate the size of the model, so it need not be exact. A
        # layer can have integers of another size.
        numbers_per_element=32 / bits,
        has_integers=True,
    )


def _int8_layout(group_size: int | None) -> Layout:
    """Return the layout of weights whose integers are stored as int8.

    `group_size` is the number of inputs with one scale; None if the settings contain several sizes.
    """
    return Layout(
        main=".weight",
        others=(".weight_scale",),
        decode=partial(_decode_int8, group_size=group_size),
        optional=_OPTIONAL_TENSORS,
        main_dtypes=("I8",),
        numbers_per_element=1,
        has_integers=True,
    )


def _check_variant(settings: Settings, schemes: Sequence[Mapping[str, Any]]) -> None:
    """Raise an UnknownVariantError if the settings contain a variant that is not supported.

    The unsupported variants are unknown formats, sparse weights, and rotated weights.

    Args:
        settings: the field quantization_config of config.json.
        schemes: the quantisation schemes in the settings, one for each group of layers. A scheme
            may have its own format.
    """
    for format_owner in (settings, *schemes):
        format_name = format_owner.get("format")
        if format_name and format_name not in _FORMATS:
            raise UnknownVariantError(
                f"the compressed-tensors format {format_name} is not supported. The supported "
                f"formats are {', '.join(_FORMATS)}"
            )
    sparsity = settings.get("sparsity_config") or {}
    sparse_layout = sparsity.get("format", "dense")
    if sparse_layout != "dense":
        raise UnknownVariantError(f"the sparse layout {sparse_layout} is not supported")
    rotations = settings.get("transform_config") or {}
    if rotations.get("config_groups"):
        raise UnknownVariantError("rotated weights (transform_config) are not supported")


def _common_group_size(weights: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the common group size of the quantisation schemes; None if there is no common size.

    `weights` contains the settings of each scheme. The result is None if no scheme has groups, or
    if two schemes have different group sizes.
    """
    sizes = {arguments.get("group_size") for arguments in weights}
    sizes -= {None, -1}  # the values of schemes without groups
    return sizes.pop() if len(sizes) == 1 else None


def _common_bits(weights: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of bits if it is equal in all quantisation schemes; 4 otherwise.

    `weights` contains the settings of each scheme.
    """
    numbers = {arguments.get("num_bits") for arguments in weights}
    bits = numbers.pop() if len(numbers) == 1 else None
    return bits if isinstance(bits, int) and 1 <= bits <= _MAX_BITS else _USUAL_BITS


def _block_shape(settings_of_schemes: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return the shape of a block (rows, columns); None if the weights are not divided into blocks.

    A scheme for float8 weights may divide each weight into blocks. Each block has one scale. If
    several schemes have blocks, the shape in the first of these schemes is returned. Example: the
    settings [{"num_bits": 8, "block_structure": [128, 128]}] give (128, 128).
    """
    for settings in settings_of_schemes:
        shape = settings.get("block_structure")
        if isinstance(shape, str):  # Old versions of the library wrote a text such as "128x128".
            shape = shape.split("x")
        if shape:
            return int(shape[0]), int(shape[1])
    return None


def _decode_packed(
    tensors: Mapping[str, Tensor],
    _dtype: torch.dtype,
    *,
    group_size: int | None,
    usual_bits: int,
) -> IntegerWeight:
    """Decode integers that are packed into 32-bit words.

    Example: with 4 bits for each integer, one word contains 8 integers.

    Args:
        tensors: the tensors of the weight, by suffix. weight_packed contains the integers, int32
            [rows, words], and weight_shape contains the number of rows and the number of inputs.
            If there is no weight_zero_point, all zero points are 0.
        _dtype: not used, because the weight consists of integers. All functions `Layout.decode`
            have this parameter.
        group_size: the number of inputs in a group with one scale, as in the settings; None if the
            settings contain several group sizes.
        usual_bits: the usual number of bits of an integer. If the layer has another number, it is
            computed from the shapes of the tensors.

    Raises:
        ValueError: if the shapes of the tensors do not match.
    """
    num_rows, num_inputs = map(int, tensors[".weight_shape"])
    packed = tensors[".weight_packed"]
    num_words = packed.shape[1]
    bits = _actual_bits(num_words, num_inputs, usual_bits)
    if not 1 <= bits <= _MAX_BITS or len(packed) != num_rows:
        raise ValueError(
            f"the packed weight has the shape {tuple(packed.shape)}, but weight_shape is "
            f"({num_rows}, {num_inputs})"
        )
    unpack = _choose_unpacking(num_words, num_inputs, bits)
    packed_zeros = tensors.get(".weight_zero_point")
    return _create_integer_weight(
        values=_to_signed(unpack(packed, bits, num_inputs), bits),
        scales=tensors[".weight_scale"],
        zeros=_signed_zeros(packed_zeros, unpack, bits, num_rows),
        group_of_input=tensors.get(".weight_g_idx"),
        usual_group_size=group_size,
        bits=bits,
    )


def _choose_unpacking(
    num_words: int, num_inputs: int, bits: int
) -> Callable[[Tensor, int, int], Tensor]:
    """Return the function that unpacks the integers in the rows of a tensor of 32-bit words.

    Each row has `num_words` words, which contain `num_inputs` integers. The number of words shows
    whether the packing is dense or padded.

    In the dense packing, an integer may begin in one word and end in the next word. In the padded
    packing, each word contains only whole integers, and the highest bits of a word may be unused.
    """
    is_dense = num_words == _num_dense_words(num_inputs, bits)
    return unpack_integers if is_dense else _unpack_padded_words


def _signed_zeros(
    zeros: Tensor | None, unpack: Callable[[Tensor, int, int], Tensor], bits: int, num_rows: int
) -> Tensor | None:
    """Return zero points as int8. If `zeros` contains packed int32 words, unpack the words."""
    if zeros is None or zeros.dtype != torch.int32:
        return zeros
    # A word contains the zero points of several rows, so the shape is [words, groups]. The tensor
    # is transposed, because `unpack` expects the words in the last dimension.
    return _to_signed(unpack(zeros.T, bits, num_rows).T, bits)


def _actual_bits(num_words: int, num_integers: int, usual_bits: int) -> int:
    """Return the number of bits of an integer in a row of 32-bit words.

    If the size of the row fits integers of `usual_bits` bits, return `usual_bits`. Otherwise,
    compute the number from the size of the row. Example: 4 words (128 bits) with 40 integers
    contain integers of 3 bits. The last 8 bits are not used.
    """
    dense_words = _num_dense_words(num_integers, usual_bits)
    padded_words = _num_padded_words(num_integers, usual_bits)
    if num_words in (dense_words, padded_words):
        return usual_bits
    # A row usually has more integers than unused bits. The unused bits then do not change the
    # rounded quotient. Example: 4 * 32 // 40 is 3, although 8 of the 128 bits are not used. `max`
    # prevents a division by 0, because the number of integers can be 0 in a damaged file.
    return num_words * 32 // max(1, num_integers)


def _num_dense_words(count: int, bits: int) -> int:
    """Return the number of words for `count` integers that are stored without gaps."""
    return math.ceil(count * bits / 32)


def _num_padded_words(count: int, bits: int) -> int:
    """Return the number of words for `count` integers if each word contains only whole integers."""
    return math.ceil(count / (32 // bits))


def _unpack_padded_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack unsigned integers from 32-bit words if no integer extends into the next word.

    The highest bits of a word are not used if 32 is not a multiple of `bits`. The arguments and the
    result are those of `unpack_integers`.
    """
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    values: Tensor = ((packed.unsqueeze(2) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)
    if values.shape[1] < count:
        raise ValueError(
            f"each row of the packed integers contains {values.shape[1]} integers, but {count} are "
            "needed"
        )
    return values[:, :count]


def _decode_int8(
    tensors: Mapping[str, Tensor],
    _dtype: torch.dtype,
    *,
    group_size: int | None,
) -> IntegerWeight:
    """Decode integers that are stored as int8: weight = (integer - zero_point) * scale.

    `tensors` contains the tensors of the weight by suffix, and `group_size` is the number of inputs
    in a group with one scale. `_dtype` is not used, because the weight consists of integers.
    """
    return _create_integer_weight(
        values=tensors[".weight"],
        scales=tensors[".weight_scale"],
        zeros=tensors.get(".weight_zero_point"),  # None if all zero points are 0
        group_of_input=tensors.get(".weight_g_idx"),
        usual_group_size=group_size,
        bits=8,
    )


def _create_integer_weight(
    *,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_of_input: Tensor | None,
    usual_group_size: int | None,
    bits: int,
) -> IntegerWeight:
    """Create a weight from signed integers: weight = (integer - zero_point) * scale.

    The inputs of each row are divided into groups, and each group has one scale and one zero point.

    Args:
        values: the integers, int8 [out_features, in_features].
        scales: the scales, [out_features, groups], [out_features] or a single number.
        zeros: the zero points, in one of the shapes of `scales`; None if all zero points are 0.
        group_of_input: [in_features], the index of each input's group, as in the file; None if the
            inputs of each group are consecutive.
        usual_group_size: the group size in the settings; None if the settings contain several
            sizes. Some layers can have another size.
        bits: the number of bits of an integer.
    """
    num_rows, num_inputs = values.shape
    group_scales = by_row(scales, num_rows)  # [out_features, groups]
    num_groups = group_scales.shape[1]
    # If each row has only one zero point, the zero point is repeated for each group of the row.
    group_zeros = None if zeros is None else by_row(zeros, num_rows).expand(-1, num_groups)
    group_size = _group_size(num_inputs, num_groups, usual_group_size)
    input_groups = None if group_of_input is None else _known_groups(group_of_input, num_groups)
    return IntegerWeight(values, group_scales, group_zeros, group_size, bits, input_groups)


def _group_size(num_inputs: int, num_groups: int, usual_group_size: int | None) -> int:
    """Return the number of inputs in a group of a layer.

    If groups of the usual size give the number of groups of the layer, return the usual size.
    Otherwise, compute the size from the number of groups.

    Examples for the usual size 128: 300 inputs in 3 groups give 128, and 300 inputs in 2 groups
    give 150.
    """
    if usual_group_size is not None and math.ceil(num_inputs / usual_group_size) == num_groups:
        return usual_group_size
    return math.ceil(num_inputs / num_groups)


def _known_groups(group_of_input: Tensor, num_groups: int) -> Tensor | None:
    """Return the group of each input as int64; None if the file does not contain the groups.

    The library that wrote the file stores `_UNKNOWN_GROUP` if it has not computed the order of
    activations for this layer. Example: the layer belongs to an expert that got no tokens of the
    calibration data. In this case, the result is None, and the inputs of each group are
    consecutive.

    Raises:
        ValueError: if an input belongs to a group that does not exist.
    """
    if bool((group_of_input == _UNKNOWN_GROUP).any()):
        return None
    if int(group_of_input.min()) < 0 or int(group_of_input.max()) >= num_groups:
        raise ValueError(f"weight_g_idx contains a group outside the range 0 to {num_groups - 1}")
    return group_of_input.long()


def _to_signed(values: Tensor, bits: int) -> Tensor:
    """Convert unpacked integers to signed integers (int8).

    The checkpoint stores each signed integer as integer + 2**(bits - 1). Example: with 4 bits, 0
    becomes -8, and 15 becomes 7.
    """
    offset: int = 2 ** (bits - 1)
    return (values.to(torch.int16) - offset).to(torch.int8)


def _decode_float4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Decode 4-bit floating point numbers, two in each byte: weight = number * scale.

    `tensors` contains the tensors of the weight by suffix. If weight_global_scale exists, the
    scales are divided by this number.
    """
    scales = tensors[".weight_scale"]
    factor = tensors.get(".weight_global_scale")
    if factor is not None:
        scales = scales.float() / factor.float()
    return scale_blocks(float4_numbers(tensors[".weight_packed"]), scales, dtype)


_FLOAT4_LAYOUT = Layout(
    main=".weight_packed",
    others=(".weight_scale",),
    decode=_decode_float4,
    optional=(".weight_global_scale",),
    main_dtypes=("U8",),
    numbers_per_element=2,
)
