# SPDX-License-Identifier: Apache-2.0
"""The layout of GPTQ checkpoints, also with activation order (desc_act).

Source: the packing of TorchQuantLinear in GPTQModel 7.7, gptqmodel/nn_modules/qlinear/__init__.py.

    qweight  int32 [in_features * bits / 32, out_features], packed along the inputs
    qzeros   int32 [groups, out_features * bits / 32], packed along the outputs
    scales   float16 [groups, out_features]
    g_idx    int32 [in_features], the group of each input; without it, groups are consecutive

weight = (integer - zero) * scale. In the original format, `gptq`, the stored zero is one less than
the zero. In the format `gptq_v2`, the stored zero is the zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight, unpack_integers
from nereid_backend.checkpoints.layout import (
    Decoder,
    Format,
    Layout,
    Settings,
    UnknownVariantError,
)

_BITS = (2, 3, 4, 8)


def gptq_format(settings: Settings) -> Format:
    """Return the layout of a GPTQ checkpoint.

    Raises:
        UnknownVariantError: if the format or the number of bits is not supported.
    """
    name = str(settings.get("checkpoint_format") or "gptq").lower()
    bits = settings.get("bits", 4)
    if name not in ("gptq", "gptq_v2") or bits not in _BITS:
        raise UnknownVariantError(
            f"the GPTQ format {name} with {bits} bits is not supported. The supported formats are "
            f"gptq and gptq_v2 with {', '.join(map(str, _BITS))} bits"
        )
    layout = Layout(
        ".qweight",
        (".qzeros", ".scales"),
        _decoder(bits, has_offset=name == "gptq"),
        optional=(".g_idx",),
        numbers_per_element=32 / bits,
        has_integers=True,
    )
    return Format((layout,))


def _decoder(bits: int, *, has_offset: bool) -> Decoder:
    """Return the decoder for integers of `bits` bits, if a weight has no g_idx.

    `has_offset` is whether the stored zeros are one less than the zeros.
    """

    def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
        packed, scales = tensors[".qweight"].T, tensors[".scales"].T
        groups = tensors.get(".g_idx")
        # The layers of one checkpoint may have different numbers of bits.
        used_bits = bits if groups is None else packed.shape[1] * 32 // max(1, len(groups))
        if used_bits not in _BITS:
            raise ValueError(f"the weights have {used_bits} bits")
        values = unpack_integers(packed, used_bits, None if groups is None else len(groups))
        qzeros = tensors[".qzeros"]
        if has_offset:
            qzeros = qzeros + _ones(used_bits, qzeros.shape[1])
        zeros = unpack_integers(qzeros, used_bits, len(scales)).T
        if zeros.shape != scales.shape or values.shape[1] < scales.shape[1]:
            raise ValueError(
                f"the zeros have the shape {tuple(zeros.shape)} and the scales "
                f"{tuple(scales.shape)} for {values.shape[1]} inputs"
            )
        group_size = -(-values.shape[1] // scales.shape[1])
        if groups is not None:
            groups = _irregular(groups.long(), group_size, scales.shape[1])
        return IntegerWeight(values, scales, zeros, group_size, used_bits, groups)

    return decode


def _ones(bits: int, num_words: int) -> Tensor:
    """Return `num_words` 32-bit integers in which each packed integer is 1.

    The writers subtract these words from packed zeros, so a carry can cross packed integers.

    Example: with 4 bits, each word is 0x11111111.
    """
    words = [
        sum(1 << bit for bit in range(32) if (32 * index + bit) % bits == 0)
        for index in range(num_words)
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _irregular(groups: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """Return the group of each input; None if the groups are consecutive inputs."""
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ValueError(f"g_idx has the group {int(groups.max())}, but there are {num_groups}")
    is_regular = torch.equal(groups, torch.arange(len(groups)) // group_size)
    return None if is_regular else groups
