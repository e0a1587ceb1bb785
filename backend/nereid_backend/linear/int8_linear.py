# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 8 bits, for CPUs.

Each output has a scale; activations stay as they are. A quarter of float32's memory, half of
bfloat16's. A native kernel reads each weight once as it is stored; for many rows in bfloat16, which
are bound by arithmetic, the weights are widened for the call. docs/memory.md has the figures.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.attention.cpu.cpu_attention import has_kernels, kernels

_DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
_LARGEST = 127
# With more rows bfloat16's own matrix product over widened weights is faster; float32's never was.
_MOST_BFLOAT16_ROWS = 96


class Int8Linear(nn.Linear):
    """A linear layer whose weight is kept as integers; inference on a CPU only.

    ``weight`` still tells shape, dtype and device, but its numbers are NaN, unless others share
    them, as in `PackedLinear`.
    """

    packed: Tensor
    scales: Tensor
    is_native: bool

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        num_rows = input.numel() // self.in_features
        is_many = input.dtype == torch.bfloat16 and num_rows > _MOST_BFLOAT16_ROWS
        if is_many or not self.is_native:
            widened = self.packed.transpose(1, 2).reshape(-1, self.in_features).to(input.dtype)
            found = functional.linear(input, widened) * self.scales.to(input.dtype)
        else:
            rows = input.reshape(num_rows, self.in_features).float().contiguous()
            found = rows.new_empty(num_rows, self.scales.numel())
            kernels().nereid_linear_int8(
                self.packed.data_ptr(),
                self.scales.data_ptr(),
                rows.data_ptr(),
                found.data_ptr(),
                num_rows,
                self.in_features,
                self.packed.shape[0],
                torch.get_num_threads(),
            )
            found = found.to(input.dtype).view(*input.shape[:-1], -1)
        found = found[..., : self.out_features]
        return found if self.bias is None else found + self.bias


@torch.inference_mode()
def quantise_linears(model: nn.Module) -> int:
    """Keep the weights of a model's linear layers as integers.

    Layers that are no plain ``nn.Linear`` or not in float32 or bfloat16 on a CPU stay as they are.
    A weight that others share, as an output layer's with the embedding, is copied.

    Args:
        model: mutated; it can then neither be trained, saved nor moved.

    Returns:
        How many layers were changed.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter.data_ptr()] = owners.get(parameter.data_ptr(), 0) + 1
    is_native = has_kernels()  # without them every call widens the weights
    count = 0
    for module in list(model.modules()):
        weight = module.weight if type(module) is nn.Linear else None
        if weight is None or weight.device.type != "cpu" or weight.dtype not in _DTYPES:
            continue
        if 0 in weight.shape:
            continue
        _quantise(module, keep=owners[weight.data_ptr()] > 1, is_native=is_native)
        count += 1
    return count


def model_bytes(model: nn.Module) -> int:
    """Memory of a model's parameters and buffers, and of what is kept of its packed layers."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own += [t for t in vars(module).values() if isinstance(t, Tensor) and not t.is_mkldnn]
        for tensor in own:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _quantise(layer: nn.Module, *, keep: bool, is_native: bool) -> None:
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach().float()
    scales = weight.abs().amax(1) / _LARGEST
    integers = (weight / scales.clamp(min=1e-30).unsqueeze(1)).round()
    pad = -weight.shape[0] % _LANES
    integers = functional.pad(integers, (0, 0, 0, pad)).to(torch.int8)
    # Sixteen outputs lie together, so that one vector holds a weight of each.
    packed = integers.view(-1, _LANES, weight.shape[1]).transpose(1, 2).contiguous()
    if not keep:
        hollow = torch.full((1, 1), float("nan"), dtype=layer.weight.dtype)
        layer.weight = nn.Parameter(hollow.expand(weight.shape), requires_grad=False)
    layer.__class__ = Int8Linear
    layer.packed, layer.scales = packed, functional.pad(scales, (0, pad))
    layer.is_native = is_native  # type: ignore[assignment]
