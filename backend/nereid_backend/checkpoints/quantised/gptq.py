# SPDX-License-Identifier: Apache-2.0
"""The layout of GPTQ checkpoints. Checkpoints with activation order (desc_act) are supported.

Source: the packing of TorchQuantLinear in GPTQModel 7.7, gptqmodel/nn_modules/qlinear/__init__.py.

    qweight  int32 [in_features * bits / 32, out_features], packed along the inputs
    qzeros   int32 [groups, out_features * bits / 32], packed along the outputs
    scales   float16 [groups, out_features]
    g_idx    int32 [in_features], the group of each input; without it, groups are consecutive

weight = (integer - zero_point) * scale. A file in the original format `gptq` contains each zero
point minus 1. A file in the format `gptq_v2` contains the zero points without a change.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight, unpack_integers
from nereid_backend.checkpoints.layout import Format, Layout, Settings, UnknownVariantError

_BITS = (2, 3, 4, 8)


def gptq_format(settings: Settings) -> Format:
    """Return the layout of GPTQ weights: the names of a weight's tensors, and a decoding function.

    Example: the tensors "up_proj.qweight", "up_proj.qzeros" and "up_proj.scales" form the weight
    of the layer "up_proj". `settings` is the field quantization_config of config.json.

    Raises:
        UnknownVariantError: if the format or the number of bits is not supported.
    """
    format_name = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    bits = settings.get("bits", 4)
    if format_name not in ("gptq", "gptq_v2") or bits not in _BITS:
        raise UnknownVariantError(
            f"the GPTQ format {format_name} with {bits} bits is not supported. The supported "
            f"formats are gptq and gptq_v2 with {', '.join(map(str, _BITS))} bits"
        )
    group_size = settings.get("group_size")
    if not isinstance(group_size, int) or group_size <= 0:
        group_size = None
    # A file in the format gptq contains each zero point minus 1. A file in the format gptq_v2
    # contains the zero points without a change.
    decode = partial(_decode, group_size=group_size, has_offset=format_name == "gptq")
    # qweight contains the integers. qzeros and scales contain the zero point and the scale of each
    # group of inputs. g_idx contains the group of each input. The integers and the zero points are
    # packed into 32-bit words.
    layout = Layout(
        main=".qweight",
        others=(".qzeros", ".scales"),
        decode=decode,
        optional=(".g_idx",),
        numbers_per_element=32 / bits,
        has_integers=True,
    )
    return Format((layout,))


def _decode(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,  # noqa: ARG001 - the weight consists of integers
    *,
    group_size: int | None,
    has_offset: bool,
) -> IntegerWeight:
    """Unpack a weight of integers: weight = (integer - zero_point) * scale.

    The tensors qweight and qzeros contain the integers and the zero points, packed into 32-bit
    words. Each group of inputs has one zero point and one scale. The optional tensor g_idx contains
    the group of each input. Without g_idx, the inputs of a group are consecutive.

    Args:
        tensors: the tensors of the weight, by suffix.
        dtype: not used, because the weight consists of integers.
        group_size: the number of inputs in a group, as in the settings; None if the settings
            contain no positive number. If this number does not match the number of scales, the
            group size is computed from the number of scales.
        has_offset: whether the file contains each zero point minus 1.

    Raises:
        ValueError: if the shapes of the tensors do not match.
    """
    packed = tensors[".qweight"].T  # [out_features, words]
    scales = tensors[".scales"].T  # [out_features, groups]
    group_of_input = tensors.get(".g_idx")  # [in_features]
    qzeros = tensors[".qzeros"]
    # The layers of one checkpoint may have different numbers of bits, so the number is not read
    # from the settings.
    if group_of_input is None:
        # The number of inputs is unknown, but each row of `qzeros` has one zero point for each
        # output.
        bits = _derive_bits(num_words=qzeros.shape[1], num_integers=len(scales))
        values = unpack_integers(packed, bits)
    else:
        bits = _derive_bits(num_words=packed.shape[1], num_integers=len(group_of_input))
        values = unpack_integers(packed, bits, len(group_of_input))
    zeros = _unpack_zeros(qzeros, bits, len(scales), has_offset=has_offset)
    num_inputs, num_groups = values.shape[1], scales.shape[1]
    has_empty_group = num_inputs < num_groups
    if zeros.shape != scales.shape or has_empty_group:
        raise ValueError(
            f"zeros of the shape {tuple(zeros.shape)} and scales of the shape "
            f"{tuple(scales.shape)} do not match weights with {num_inputs} inputs"
        )
    # The last group may have fewer inputs. Example: 200 inputs in groups of 128 have 2 groups.
    if group_size is None or math.ceil(num_inputs / group_size) != num_groups:
        group_size = math.ceil(num_inputs / num_groups)
    irregular_groups = None  # None means that the inputs of each group are consecutive.
    if group_of_input is not None:
        irregular_groups = _groups_if_irregular(group_of_input.long(), group_size, num_groups)
    return IntegerWeight(values, scales, zeros, group_size, bits, irregular_groups)


def _unpack_zeros(packed: Tensor, bits: int, num_outputs: int, *, has_offset: bool) -> Tensor:
    """Unpack the zero points of a weight. The result is [out_features, groups].

    Args:
        packed: the tensor qzeros, int32 [groups, words].
        bits: the number of bits of a zero point.
        num_outputs: the number of zero points in each row of `packed`.
        has_offset: whether `packed` contains each zero point minus 1.
    """
    if has_offset:
        # The programs that create GPTQ checkpoints subtract 1 from all integers in a packed word
        # with one subtraction. If an integer is 0, the subtraction borrows from the next integer in
        # the word. Therefore, 1 is added to the packed words, and not to the unpacked integers.
        #
        # Example: the 4-bit integers 0 and 3 form the byte 0x30. The file contains the byte
        # 0x30 - 0x11 = 0x1F. The addition to the byte gives the correct byte: 0x1F + 0x11 = 0x30.
        # The unpacked integers of 0x1F are 15 and 1. The addition to these integers would give the
        # wrong integers 16 and 2.
        packed = packed + _words_of_ones(bits, packed.shape[1])
    return unpack_integers(packed, bits, num_outputs).T


def _derive_bits(num_words: int, num_integers: int) -> int:
    """Compute the number of bits of each integer from the number of 32-bit words in a row.

    Example: if a row of 64 integers has 8 words, each integer has 4 bits.

    Raises:
        ValueError: if the number of bits is not supported.
    """
    bits = num_words * 32 // max(1, num_integers)
    if bits not in _BITS:
        supported = ", ".join(map(str, _BITS))
        raise ValueError(f"the weights have {bits} bits, but only {supported} bits are supported")
    return bits


def _words_of_ones(bits: int, num_words: int) -> Tensor:
    """Return `num_words` 32-bit words in which every packed integer has the value 1.

    Example: with 4 bits, each word is 0x11111111.
    """
    words = [0] * num_words
    # Set the lowest bit of each packed integer. `position` counts bits across all words, because an
    # integer may begin in one word and end in the next word.
    for position in range(0, 32 * num_words, bits):
        word_index, bit = divmod(position, 32)
        words[word_index] |= 1 << bit
    # A word whose highest bit is set does not fit into int32. The conversion keeps the 32 bits, and
    # the word becomes a negative number.
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _groups_if_irregular(groups: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """Return the group of each input, or None if the inputs of each group are consecutive.

    `groups` contains the index of the group to which each input belongs, and is returned unchanged.
    Example: with groups of 2 inputs, [0, 0, 1, 1] gives None, and [0, 1, 0, 1] gives [0, 1, 0, 1].
    """
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ValueError(f"g_idx contains a group outside the range 0 to {num_groups - 1}")
    is_regular = torch.equal(groups, torch.arange(len(groups)) // group_size)
    return None if is_regular else groups
