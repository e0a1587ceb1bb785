# SPDX-License-Identifier: Apache-2.0
"""Several texts as one row of tokens, and attention that keeps them apart.

    tokens   a a a | b b b | c c c c c c        lens 3 3 6, groups (0, 2, 3) (6, 1, 6)

Texts of one length lie side by side, so that their attention is one call over a batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.interface import scale_of, sinks_of

# In bfloat16 torch's fused attention on a CPU is slower than matrix products one by one, as long as
# all scores fit in the cache; so many of them do.
_MAX_SCORES = 2**23


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts that go through the model together.

    Attributes:
        token_ids: [num_tokens] int64, text after text.
        type_ids: [num_tokens] int64, which part of a pair a token is of; None: the model's default.
        lens: tokens of each text.
    """

    token_ids: Tensor
    type_ids: Tensor | None
    lens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int] | None],
        device: torch.device,
    ) -> "TokenBatch":
        """Put texts in a row; where some have type ids and some not, these are 0."""
        flat = torch.tensor([i for s in sequences for i in s], dtype=torch.int64)
        type_ids = None
        if any(one is not None for one in types):
            rows = (
                one if one is not None else [0] * len(s)
                for s, one in zip(sequences, types, strict=True)
            )
            type_ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64).to(device)
        return cls(flat.to(device), type_ids, tuple(len(s) for s in sequences))

    @property
    def starts(self) -> list[int]:
        """Where each text begins, and at the end where the last one ends."""
        return [0, *itertools.accumulate(self.lens)]

    def groups(self) -> list[tuple[int, int, int]]:
        """Runs of texts of one length: (first token, number of texts, their length)."""
        found, start = [], 0
        for length, run in itertools.groupby(self.lens):
            count = len(list(run))
            found.append((start, count, length))
            start += count * length
        return found

    def positions(self, offset: int) -> Tensor:
        """[num_tokens] int64: each text counts from the offset."""
        starts = torch.tensor(self.starts[:-1], device=self.token_ids.device)
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        first = starts.repeat_interleave(lens)
        return torch.arange(len(self.token_ids), device=self.token_ids.device) - first + offset

    def mask(self) -> Tensor:
        """[num_texts, longest] bool: where a padded batch has tokens."""
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        return torch.arange(max(self.lens), device=lens.device) < lens[:, None]

    def pad(self, values: Tensor, filling: float = 0) -> Tensor:
        """Rows of the packed values [num_tokens, ...] as [num_texts, longest, ...]."""
        mask = self.mask()
        out = values.new_full((*mask.shape, *values.shape[1:]), filling)
        out[mask] = values
        return out


@dataclass(slots=True)
class PackedAttention:
    """Serves the attention calls of one forward pass over a packed batch.

    Attributes:
        groups: of the batch.
        is_causal: whether a token sees only those before it.
        windows: limits of sliding windows that calls came with.
    """

    groups: list[tuple[int, int, int]]
    is_causal: bool
    windows: set[int] = field(default_factory=set)
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """One attention call.

        Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads,
        num_tokens, dim]; returns [1, num_tokens, num_heads, value_dim].
        """
        window = kwargs.get("sliding_window")
        softcap = kwargs.get("softcap")
        if isinstance(window, int) and window > 0:
            self.windows.add(window)
        else:
            window = None
        step = _Step(
            scale=scale_of(module, query, kwargs),
            is_causal=self.is_causal,
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            sinks=sinks_of(kwargs),
        )
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        parts = []
        for start, count, length in self.groups:
            q, k, v = (
                r[start : start + count * length].view(count, length, *r.shape[1:]).transpose(1, 2)
                for r in rows
            )
            mask = None
            if window is not None and length > window:
                mask = self._mask(length, window, query.device)
            out = step.attend(q, k, v, mask)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        """[length, length] bool: where a token sees another at less than a window's distance."""
        mask = self._masks.get((length, window))
        if mask is None:
            positions = torch.arange(length, device=device)
            distance = positions[:, None] - positions
            mask = distance.abs() < window
            if self.is_causal:
                mask &= distance >= 0
            self._masks[length, window] = mask
        return mask


@dataclass(frozen=True, slots=True)
class _Step:
    """Attention of texts of one length."""

    scale: float
    is_causal: bool
    softcap: float | None
    sinks: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[count, num_heads, length, dim] each; mask [length, length] bool or None."""
        if self.softcap is None and self.sinks is None and not self._is_better_stepwise(query):
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=self.is_causal and mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return self._stepwise(query, key, value, mask)

    @staticmethod
    def _is_better_stepwise(query: Tensor) -> bool:
        if query.device.type != "cpu" or query.dtype != torch.bfloat16:
            return False
        return query.shape[0] * query.shape[1] * query.shape[2] ** 2 <= _MAX_SCORES

    def _stepwise(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[1] != key.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        scores = (query * self.scale) @ key.transpose(2, 3)
        if self.softcap is not None:
            scores = torch.tanh(scores.float() / self.softcap) * self.softcap
        if mask is None and self.is_causal:
            length = query.shape[2]
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            shape = (*scores.shape[:3], 1)
            column = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(shape)
            weights = torch.cat([scores, column], dim=-1).float().softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return weights.to(value.dtype) @ value
