# SPDX-License-Identifier: Apache-2.0
"""The properties of a model's attention layers, and the window of each layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """The attention window of one layer, which limits the earlier tokens that a token attends to.

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
        has_sinks: whether each head has an attention sink: a further score in the softmax that
            belongs to no token.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: LayerWindow = LayerWindow()
    softcap: float | None = None
    has_sinks: bool = False

    def bytes_per_token(self, itemsize: int, scale_bytes: int = 0) -> int:
        """Return the size of one token in this layer's KV cache, in bytes.

        Args:
            itemsize: the bytes of one number.
            scale_bytes: the bytes of the factor that is stored with each key and each value vector.
        """
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * itemsize + 2 * scale_bytes)
