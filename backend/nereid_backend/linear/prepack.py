# SPDX-License-Identifier: Apache-2.0
"""Converts the weights of linear layers into the layout of the CPU kernels when a model is loaded.

On a CPU, torch computes float32 products with a library that does not use the widest vectors of
every processor. The library also converts the layout of the weight in every call. Packed layers
avoid both costs.

If the processor has AVX2 or 512-bit vectors, the kernels of native_linear.py compute the products.
On other processors, oneDNN computes the products. docs/history/cpu-kernels.md contains the
measurements.
"""

import collections
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from nereid_backend.freed_memory import FreedMemory, discard_file_pages
from nereid_backend.linear import native_linear
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.loading_progress import no_progress, report_items

LinearClass = TypeVar("LinearClass", bound=nn.Linear)

_DTYPES = (torch.float32, torch.bfloat16)
# oneDNN optimises the layout of a weight for inputs with this number of rows. Other numbers of rows
# also work.
_EXPECTED_INPUT_ROWS = 256


class PackedLinear(nn.Linear):
    """A linear layer for inference on a CPU. The weight has the layout of oneDNN.

    If no other layer shares the weight, the attribute `weight` contains only NaN. It has the
    original shape, dtype and device. Some model code reads `weight` instead of calling the layer.
    The result of such code is NaN, and the self-check detects the NaN.
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output [..., out_features] of the layer for an input [..., in_features]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, self.bias, "none", [], ""
        )
        return result


@torch.inference_mode()
def prepack_linears(
    model: nn.Module,
    *,
    copy_shared: bool = False,
    progress: Callable[[str], None] = no_progress,
) -> int:
    """Convert the weights of a model's linear layers for the CPU kernels.

    Only layers of the class `nn.Linear` in float32 or bfloat16 on a CPU are converted.

    Args:
        model: the model. Mutated. Afterwards, the model cannot be trained, saved or moved.
        copy_shared: whether layers that share a weight with another module are also converted. For
            example, an output layer may share its weight with the embedding. Each of these layers
            gets a packed copy of the weight, which needs additional memory.
        progress: this function is called with a line of text every few seconds.

    Returns:
        The number of converted layers.
    """
    shared = shared_weights(model)
    freed = FreedMemory()  # returns the memory of the original weights to the operating system
    count = 0
    for module in report_items(list(model.modules()), "packing modules", progress):
        if type(module) is not nn.Linear:
            continue
        is_shared = module.weight.data_ptr() in shared
        if is_shared and not copy_shared:
            continue
        num_bytes = module.weight.nbytes
        if _prepack(module, keep=is_shared):
            count += 1
            freed.add(num_bytes)
    return count


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 weights about as fast as float32 weights."""
    if native_linear.is_available():
        return True
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def shared_weights(model: nn.Module) -> set[int]:
    """Return the memory addresses of the parameters that more than one module of a model uses."""
    counts = collections.Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {address for address, count in counts.items() if count > 1}


def output_layer_of(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes the logits of a transformers model; None if there is none."""
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    return None if get_output_embeddings is None else get_output_embeddings()


def free_weight(layer: nn.Linear | nn.Embedding) -> None:
    """Replace the weight of a layer by a tensor without data, so that the memory is freed.

    The placeholder has the shape of the weight, but stores only a single number, NaN, for all
    elements. Mutates: layer.
    """
    placeholder = torch.full((1, 1), float("nan"), dtype=layer.weight.dtype)
    layer.weight = nn.Parameter(placeholder.expand(layer.weight.shape), requires_grad=False)


def change_class(layer: nn.Linear, kind: type[LinearClass]) -> LinearClass:
    """Change the class of an existing layer object, and return the layer.

    The layer remains the same object, so its bias, its name and the references to it stay valid.
    Mutates: layer.
    """
    layer.__class__ = kind
    assert isinstance(layer, kind)  # Only the type checker needs this assertion.
    return layer


def _prepack(layer: nn.Linear, *, keep: bool) -> bool:
    """Convert the weight of one layer to the layout of the fastest CPU kernel.

    Args:
        layer: the layer. Mutated: its class and its weight change.
        keep: whether other layers share the weight. If so, the weight stays in memory unchanged.

    Returns:
        Whether the weight was converted. False if no kernel supports the weight.
    """
    result = _pack_weight(layer.weight.detach())
    if result is None:
        return False
    packed_class, packed = result
    if not keep:
        free_weight(layer)
    change_class(layer, packed_class)
    # The tensor is registered as a buffer, so that torch.export treats it as part of the model.
    layer.register_buffer("packed", packed, persistent=False)
    return True


def _pack_weight(weight: Tensor) -> tuple[type[nn.Linear], Tensor] | None:
    """Return the fastest layer class for a weight, and the weight in the layout of this class.

    Return None if no class supports the weight. If the weight is in a memory-mapped file, the pages
    of the file are returned to the operating system, because they are no longer needed.
    """
    if native_linear.can_pack(weight):
        return NativeLinear, native_linear.pack(weight, release=discard_file_pages)
    if _can_reorder(weight):
        # oneDNN optimises the layout for inputs with `_EXPECTED_INPUT_ROWS` rows.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_INPUT_ROWS)
        discard_file_pages(weight)
        return PackedLinear, packed
    return None


def _can_reorder(weight: Tensor) -> bool:
    """Return whether this build of torch has oneDNN operators that support the weight."""
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_library or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or 0 in weight.shape:
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
