# SPDX-License-Identifier: Apache-2.0
"""The properties of a model's attention layers, including their attention windows and groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.core.blocks.window import AttentionWindow


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """The limits on the earlier tokens that a token attends to in one layer.

    A layer may have neither limit, one of the limits, or both limits.

    Attributes:
        size: the sliding window, in tokens. A token attends to itself and to the `size - 1` tokens
            before it. None means no sliding window.
        chunk: the attention chunk, in tokens. Positions are divided into chunks of this number of
            tokens, and a token attends only to tokens of its own chunk. None means no chunks.
    """

    size: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether a token attends to all tokens before it."""
        return self.limit is None

    @property
    def limit(self) -> int | None:
        """The largest number of tokens that one token attends to; None if there is no limit."""
        limits = [limit for limit in (self.size, self.chunk) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of one attention layer of a model.

    The properties are recorded when the probe runs the model once.

    The n-th call of every forward pass belongs to the same layer. The attribute `layer_idx` of
    transformers' modules is not correct in all models, so it is not used.

    Attributes:
        num_heads: the number of query heads.
        num_kv_heads: the number of key and value heads; it divides num_heads.
        key_dim: the size of one query or key head.
        value_dim: the size of one value head.
        window: the attention window.
        softcap: a score s becomes softcap * tanh(s / softcap). None leaves scores unchanged.
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
        """Return how many bytes one token needs in this layer's KV cache.

        Args:
            itemsize: the bytes of one number.
            scale_bytes: the bytes of the factor that is stored with each key and each value vector.
        """
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * itemsize + 2 * scale_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups into which a model's attention layers are divided; see core/blocks/window.py.

    A block stores the keys and values of one group. A group may have fewer layers than a block has
    places. Example: four layers with full attention (F) or a window (W), in the order W, W, W, F.
    With two places in a block, there are three groups:

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
        """The largest number of layers in a group."""
        return 1 + max((place for _, place in self.places), default=-1)


def attention_window_of(layers: Sequence[LayerSpec]) -> AttentionWindow | None:
    """Return the attention window of a group of layers; None without a limit."""
    if not layers or any(layer.window.is_full for layer in layers):
        return None
    windows = dict.fromkeys(layer.window for layer in layers)
    return AttentionWindow(tuple((window.size, window.chunk) for window in windows))


def single_group(layers: Sequence[LayerSpec]) -> LayerGroups:
    """Return the division in which all layers form one group."""
    return LayerGroups((attention_window_of(layers),), tuple((0, i) for i in range(len(layers))))
