# SPDX-License-Identifier: Apache-2.0
"""The layouts of checkpoints with 8-bit floating-point weights.

Sources: FP8Linear and Fp8Dequantize in transformers 5.23, integrations/finegrained_fp8.py, and the
function weight_dequant in the inference code of the checkpoints, which has one scale for each block
of 128 x 128 weights.

    weight            float8 [out_features, in_features]
    weight_scale_inv  float32 [row blocks, column blocks], or one number for the whole weight
    weight_scale      another name of weight_scale_inv; may also contain one scale for each row

weight = float8 * scale, although the name weight_scale_inv suggests a division. The weights of
stacked experts have a third dimension. The tensors of stacked experts have names such as
`experts.down_proj` and `experts.down_proj_scale_inv`.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import scale_blocks
from nereid_backend.checkpoints.layout import Format, Layout, Settings

FLOAT8 = ("F8_E4M3", "F8_E5M2")
# The name suffixes of tensors that contain scales or zero points for activations or for the KV
# cache. These tensors are ignored, because the engine does not quantise activations.
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
    ".k_zero_point",
    ".v_zero_point",
    ".q_zero_point",
    ".output_zero_point",
    ".input_global_scale",
)
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_EXPERT_SCALES = ("_scale_inv", "_scale")


def fp8_format(settings: Settings) -> Format:
    """Return the layouts of a checkpoint with 8-bit floating-point weights."""
    block = settings.get("weight_block_size")
    shape = (int(block[0]), int(block[1])) if block else None
    return Format(float8_layouts(shape), ACTIVATION_SCALES)


def float8_layouts(block: tuple[int, int] | None) -> tuple[Layout, ...]:
    """Return the float8 layouts: one for each possible name of the tensor that contains the scales.

    A layout lists the tensors of one weight, and contains the function that decodes them. Examples:
    the weight of the layer "mlp.up_proj" consists of the tensors "mlp.up_proj.weight" and
    "mlp.up_proj.weight_scale". The weights of several experts consist of the tensors
    "experts.down_proj" and "experts.down_proj_scale".

    `block` is the number of rows and the number of columns of a block. Each block has one scale.
    `block` is None if the weights are not divided into blocks.
    """
    suffixes = [(".weight", scale) for scale in _SCALES]
    # The name of a tensor with the weights of several experts has no suffix: "experts.down_proj".
    suffixes += [("", scale) for scale in _EXPERT_SCALES]
    return tuple(_float8_layout(main, scale, block) for main, scale in suffixes)


def _float8_layout(main: str, scale: str, block: tuple[int, int] | None) -> Layout:
    """Return the layout of a float8 weight.

    `main` is the suffix of the tensor that contains the weight, and also the suffix of the weight's
    name in the model. `scale` is the suffix of the tensor that contains the scales.
    """
    decode = partial(_decode, main=main, scale=scale, block=block)
    return Layout(main, (scale,), decode, target=main, main_dtypes=FLOAT8)


def _decode(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    main: str,
    scale: str,
    block: tuple[int, int] | None,
) -> Tensor:
    """Decode a float8 weight: multiply its numbers by the scales, and convert the products.

    A checkpoint with blocks can contain other layers with one scale, or with one scale for each
    row. Therefore, the shape of the scales determines whether the weight has blocks.

    Args:
        tensors: the tensors of the weight, by suffix.
        dtype: the data type of the result.
        main: the suffix of the tensor that contains the numbers.
        scale: the suffix of the tensor that contains the scales.
        block: the number of rows and columns of a block; None if the checkpoint has no blocks.
    """
    values, scales = tensors[main], tensors[scale]
    has_one_scale = scales.dim() < 2 or scales.numel() <= 1
    has_scales_of_rows = tuple(scales.shape) == (*values.shape[:-1], 1)
    has_blocks = not has_one_scale and not has_scales_of_rows
    return scale_blocks(values, scales, dtype, block if has_blocks else None)
