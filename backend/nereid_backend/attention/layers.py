# SPDX-License-Identifier: Apache-2.0
"""The properties of a model's attention layers, such as the attention window of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.core.blocks.window import AttentionWindow


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """The attention window of one layer. It limits how many earlier tokens a token attends to.

    There are two kinds of limits: `size` and `chunk`. A layer may have none, one or both of them.

    Attributes:
        size: the number of tokens in the sliding window. A token attends to itself and to the
            `size - 1` previous tokens. None means that there is no sliding window.
        chunk: the number of tokens in an attention chunk. The sequence is divided into chunks of
            this size, and a token attends only to tokens of its own chunk. None means that there
            are no chunks.
    """

    size: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether a token attends to all earlier tokens."""
        return self.limit is None

    @property
    def limit(self) -> int | None:
        """The largest number of tokens to which one token attends; None if there is no limit."""
        limits = [limit for limit in (self.size, self.chunk) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of one attention layer of a model.

    When a model is loaded, a probe runs the model once and records the properties. The n-th
    attention call of every forward pass belongs to the n-th layer. The attribute `layer_idx` of
    transformers' modules is not used, because it is wrong in some models.

    Attributes:
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads. num_heads is a multiple of this number.
        key_dim: the size of one query or key head.
        value_dim: the size of one value head.
        window: the attention window.
        softcap: each score s is replaced by softcap * tanh(s / softcap). None leaves the scores
            unchanged.
        has_sinks: whether each head has an attention sink. A sink is an additional score in the
            softmax. This score belongs to no token.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: LayerWindow = LayerWindow()
    softcap: float | None = None
    has_sinks: bool = False

    def bytes_per_token(self, itemsize: int, scale_bytes: int = 0) -> int:
        """Return the number of bytes that one token needs in this layer's KV cache.

        Args:
            itemsize: the number of bytes of one stored number.
            scale_bytes: the number of bytes of a scale factor. Each key vector and each value
                vector has one factor.
        """
        key_bytes = self.key_dim * itemsize + scale_bytes
        value_bytes = self.value_dim * itemsize + scale_bytes
        return self.num_kv_heads * (key_bytes + value_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's attention layers. All layers of a group share one block table.

    The module core/blocks/window.py describes the division of the layers into groups.

    A block stores the keys and values of one group. A group may have fewer layers than a block has
    places. Example: a model has four layers. The first three layers have a window (W), and the last
    layer has full attention (F). A block has two places. Then there are three groups:

        group 0   F, empty place       places ((1, 0), (1, 1), (2, 0), (0, 0))
        group 1   W, W
        group 2   W, empty place

    Attributes:
        windows: the attention window of each group; None for a group with full attention.
        places: for each layer, two numbers: the index of the layer's group, and the layer's place
            in the blocks of the group.
    """

    windows: tuple[AttentionWindow | None, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def num_places(self) -> int:
        """The largest number of layers in one group of attention layers."""
        return 1 + max((place for _, place in self.places), default=-1)


def attention_window_of(layers: Sequence[LayerSpec]) -> AttentionWindow | None:
    """Combine the attention windows of several layers; None if one layer has full attention."""
    if not layers or any(layer.window.is_full for layer in layers):
        return None
    distinct_windows = dict.fromkeys(layer.window for layer in layers)
    return AttentionWindow(tuple((window.size, window.chunk) for window in distinct_windows))


def single_group(layers: Sequence[LayerSpec]) -> LayerGroups:
    """Return a `LayerGroups` in which all layers form one group."""
    group = 0
    places = tuple((group, place) for place in range(len(layers)))
    return LayerGroups(windows=(attention_window_of(layers),), places=places)
