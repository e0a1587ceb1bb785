# SPDX-License-Identifier: Apache-2.0
"""Linear layers for GPUs. The weights are stored as 8-bit floating point numbers (e4m3).

The weights need half of the memory of bfloat16 weights. Each call also rounds its input to e4m3,
because the GPU multiplies two e4m3 matrices. If the device supports scales for each row, each row
of the weight (one output) and each row of the input has its own scale. Otherwise, each matrix has
one scale.

docs/history/gpu-kernels.md contains the rounding errors. The speed has not been measured on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nereid_backend.linear.prepack import change_class, output_layer_of, shared_weights

_DTYPE = torch.float8_e4m3fn
# The largest number that the format e4m3 can represent.
_LARGEST = 448.0
# The smallest scale. A row of zeros gets this scale, so that its numbers are not divided by 0.
_MIN_SCALE = 1e-12
# The kernels can multiply a matrix only if the number of its rows and the number of its columns are
# multiples of `_MULTIPLE`.
_MULTIPLE = 16
# When a model is loaded, the product of two test matrices is compared with the exact product.
# `_TOLERANCE` is the largest accepted relative error. Rounding to 3 mantissa bits causes an error
# of 0.04, and a wrong scale causes an error of more than 0.3.
_TOLERANCE = 0.1
_NUM_TEST_ROWS = 5


@dataclass(frozen=True, slots=True)
class Float8Product:
    """A method that multiplies two matrices of the data type e4m3.

    Attributes:
        has_row_scales: whether each row of a matrix has its own scale. If False, each matrix has
            one scale.
    """

    has_row_scales: bool

    def rounded(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Round a matrix to e4m3, and return the rounded matrix and its scales in float32.

        The scales have the shape [rows, 1], or [] if the matrix has one scale.

        Example with one scale: the matrix is [[1.0, -4.48]], so the scale is 0.01. The division by
        the scale gives [[100, -448]], and rounding to e4m3 gives [[96, -448]].
        """
        wide = matrix.float()
        largest = wide.abs().amax(1, keepdim=True) if self.has_row_scales else wide.abs().amax()
        scales = (largest / _LARGEST).clamp(min=_MIN_SCALE)
        return (wide / scales).clamp(-_LARGEST, _LARGEST).to(_DTYPE), scales

    def multiply(self, rows: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        """Return `rows` times the transposed weight, as a matrix [num_rows, out_features].

        Args:
            rows: [num_rows, in_features], in the model's data type.
            weight: [out_features, in_features] e4m3.
            weight_scales: the scales of the weight, as `rounded` returned them.
        """
        rounded_rows, row_scales = self.rounded(rows)
        dtype = rows.dtype
        if self.has_row_scales:
            # The weight is transposed, so its scales must be transposed, too.
            weight_scales = weight_scales.t()
            # If each row has its own scale, torch can compute only a bfloat16 result.
            dtype = torch.bfloat16
        product: Tensor = torch._scaled_mm(
            rounded_rows, weight.t(), scale_a=row_scales, scale_b=weight_scales, out_dtype=dtype
        )
        return product.to(rows.dtype)


class Float8Linear(nn.Linear):
    """A linear layer for inference. The weight is stored as e4m3.

    The attribute `weight` contains only NaN. It has the original shape, dtype and device. Some
    model code reads `weight` instead of calling the layer. The result of such code is NaN, and the
    self-check detects the NaN.

    Attributes:
        stored: [out_features, in_features] e4m3.
        scales: the scales of the weight; see `Float8Product.rounded`.
        product: the method by which the device multiplies matrices.
    """

    stored: Tensor
    scales: Tensor
    product: Float8Product

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output [..., out_features] of the layer for an input [..., in_features]."""
        rows = input.reshape(-1, self.in_features)
        output = self.product.multiply(rows, self.stored, self.scales)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def find_product(device: torch.device, dtype: torch.dtype) -> Float8Product | None:
    """Return the first method that multiplies e4m3 matrices accurately on a device.

    e4m3 is an 8-bit floating-point format. Each method computes a small product, which is compared
    with the exact product. Return None if no method works.

    Args:
        device: the device that computes the product.
        dtype: the data type of the model.
    """
    # One scale for each row is more accurate than one scale for the whole matrix, so it is tried
    # first.
    for product in (Float8Product(has_row_scales=True), Float8Product(has_row_scales=False)):
        if _is_accurate(product, device, dtype):
            return product
    return None


def _is_accurate(product: Float8Product, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a method multiplies two random matrices accurately.

    Return False if the device or this version of torch does not support the method.
    """
    generator = torch.Generator().manual_seed(0)
    num_inputs, num_outputs = 4 * _MULTIPLE, 3 * _MULTIPLE
    rows = torch.randn(_NUM_TEST_ROWS, num_inputs, generator=generator).to(device, dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(device, dtype)
    exact = rows.float() @ weight.float().t()
    try:
        result = product.multiply(rows, *product.rounded(weight)).float()
    except (RuntimeError, NotImplementedError):
        return False
    return bool((result - exact).norm() <= _TOLERANCE * exact.norm())


@torch.inference_mode()
def store_linears_as_float8(model: nn.Module, product: Float8Product) -> int:
    """Replace the weights of a model's linear layers with weights in the format e4m3.

    The output layer is not converted, because rounding its weight would change all logits directly.
    A layer is also not converted if another layer shares its weight, or if a size of the layer is
    not a multiple of 16.

    Args:
        model: the model. Mutated. Afterwards, the model cannot be trained or saved.
        product: the method by which the device multiplies matrices; see `find_product`.

    Returns:
        The number of converted layers.
    """
    shared = shared_weights(model)
    output_layer = output_layer_of(model)
    count = 0
    for module in model.modules():
        if type(module) is not nn.Linear or module is output_layer:
            continue
        is_shared = module.weight.data_ptr() in shared
        has_supported_sizes = (
            module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
        )
        if is_shared or not has_supported_sizes:
            continue
        _convert(module, product)
        count += 1
    return count


def _convert(layer: nn.Module, product: Float8Product) -> None:
    """Convert one layer of the class nn.Linear to a Float8Linear. Mutates: layer."""
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach()
    stored, scales = product.rounded(weight)
    placeholder = torch.full((1, 1), float("nan"), dtype=weight.dtype, device=weight.device)
    layer.weight = nn.Parameter(placeholder.expand(weight.shape), requires_grad=False)
    float8_layer = change_class(layer, Float8Linear)
    # The tensors are registered as buffers, so that torch.export treats them as part of the model.
    layer.register_buffer("stored", stored, persistent=False)
    layer.register_buffer("scales", scales, persistent=False)
    float8_layer.product = product
