# SPDX-License-Identifier: Apache-2.0
"""The layout of AWQ checkpoints (version gemm).

Source: the packing of WQLinear_GEMM in AutoAWQ 0.2.9, awq/modules/linear/gemm.py.

    qweight  int32 [in_features, out_features / 8]
    qzeros   int32 [groups, out_features / 8]
    scales   float16 [groups, out_features]

Each int32 contains the 4-bit integers of eight outputs. From the lowest bits to the highest bits,
the order of the outputs is 0, 2, 4, 6, 1, 3, 5, 7. weight = (integer - zero) * scale.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight, unpack_integers
from nereid_backend.checkpoints.layout import Format, Layout, Settings, UnknownVariantError

# Each int32 contains eight integers, and each integer belongs to one of eight outputs. `_ORDER`
# lists the outputs, beginning with the output of the integer in the lowest bits.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_format(settings: Settings) -> Format:
    """Return the layout of AWQ weights: the names of a weight's tensors, and a decoding function.

    Example: the tensors "up_proj.qweight", "up_proj.qzeros" and "up_proj.scales" form the weight
    of the layer "up_proj". `settings` is the field quantization_config of config.json.

    Raises:
        UnknownVariantError: if the version is not gemm, if the weights do not have 4 bits, or if
            the integers are signed or have an order other than AWQ's.
    """
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    # Some programs name the field "w_bit".
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnknownVariantError(
            f"the AWQ version {version} with {bits} bits is not supported. The supported version "
            "is gemm with 4 bits"
        )
    if "pack_method" in settings:
        _check_settings_of_quark(settings)
    layout = Layout(
        main=".qweight",
        others=(".qzeros", ".scales"),
        decode=_decode,
        numbers_per_element=8,  # An int32 contains eight 4-bit integers.
        has_integers=True,
    )
    return Format((layout,))


def _check_settings_of_quark(settings: Settings) -> None:
    """Raise an UnknownVariantError if AMD Quark has stored the integers differently from AWQ.

    Only AMD Quark writes the field pack_method. Other programs always store the integers in AWQ's
    order, and as unsigned integers even if the weights are symmetric.
    """
    pack_method = settings["pack_method"]
    if pack_method != "reorder":
        raise UnknownVariantError(
            f"AWQ weights with the pack_method {pack_method!r} (quantization_config of "
            "config.json) are not supported. The supported pack_method is 'reorder'"
        )
    is_symmetric = settings.get("zero_point") is False
    if is_symmetric:
        raise UnknownVariantError(
            "symmetric AWQ weights of AMD Quark (pack_method and zero_point false in "
            "quantization_config of config.json), which are signed integers, are not supported"
        )


def _decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> IntegerWeight:  # noqa: ARG001
    values = _in_order(tensors[".qweight"]).T.contiguous()
    zeros = _in_order(tensors[".qzeros"]).T
    scales = tensors[".scales"].T
    num_groups = scales.shape[1]
    if zeros.shape != scales.shape or values.shape[1] % num_groups:
        raise ValueError(
            f"zeros of the shape {tuple(zeros.shape)} and scales of the shape "
            f"{tuple(scales.shape)} do not match weights with {values.shape[1]} inputs"
        )
    return IntegerWeight(values, scales, zeros, values.shape[1] // num_groups, bits=4)


def _in_order(packed: Tensor) -> Tensor:
    """Unpack the integers of each row as uint8, and sort the integers by output."""
    places = torch.tensor([_ORDER.index(output) for output in range(8)])
    values = unpack_integers(packed, 4)
    return values.view(len(values), -1, 8)[:, :, places].flatten(1)
