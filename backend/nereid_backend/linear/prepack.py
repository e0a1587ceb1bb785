# SPDX-License-Identifier: Apache-2.0
"""Linear layers in the layout that a CPU's matrix products read, made once after loading.

On a CPU torch's own float32 product goes to a library that does not use every machine's widest
vectors, and lays the weight out anew on every call. With 512-bit vectors the products are our own
(native_linear.py), elsewhere oneDNN's. docs/performance.md has the figures.
"""

import torch
from torch import Tensor, nn

from nereid_backend.linear import native_linear
from nereid_backend.linear.native_linear import NativeLinear

_DTYPES = (torch.float32, torch.bfloat16)
# The layout is chosen for this many rows; any number runs.
_ROWS = 256


class PackedLinear(nn.Linear):
    """A linear layer whose weight is kept in oneDNN's layout; inference on a CPU only.

    ``weight`` still tells shape, dtype and device, but its numbers are NaN, unless others share
    them: code that reads them instead of calling the layer gets answers that nobody can take for
    right ones.
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the weight's dtype."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, self.bias, "none", [], ""
        )
        return result


@torch.inference_mode()
def prepack_linears(model: nn.Module, *, copy_shared: bool = False) -> int:
    """Lay out the weights of a model's linear layers for this processor.

    Layers that are no plain ``nn.Linear`` or not in float32 or bfloat16 on a CPU stay as they are.

    Args:
        model: mutated; it can then neither be trained, saved nor moved.
        copy_shared: give layers whose weight is shared (an output layer tied to the embedding) a
            packed copy of it, which takes its memory once more; else they stay as they are.

    Returns:
        How many layers were changed.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter.data_ptr()] = owners.get(parameter.data_ptr(), 0) + 1
    count = 0
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            is_shared = owners[module.weight.data_ptr()] > 1
            if copy_shared or not is_shared:
                count += _prepack(module, keep=is_shared)
    return count


def _prepack(layer: nn.Linear, *, keep: bool) -> bool:
    weight = layer.weight.detach()
    kind: type[nn.Linear]
    if native_linear.can_pack(weight):
        kind, packed = NativeLinear, native_linear.pack(weight)
    elif _can_reorder(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        kind = PackedLinear
    else:
        return False
    if not keep:
        hollow = torch.full((1, 1), float("nan"), dtype=weight.dtype).expand(weight.shape)
        layer.weight = nn.Parameter(hollow, requires_grad=False)
    layer.__class__ = kind
    # A buffer, so that who traces the model sees that it is the checkpoint's.
    layer.register_buffer("packed", packed, persistent=False)
    return True


def _can_reorder(weight: Tensor) -> bool:
    """Whether this build of torch has oneDNN's operators, and they take the weight."""
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_library or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or 0 in weight.shape:
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
