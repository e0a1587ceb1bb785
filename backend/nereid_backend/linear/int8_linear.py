# SPDX-License-Identifier: Apache-2.0
"""Linear layers for CPUs with weights of 8-bit integers.

Each output has a scale: weight[o][i] = integer[o][i] * scale[o]. Activations are not quantised. The
weights take a quarter of the memory of float32, or half of the memory of bfloat16. A C++ kernel
reads the integers directly. The speed of bfloat16 with many rows is limited by arithmetic, so the
weights are then converted to bfloat16 for each call, and torch computes the product.
docs/history/cpu-kernels.md has the measurements.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_library import has_kernels, kernels
from nereid_backend.linear.native_linear import LANES
from nereid_backend.linear.prepack import free_weight, shared_weights

_DTYPES = (torch.float32, torch.bfloat16)
# The largest stored integer.
_LARGEST = 127
# The smallest scale that is used as a divisor, so that a row of zeros is not divided by zero.
_MIN_SCALE = 1e-30
# For more rows than this, torch's bfloat16 product with converted weights is faster than the
# kernel. In float32, the kernel was faster for all numbers of rows.
_MAX_KERNEL_BFLOAT16_ROWS = 96


class Int8Linear(nn.Linear):
    """A linear layer whose weight is stored as integers. It supports only inference on a CPU.

    `weight` has the original shape, dtype and device, but its numbers are NaN unless other layers
    share them; see `PackedLinear`.

    Attributes:
        packed: int8 [panels, in_features, 16], the weights in panels of 16 outputs.
        scales: float32 [panels * 16], the scale of each output.
        is_native: whether the C++ kernel can be used.
    """

    packed: Tensor
    scales: Tensor
    is_native: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out_features] for [..., in_features], in the input's dtype."""
        num_rows = input.numel() // self.in_features
        has_many_rows = input.dtype == torch.bfloat16 and num_rows > _MAX_KERNEL_BFLOAT16_ROWS
        if self.is_native and not has_many_rows:
            rows = input.reshape(num_rows, self.in_features)
            output = self._run_kernel(rows).to(input.dtype).view(*input.shape[:-1], -1)
        else:
            weight = self.packed.transpose(1, 2).reshape(-1, self.in_features).to(input.dtype)
            output = functional.linear(input, weight) * self.scales.to(input.dtype)
        output = output[..., : self.out_features]
        return output if self.bias is None else output + self.bias

    def _run_kernel(self, rows: Tensor) -> Tensor:
        """Return the outputs without bias, [num_rows, panels * 16] float32.

        Args:
            rows: the inputs, [num_rows, in_features].
        """
        rows = rows.float().contiguous()
        output = rows.new_empty(len(rows), self.scales.numel())
        kernels().nereid_linear_int8(
            self.packed.data_ptr(),
            self.scales.data_ptr(),
            rows.data_ptr(),
            output.data_ptr(),
            len(rows),
            self.in_features,
            self.packed.shape[0],
            torch.get_num_threads(),
        )
        return output


@torch.inference_mode()
def quantise_linears(model: nn.Module) -> int:
    """Convert the weights of a model's linear layers to integers.

    Only layers of the class `nn.Linear` in float32 or bfloat16 on a CPU are converted. If other
    layers share a weight, as an embedding and an output layer may, the weight is copied.

    Args:
        model: the model. Mutated; it can then neither be trained, saved nor moved.

    Returns:
        The number of converted layers.
    """
    shared = shared_weights(model)
    is_native = has_kernels()
    count = 0
    for module in list(model.modules()):
        weight = module.weight if type(module) is nn.Linear else None
        if weight is None or weight.device.type != "cpu" or weight.dtype not in _DTYPES:
            continue
        if 0 in weight.shape:
            continue
        _quantise(module, keep=weight.data_ptr() in shared, is_native=is_native)
        count += 1
    return count


def model_bytes(model: nn.Module) -> int:
    """Return the size of a model in bytes: its parameters, buffers and packed weights."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        attributes = vars(module).values()
        # The packed weights of an Int8Linear are attributes of the module, not buffers.
        tensors += [a for a in attributes if isinstance(a, Tensor) and not a.is_mkldnn]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _quantise(layer: nn.Module, *, keep: bool, is_native: bool) -> None:
    """Convert one layer to an Int8Linear.

    Example: the weights [0.5, -1.27] of one output become the integers [50, -127] and the scale
    0.01.

    Args:
        layer: the layer, of the class nn.Linear. Mutated.
        keep: whether other layers share the weight, so that its numbers must stay.
        is_native: whether the C++ kernel can be used.
    """
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach().float()
    scales = weight.abs().amax(1) / _LARGEST
    integers = (weight / scales.clamp(min=_MIN_SCALE).unsqueeze(1)).round()
    pad = -weight.shape[0] % LANES
    integers = functional.pad(integers, (0, 0, 0, pad)).to(torch.int8)
    # The weights of 16 outputs for one input are contiguous, so that one vector can load them.
    packed = integers.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()
    if not keep:
        free_weight(layer)
    layer.__class__ = Int8Linear
    layer.packed = packed
    layer.scales = functional.pad(scales, (0, pad))
    layer.is_native = is_native  # type: ignore[assignment]
