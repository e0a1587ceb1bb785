# SPDX-License-Identifier: Apache-2.0
"""Lets the embedding of a model read its rows from packed weights.

Many models use the weight of the embedding also as the weight of the output layer. The kernels for
linear layers need this weight in panels (see `NativeLinear` and `GroupedLinear`). If the embedding
reads its rows from the panels of the output layer, the weight is in memory only once.

If the weights of the linear layers are rounded to integers, an embedding with a weight of its own
is rounded to 8-bit integers, too.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nereid_backend.linear import native_linear
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.integer_layout import dequantise_rows
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import free_weight, output_layer_of
from nereid_backend.linear.quantise_weights import can_quantise, round_layer_in_place

# If an embedding does not share its weight with the output layer, the embedding is rounded to this
# number of bits.
_EMBEDDING_BITS = 8
# The names of the buffers in which packed embeddings store their weights. Each embedding class uses
# only some of these buffers.
_PACKED_BUFFERS = ("packed", "values", "scales", "zeros")


class _PackedEmbedding(nn.Embedding):
    """An embedding that reads packed weights. The attribute `weight` contains only NaN.

    Some model code reads `weight` instead of calling the embedding. The result of such code is NaN,
    and `pack_embedding` detects the NaN.
    """


class NativeEmbedding(_PackedEmbedding):
    """An embedding that reads the weight of a NativeLinear. The values are not changed.

    Attributes:
        packed: see `NativeLinear.packed`. An output of the linear layer is a row of the embedding.
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows [..., embedding_dim] for the indices [...]."""
        return native_linear.unpack_rows(self.packed, input)

    def take_weight(self, layer: NativeLinear) -> None:
        """Let this embedding read its rows from the packed weight of `layer`."""
        self.register_buffer("packed", layer.packed, persistent=False)


class GroupedEmbedding(_PackedEmbedding):
    """An embedding that reads the integers and scales of a GroupedLinear.

    Attributes:
        values: see `GroupedLinear`. An output of the linear layer is a row of the embedding.
        scales: see `GroupedLinear`.
        zeros: see `GroupedLinear`.
        bits: see `GroupedLinear`.
        group_size: see `GroupedLinear`.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the embedding vectors of the given indices as floating-point numbers."""
        rows = dequantise_rows(
            input, self.values, self.scales, self.zeros, bits=self.bits, group_size=self.group_size
        )
        return rows[..., : self.embedding_dim].to(self.weight.dtype)

    def take_weight(self, layer: GroupedLinear) -> None:
        """Let this embedding read its rows from the integers and scales of `layer`."""
        self.bits = layer.bits
        self.group_size = layer.group_size
        for name in ("values", "scales", "zeros"):
            self.register_buffer(name, getattr(layer, name), persistent=False)


@torch.inference_mode()
def pack_embedding(
    model: PreTrainedModel, is_correct: Callable[[], bool], *, can_round: bool
) -> bool:
    """Let the embedding of a model read its rows from a packed weight, to save memory.

    A packed weight has the layout of the CPU kernels. An embedding that shares its weight with a
    packed output layer reads the rows from the weight of this layer. Any other embedding is rounded
    to 8-bit integers if `can_round` is True. If the model does not work afterwards, the change is
    undone.

    A model for images or audio stays unchanged. Some code for images reads the weight of the
    embedding directly, and `is_correct` would not detect this.

    Args:
        model: the model. `prepack_linears` or `quantise_linears` has packed its linear layers.
            Mutated.
        is_correct: runs the model, and returns whether the output contains no NaN.
        can_round: whether the weight of the embedding may be rounded.

    Returns:
        Whether the embedding now reads packed weights.
    """
    is_text_model = model.config.get_text_config(decoder=True) is model.config
    embedding = model.get_input_embeddings()
    if not is_text_model or not isinstance(embedding, nn.Embedding):
        return False
    layer = _packed_layer_for(model, embedding, can_round=can_round)
    if layer is None:
        return False
    original_class, original_weight = type(embedding), embedding.weight
    # A tied embedding shares its weight with the output layer. The memory of the unpacked weight is
    # freed only if neither of them refers to the weight any more.
    is_tied = layer is output_layer_of(model)
    is_working = False
    try:
        _read_rows_from(embedding, layer)
        if is_tied:
            free_weight(layer)
        # The attribute `weight` of the embedding now contains NaN. If code of the model still reads
        # this attribute, the output of the model contains NaN.
        is_working = is_correct()
    finally:
        if not is_working:  # undo the change
            _restore_embedding(embedding, original_class, original_weight)
            if is_tied:
                layer.weight = original_weight
    return is_working


def _packed_layer_for(
    model: PreTrainedModel, embedding: nn.Embedding, *, can_round: bool
) -> NativeLinear | GroupedLinear | None:
    """Return a packed linear layer whose weight contains the rows of the embedding.

    The weights of the layer's output i are the embedding's row i. If the output layer shares its
    weight with the embedding, the result is the output layer. Otherwise, the result is a new layer,
    whose weights are rounded to 8-bit integers. Return None if the embedding must stay unchanged,
    because it may not or cannot be rounded.
    """
    weight = embedding.weight
    if embedding.max_norm is not None:
        return None  # The embedding changes its weight when it is called.
    output_layer = output_layer_of(model)
    if isinstance(output_layer, NativeLinear | GroupedLinear) and output_layer.weight is weight:
        return output_layer
    if not can_round or not can_quantise(weight):
        return None
    num_rows, dim = weight.shape
    layer = nn.Linear(dim, num_rows, bias=False, device="meta")  # has a shape, but no weights yet
    return round_layer_in_place(layer, lambda start, end: weight[start:end], _EMBEDDING_BITS)


def _read_rows_from(embedding: nn.Embedding, layer: NativeLinear | GroupedLinear) -> None:
    """Let an embedding read its rows from the packed weight of a linear layer.

    The embedding remains the same object, but its class changes. Mutates: embedding.
    """
    packed_class = NativeEmbedding if isinstance(layer, NativeLinear) else GroupedEmbedding
    embedding.__class__ = _packed_class(type(embedding), packed_class)
    embedding.take_weight(layer)  # type: ignore[operator]
    free_weight(embedding)


def _restore_embedding(
    embedding: nn.Embedding, original_class: type[nn.Embedding], original_weight: Tensor
) -> None:
    """Undo `_read_rows_from`. Mutates: embedding."""
    embedding.__class__ = original_class
    embedding.weight = original_weight
    for name in _PACKED_BUFFERS:
        embedding._buffers.pop(name, None)


def _packed_class(
    original_class: type[nn.Embedding], packed_class: type[_PackedEmbedding]
) -> type[_PackedEmbedding]:
    """Return a class that behaves like `original_class`, but reads its rows from packed weights.

    Example: `original_class.forward` multiplies the rows of `super().forward(ids)` by a factor. In
    the new class, the packed rows are multiplied.
    """
    if original_class is nn.Embedding:
        return packed_class
    name = f"{packed_class.__name__}Of{original_class.__name__}"
    # The new class uses the methods of the first base class, `original_class`. If such a method
    # calls `super()`, the call refers to the second base class, `packed_class`, instead of
    # nn.Embedding.
    bases = (original_class, packed_class)
    # pickle cannot find this class by its name, so `_reduce` defines how to restore an object.
    members = {"__reduce__": _reduce}
    return cast("type[_PackedEmbedding]", type(name, bases, members))


def _reduce(embedding: _PackedEmbedding) -> tuple[Any, ...]:
    """Return the function and the arguments with which pickle restores an embedding.

    `_packed_class` has created the class of the embedding.

    pickle stores only the name of a class, but the other process cannot find this class by name.
    """
    return _new_embedding, type(embedding).__bases__, embedding.__dict__


def _new_embedding(
    original_class: type[nn.Embedding], packed_class: type[_PackedEmbedding]
) -> _PackedEmbedding:
    """Return an embedding without attributes. `pickle` sets the attributes afterwards."""
    new_class = _packed_class(original_class, packed_class)
    return new_class.__new__(new_class)
