# SPDX-License-Identifier: Apache-2.0
"""Concatenates the matrices of LoRA adapters: one large product replaces many small products.

Each row of an input uses at most one adapter. The products of all other adapters are masked, which
means that they are set to 0.

The docstring of lora_layers.py explains the computation.
"""

import itertools
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nereid_backend.device_transfer import upload
from nereid_backend.linear import native_linear
from nereid_backend.linear.native_adapters import LayerPair
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import prepack_linears

Ranks = tuple[tuple[int, ...], ...]
"""For each linear layer of a group, the rank of each joined adapter."""


@dataclass(slots=True, eq=False)
class JoinedGroup:
    """Linear layers that get the same input, together with the LoRA matrices of these layers.

    An adapter has two matrices for a layer, lora_A (down) and lora_B (up). The group stores the
    concatenated lora_A matrices of all its layers and adapters.

    Attributes:
        down: a layer whose weight contains the first matrices of all linear layers and adapters.
        ranks: one tuple for each linear layer. The tuple contains the rank of each joined adapter.
        stored_input: the input for which `stored_hidden` was computed in this step.
        stored_hidden: the result of `masked_hidden` for `stored_input`; None if no result is
            stored.
    """

    down: nn.Linear
    ranks: Ranks
    stored_input: Tensor | None = None
    stored_hidden: Tensor | None = None

    def masked_hidden(self, layer_input: Tensor, step: "AdapterStep") -> Tensor:
        """Multiply the input of the layers by the first matrices (lora_A) of all adapters.

        Each layer of the group calls this method with the same tensor. Therefore, the first call of
        a step computes and stores the product, and the other calls return the stored product.
        `clear` deletes the product at the end of each step.

        Args:
            layer_input: [..., in_features].
            step: contains the adapter that each row uses.

        Returns:
            [num_rows, sum of ranks]. The columns of the adapters that a row does not use are 0.
        """
        if self.stored_hidden is not None and self.stored_input is layer_input:
            return self.stored_hidden
        down = self.down
        hidden = product(down, layer_input.reshape(-1, down.in_features).to(down.weight.dtype))
        # The masked numbers are replaced by 0 and not multiplied by 0, because NaN or infinity
        # times 0 is NaN.
        hidden.masked_fill_(step.unused_columns(self.ranks, len(hidden)), 0)
        self.stored_input = layer_input
        self.stored_hidden = hidden
        return hidden

    def clear(self) -> None:
        """Forget the stored input and product, so that the memory of these tensors is freed."""
        self.stored_input = self.stored_hidden = None


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """The concatenated matrices of several adapters for one linear layer.

    Attributes:
        group: the group of the linear layer.
        columns: the columns of `JoinedGroup.masked_hidden` that belong to the linear layer.
        up: a layer whose weight contains the second matrices of all adapters.
    """

    group: JoinedGroup
    columns: slice
    up: nn.Linear


def join_group(pairs: list[list[LayerPair | None]]) -> list[JoinedLayer]:
    """Concatenate the matrices that several LoRA adapters have for a group of linear layers.

    An adapter changes the output of a layer by up @ (down @ x). The matrices `down` of all layers
    are concatenated to one matrix. The matrices `up` are concatenated separately for each layer.

    Example: two adapters with the ranks 2 and 3 change q_proj and k_proj. The joined `down` has
    2 * (2 + 3) = 10 rows, and each joined `up` has 5 columns.

    Args:
        pairs: one list for each linear layer. The list contains the two matrices of each adapter,
            or None for each adapter that does not change the layer. At least one adapter changes
            each layer.

    Returns:
        The joined matrices of each linear layer.
    """
    present = [[pair for pair in layer_pairs if pair is not None] for layer_pairs in pairs]
    joined_down = torch.cat([pair.down for layer_pairs in present for pair in layer_pairs])
    joined_ups = [torch.cat([pair.up for pair in layer_pairs], dim=1) for layer_pairs in present]
    # Linear layers can be packed for fast products on a CPU.
    [down] = _linears_of_weights([joined_down])
    ups = _linears_of_weights(joined_ups)
    group = JoinedGroup(down, _ranks_of(pairs))
    # Divide the outputs of `down` among the layers, in order. Example: if each `up` has 5 inputs,
    # the first `up` gets the outputs 0 to 4, the second gets 5 to 9, and so on.
    ends = itertools.accumulate(up.in_features for up in ups)
    return [
        JoinedLayer(group, slice(end - up.in_features, end), up)
        for up, end in zip(ups, ends, strict=True)
    ]


