# SPDX-License-Identifier: Apache-2.0
"""A batch of texts through the model: packed where that is exact, else padded.

Both ways give the same thing, packed token vectors, so what follows does not know which it was.
Heads of transformers' models look at rows of a batch (the first token, the last one, the mean), so
they are given rows: the model runs once more with its base replaced by what the base gave.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.pooling.load_encoder import Encoder, accepts
from nereid_backend.pooling.packed_texts import PackedAttention, TokenBatch

# Logits over a vocabulary for so many tokens at once.
_LOGIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PackedForward:
    """The base over one row of all tokens.

    Attributes:
        encoder: the model.
        hook: our entry in transformers' attention interface; the model must be set to it.
        position_offset: a text's first position.
        is_causal: whether a token sees only those before it.
    """

    encoder: Encoder
    hook: AttentionHook
    position_offset: int
    is_causal: bool

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Token vectors, [num_tokens, hidden_size]."""
        return self.run(batch, PackedAttention(batch.groups(), self.is_causal))

    def run(self, batch: TokenBatch, attention: PackedAttention) -> Tensor:
        """The same with an attention that can be asked afterwards what it saw."""
        base = self.encoder.base
        arguments = _arguments(base, batch.token_ids[None], batch.type_ids, packed=True)
        if accepts(base.forward, "position_ids"):
            arguments["position_ids"] = batch.positions(self.position_offset)[None]
        with self.hook.serving(attention):
            hidden: Tensor = base(**arguments)[0]
        return hidden[0]


@dataclass(frozen=True, slots=True)
class PaddedForward:
    """The base over a padded batch, with the model's own attention."""

    encoder: Encoder

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Token vectors, [num_tokens, hidden_size]."""
        base, mask = self.encoder.base, batch.mask()
        types = None if batch.type_ids is None else batch.pad(batch.type_ids)
        padding = getattr(self.encoder.tokenizer, "pad_token_id", None) or 0
        arguments = _arguments(base, batch.pad(batch.token_ids, padding), types, packed=False)
        hidden: Tensor = base(attention_mask=mask.long(), **arguments)[0]
        return hidden[mask]


@dataclass(frozen=True, slots=True)
class RowsForward:
    """The base over texts of one length at a time, for models that padding changes."""

    encoder: Encoder

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Token vectors, [num_tokens, hidden_size]."""
        one = PaddedForward(self.encoder)
        parts = []
        for start, count, length in batch.groups():
            end = start + count * length
            types = None if batch.type_ids is None else batch.type_ids[start:end]
            parts.append(one(TokenBatch(batch.token_ids[start:end], types, (length,) * count)))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Head:
    """A model's own head over token vectors that the base has made.

    Attributes:
        encoder: the model.
        rows: what of a text the head is given: "first" or "last", one token, or "all", padded; or
            "whole": the head cannot be told from its base, so the whole model runs, padded.
    """

    encoder: Encoder
    rows: str

    def logits(self, hidden: Tensor | None, batch: TokenBatch) -> Tensor:
        """The answer of a head that answers once a text, [num_texts, num_labels].

        Args:
            hidden: [num_tokens, hidden_size] of the base; not needed where rows is "whole".
            batch: the texts.
        """
        if self.rows == "whole":
            return self._whole(batch)
        assert hidden is not None
        if self.rows == "all":
            padding = self.encoder.model.config.get_text_config().pad_token_id or 0
            mask = batch.mask().long()
            ids, rows = batch.pad(batch.token_ids, padding), batch.pad(hidden)
        else:
            index = torch.tensor(self._tokens(batch), device=hidden.device)
            ids, rows = batch.token_ids[index][:, None], hidden[index][:, None]
            mask = torch.ones_like(ids)
        with answering(self.encoder, rows):
            out = self.encoder.model(input_ids=ids, attention_mask=mask)
        logits: Tensor = out.logits
        return logits

    def _whole(self, batch: TokenBatch) -> Tensor:
        model = self.encoder.model
        padding = getattr(self.encoder.tokenizer, "pad_token_id", None) or 0
        types = None if batch.type_ids is None else batch.pad(batch.type_ids)
        arguments = _arguments(model, batch.pad(batch.token_ids, padding), types, packed=False)
        logits: Tensor = model(attention_mask=batch.mask().long(), **arguments).logits
        return logits

    def _tokens(self, batch: TokenBatch) -> list[int]:
        starts = batch.starts
        if self.rows == "first":
            return starts[:-1]
        # As transformers' heads for decoders do: the last token that is not the padding token.
        padding = self.encoder.model.config.get_text_config().pad_token_id
        ids = batch.token_ids.tolist()
        found = []
        for start, end in itertools.pairwise(starts):
            kept = (i for i in range(end - 1, start - 1, -1) if ids[i] != padding)
            found.append(next(kept, start))
        return found


def token_logits(encoder: Encoder, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """What a head that answers for every token says, in slices.

    Shapes: hidden [num_tokens, hidden_size]; yields (first token, [n, vocab_size]).
    """
    for start in range(0, len(hidden), _LOGIT_TOKENS):
        rows = hidden[start : start + _LOGIT_TOKENS][None]
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)
        with answering(encoder, rows):
            yield start, encoder.model(input_ids=ids).logits[0]


@contextmanager
def answering(encoder: Encoder, rows: Tensor) -> Iterator[None]:
    """Let the base answer with these token vectors, whatever it is asked.

    Shapes: rows [num_texts, length, hidden_size].
    """
    base: Any = encoder.base
    pooler = getattr(base, "pooler", None)
    pooled = pooler(rows) if isinstance(pooler, torch.nn.Module) else None
    answer = BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=rows, pooler_output=pooled
    )
    base.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        del base.forward


def _arguments(
    base: torch.nn.Module, ids: Tensor, types: Tensor | None, *, packed: bool
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": ids}
    if types is not None and accepts(base.forward, "token_type_ids"):
        arguments["token_type_ids"] = types[None] if packed else types
    if accepts(base.forward, "use_cache"):
        arguments["use_cache"] = False
    return arguments
