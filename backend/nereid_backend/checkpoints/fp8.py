# SPDX-License-Identifier: Apache-2.0
"""The layouts of checkpoints with 8-bit floating-point weights.

Source: FP8Linear and Fp8Dequantize in transformers 5.23, integrations/finegrained_fp8.py, and the
inference code that is published with the checkpoints (weight_dequant: one scale for each block of
128 x 128 weights).

    weight            float8 [out_features, in_features]
    weight_scale_inv  float32 [row blocks, column blocks], or one number for the weight
    weight_scale      the same scales, as other tools name them; also one scale for each row

weight = float8 * scale, although the name is weight_scale_inv. Stacked experts have a third
dimension, and the names `experts.down_proj` and `experts.down_proj_scale_inv`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import scale_blocks
from nereid_backend.checkpoints.layout import Decoder, Format, Layout, Settings

FLOAT8 = ("F8_E4M3", "F8_E5M2")
# The suffixes of scales for activations and for the KV cache. These scales are ignored, because the
# engine computes its own scales.
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_scale_inv",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".attn_scale",
    ".output_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
)
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")


def fp8_format(settings: Settings) -> Format:
    """Return the layouts of a checkpoint with 8-bit floating-point weights."""
    block = settings.get("weight_block_size")
    shape = (int(block[0]), int(block[1])) if block else None
    return Format(float8_layouts(shape), ACTIVATION_SCALES)


def float8_layouts(block: tuple[int, int] | None) -> tuple[Layout, ...]:
    """Return the layouts of float8 weights. `block` is the shape of a block of weights."""
    layers = [
        Layout(".weight", (scale,), _decoder(".weight", scale, block), main_dtypes=FLOAT8)
        for scale in _SCALES
    ]
    experts = [
        Layout("", (scale,), _decoder("", scale, block), target="", main_dtypes=FLOAT8)
        for scale in ("_scale_inv", "_scale")
    ]
    return (*layers, *experts)


def _decoder(main: str, scale: str, block: tuple[int, int] | None) -> Decoder:
    def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = tensors[scale]
        has_blocks = block is not None and scales.dim() >= 2 and scales.numel() > 1
        return scale_blocks(tensors[main], scales, dtype, block if has_blocks else None)

    return decode