def _ranks_of(pairs: list[list[LayerPair | None]]) -> Ranks:
    """Return the rank of each adapter in each layer; 0 if the adapter does not change the layer."""
    return tuple(
        tuple(0 if pair is None else len(pair.down) for pair in layer_pairs)
        for layer_pairs in pairs
    )


def _linears_of_weights(weights: list[Tensor]) -> list[nn.Linear]:
    """For each weight, [out_features, in_features], return a linear layer with this weight.

    The matrices have few rows or few columns. On a CPU, packed layers multiply such matrices
    several times as fast as torch.
    """
    layers = nn.ModuleList(map(_linear_of_weight, weights))
    prepack_linears(layers)
    return cast("list[nn.Linear]", list(layers))


class AdapterStep:
    """Describes which LoRA adapter each input row and each sequence of a forward pass uses.

    A chunk contains the rows of one sequence. Most layers compute one row for each token, and use
    the adapters of the rows. A model that stores compressed keys and values has a layer that
    expands the keys and values of all earlier tokens. This layer computes the same number of rows
    for each chunk, and uses the adapters of the chunks.

    An adapter is represented by its index among the joined adapters. The number -1 represents a row
    or a chunk without an adapter.
    """

    def __init__(self, row_adapters: Tensor, chunk_adapters: NDArray[np.int64]) -> None:
        """Create the description of a step.

        An adapter is represented by its index, and -1 means that no adapter is used.

        Args:
            row_adapters: for layers with one row for each token, the adapter of each row, int64
                [num_rows]. If all rows have the same adapter, [1] is enough.
            chunk_adapters: for layers with another number of rows, the adapter of each chunk (the
                rows of one sequence), int64 [num_chunks].
        """
        self._row_adapters = row_adapters
        self._chunk_adapters = chunk_adapters
        # The results of `unused_columns` in this forward pass. The keys are the arguments `ranks`
        # and `num_rows`.
        self._masks: dict[tuple[Ranks, int], Tensor] = {}

    @classmethod
    def for_all_rows(cls, device: torch.device) -> Self:
        """Return the description of a step in which all rows use the adapter with the index 0."""
        return cls(torch.zeros(1, dtype=torch.int64, device=device), np.zeros(1, dtype=np.int64))

    def unused_columns(self, ranks: Ranks, num_rows: int) -> Tensor:
        """Return a mask that is True where the row does not use the adapter of the column.

        The mask applies to the product of a layer's input and the concatenated matrices `down` of
        several adapters. The product has one column for each rank of each adapter.

        Example: the rows use the adapters [0, 1], and `ranks` is ((1, 2),). Column 0 belongs to
        adapter 0, and the columns 1 and 2 belong to adapter 1. The mask is
        [[False, True, True], [True, False, False]].

        Args:
            ranks: for each linear layer of a group, the ranks of the adapters.
            num_rows: the number of rows that the layer computes.

        Returns:
            Booleans, [num_rows, sum of ranks]. If one adapter applies to all rows, the shape is
            [1, sum of ranks].
        """
        mask = self._masks.get((ranks, num_rows))
        if mask is None:
            row_adapters = self._adapters_of_rows(num_rows)
            column_adapters = torch.cat([_adapters_of_columns(one_layer) for one_layer in ranks])
            mask = row_adapters[:, None] != column_adapters.to(row_adapters.device)
            self._masks[ranks, num_rows] = mask
        return mask

    def _adapters_of_rows(self, num_rows: int) -> Tensor:
        """Return the adapter of each input row, for a layer whose input has `num_rows` rows.

        Most layers compute one row for each token of the step. Any other layer computes the same
        number of rows for each chunk.
        """
        if len(self._row_adapters) in (1, num_rows):
            return self._row_adapters
        rows_per_chunk = num_rows // len(self._chunk_adapters)
        return upload(self._chunk_adapters.repeat(rows_per_chunk), self._row_adapters.device)


def _adapters_of_columns(ranks: tuple[int, ...]) -> Tensor:
    """Return the adapter index of each column, given the number of columns of each adapter.

    `ranks` contains the number of columns of each adapter. Example: (1, 2) gives [0, 1, 1].
    """
    return torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks))


def product(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Return the output of a layer for `rows`. The layer must have no bias.

    A step calls packed layers hundreds of times. Therefore, the kernel is called directly, without
    the overhead of a module call.
    """
    if isinstance(layer, NativeLinear):
        return native_linear.linear(rows, layer.packed, None, layer.out_features)
    output: Tensor = layer(rows)
    return output


def _linear_of_weight(matrix: Tensor) -> nn.Linear:
    """Return a linear layer with the weight `matrix`, [out_features, in_features], and no bias."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = matrix.shape
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    return layer
