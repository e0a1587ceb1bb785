# SPDX-License-Identifier: Apache-2.0
"""What attention layers of a model need, and where a token may look."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """How far back a token looks.

    Attributes:
        window: it sees itself and the window - 1 tokens before it; None: no limit.
        chunk: it sees only tokens of its own chunk, positions being cut into chunks of this many.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether a token sees everything before it."""
        return self.window is None and self.chunk is None

    def hides_at(self, length: int) -> bool:
        """Whether some token of a sequence of this length does not see all before it."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return any(length > limit for limit in limits)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention call of a forward pass, as the probe saw it.

    The n-th call of every forward pass is the same layer; ``layer_idx`` is not reliable everywhere.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        key_dim: size of one query or key head.
        value_dim: size of one value head.
        span: how far back its tokens look.
        softcap: scores s become softcap * tanh(s / softcap); None: they stay.
        has_sinks: whether each head has a sink, one more score that takes weight and gives nothing.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    span: Span = Span()
    softcap: float | None = None
    has_sinks: bool = False

    def bytes_per_token(self, itemsize: int, scale_bytes: int = 0) -> int:
        """Memory that one token takes in this layer's KV cache.

        Args:
            itemsize: bytes of one number.
            scale_bytes: of what is kept beside each key and each value vector.
        """
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * itemsize + 2 * scale_bytes)
