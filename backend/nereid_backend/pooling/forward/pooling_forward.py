# SPDX-License-Identifier: Apache-2.0
"""Computes the token vectors of texts, and the output of a model's classification head.

There are three methods of computing token vectors: packed batches, padded batches, and batches of
texts with equal lengths. Each method returns packed token vectors. The head of a model, such as a
classifier, computes its output from token vectors. In transformers, a head cannot be called
separately. Therefore the whole model is called, while a function that returns known token vectors
replaces the base model.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.pooling.forward.packed_texts import PackedAttention, TokenBatch
from nereid_backend.pooling.loading.load_encoder import Encoder, accepts

HeadMethod = Literal["first", "last", "all", "whole", "tokens"]
"""The token vectors that a classification head gets.

"first" and "last" mean the vector of each text's first or last token. "all" means all vectors,
padded. "whole" means that the head cannot be separated from the base, so the whole model is run on
a padded batch. "tokens" means that the head classifies each token by its vector alone.
"""

# Logits over the vocabulary are computed for at most `_LOGIT_TOKENS` tokens at a time.
_LOGIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PackedForward:
    """Computes token vectors by running the model once on the joined tokens of all texts.

    Attributes:
        encoder: the model. The model must use the attention implementation of `hook`.
        hook: Nereid's entry in transformers' attention interface.
        position_offset: the position id of a text's first token.
        is_causal: whether a token attends only to itself and to earlier tokens.
    """

    encoder: Encoder
    hook: AttentionHook
    position_offset: int
    is_causal: bool

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size]."""
        return self.run(batch, PackedAttention(batch.groups(), self.is_causal))

    def run(self, batch: TokenBatch, attention: PackedAttention) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size].

        `attention` computes the attention of each layer, and separates the texts of the batch.
        """
        base = self.encoder.base  # the model without its head
        # For the model, the batch is one long text, so `None` adds a first axis of size 1.
        types = None if batch.type_ids is None else batch.type_ids[None]
        arguments = _arguments(base, batch.token_ids[None], types)
        if accepts(base.forward, "position_ids"):
            # The positions of each text begin at `position_offset`.
            arguments["position_ids"] = batch.positions(self.position_offset)[None]
        with self.hook.serving(attention):
            hidden: Tensor = base(**arguments)[0]
        return hidden[0]


@dataclass(frozen=True, slots=True)
class PaddedForward:
    """Runs the base model on a padded batch, with the model's own attention."""

    encoder: Encoder

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size]."""
        hidden: Tensor = _run_padded(self.encoder, self.encoder.base, batch)[0]
        return hidden[batch.mask()]


@dataclass(frozen=True, slots=True)
class RowsForward:
    """Computes token vectors in several batches. All texts of a batch have the same length.

    This class is for models whose output changes if texts are padded.
    """

    encoder: Encoder

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the token vectors of a batch, [num_tokens, hidden_size]."""
        padded = PaddedForward(self.encoder)
        parts = []
        for start, num_texts, text_len in batch.groups():
            end = start + num_texts * text_len
            types = None if batch.type_ids is None else batch.type_ids[start:end]
            lens = (text_len,) * num_texts
            parts.append(padded(TokenBatch(batch.token_ids[start:end], types, lens)))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Head:
    """Computes the output of a model's classification head from token vectors.

    Attributes:
        encoder: the model.
        method: the token vectors that the head gets; see `HeadMethod`.
        is_per_token: whether the head classifies single tokens instead of whole texts.
    """

    encoder: Encoder
    method: HeadMethod
    is_per_token: bool = False

    def logits(self, hidden: Tensor | None, batch: TokenBatch) -> Tensor:
        """Return the logits of each text, [num_texts, num_labels].

        If the head classifies single tokens, return the logits of each token,
        [num_tokens, num_labels].

        Args:
            hidden: the token vectors [num_tokens, hidden_size]. They can be None if `method` is
                "whole".
            batch: the texts.
        """
        if self.method == "whole":
            return self._logits_of_whole_model(batch)
        assert hidden is not None, "only the method `whole` needs no token vectors"
        match self.method:
            case "first" | "last":
                return self._logits_of_one_token(hidden, batch)
            case "all":
                return self._logits_of_padded_texts(hidden, batch)
            case "tokens":
                return self._logits_of_each_token(hidden, batch)

    def _logits_of_whole_model(self, batch: TokenBatch) -> Tensor:
        """Return the logits of texts or of single tokens, computed by the whole model."""
        logits: Tensor = _run_padded(self.encoder, self.encoder.model, batch).logits
        return logits[batch.mask()] if self.is_per_token else logits

    def _logits_of_one_token(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return logits [num_texts, num_labels], computed from one token vector of each text."""
        index = torch.tensor(self._token_indices(batch), device=hidden.device)
        # For the head, each text consists of one token.
        rows = hidden[index].unsqueeze(1)
        ids = batch.token_ids[index].unsqueeze(1)
        return self._run(rows, ids, torch.ones_like(ids))

    def _logits_of_padded_texts(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return logits [num_texts, num_labels], computed from all token vectors of each text."""
        padding = self.encoder.model.config.get_text_config().pad_token_id or 0
        ids = batch.pad(batch.token_ids, padding)
        return self._run(batch.pad(hidden), ids, batch.mask().long())

    def _logits_of_each_token(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return logits [num_tokens, num_labels], computed from each token alone."""
        # The head computes each token separately. Therefore, the tokens of all texts can be
        # computed together, as if they were one text.
        ids = batch.token_ids.unsqueeze(0)
        logits_of_text = self._run(hidden.unsqueeze(0), ids, torch.ones_like(ids))
        return logits_of_text[0]

    def _run(self, rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the classification head on token vectors. Return logits [num_texts, num_labels].

        The token ids are needed because some heads search them for the last token that is not the
        padding token.

        Shapes: rows [num_texts, length, hidden_size], ids and mask [num_texts, length].
        """
        with replace_base_output(self.encoder, rows):
            logits: Tensor = self.encoder.model(input_ids=ids, attention_mask=mask).logits
        return logits

    def _token_indices(self, batch: TokenBatch) -> list[int]:
        """For each text, return the index of the one token that the classification head needs.

        If the attribute `method` is "first", this token is the first token of the text. Otherwise,
        `method` is "last", and this token is the last token that is not the padding token.

        Example: for the texts [5, 6] and [7, 8, 9], which are packed as [5, 6, 7, 8, 9], the result
        is [0, 2] for the first tokens, and [1, 4] for the last tokens.
        """
        starts = batch.starts
        if self.method == "first":
            return starts[:-1]
        # Skip padding tokens at the end of the text, like the heads in transformers. A text can end
        # with a padding token, because some models pad with their end-of-sequence token.
        padding = self.encoder.model.config.get_text_config().pad_token_id
        ids = batch.token_ids.tolist()
        last_tokens = []
        for start, end in itertools.pairwise(starts):
            last = end - 1
            while last > start and ids[last] == padding:
                last -= 1
            last_tokens.append(last)
        return last_tokens


def token_logits(encoder: Encoder, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Compute the logits over the vocabulary from token vectors, in slices that limit the memory.

    Each slice has at most `_LOGIT_TOKENS` tokens.

    Shapes: hidden [num_tokens, hidden_size]; yields one pair for each slice: the index of the
    slice's first token, and the logits of the slice [n, vocab_size].
    """
    for start in range(0, len(hidden), _LOGIT_TOKENS):
        # `rows` is a batch with a single text, [1, n, hidden_size]. This text consists of all
        # tokens of the slice.
        rows = hidden[start : start + _LOGIT_TOKENS][None]
        # transformers cannot call the head alone. Therefore, call the whole model, and let its base
        # model (the model without its head) return `rows`. Only the shape of `ids` has an effect.
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)
        with replace_base_output(encoder, rows):
            logits = encoder.model(input_ids=ids).logits[0]
        yield start, logits


class _BaseOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """An output of a base model. Only its field with the token vectors has a value.

    The other fields are None. A head may read such a field. Example: the head of Longformer reads
    `global_attentions`.
    """

    def __getattr__(self, name: str) -> None:
        """Return None for each attribute that is missing."""


@contextmanager
def replace_base_output(encoder: Encoder, rows: Tensor) -> Iterator[None]:
    """Return a context manager that makes the base model return the token vectors `rows`.

    The base model is the model without its head. In the `with` block, the base model computes
    nothing, so a call of the whole model computes only the head.

    Shapes: rows [num_texts, length, hidden_size].
    """
    base: Any = encoder.base
    # Some heads read the output of the base model's pooler. The pooler is a layer that is applied
    # to the token vectors.
    pooler = getattr(base, "pooler", None)
    pooled = pooler(rows) if isinstance(pooler, torch.nn.Module) else None
    output = _BaseOutput(last_hidden_state=rows, pooler_output=pooled)
    # A hook of torch could replace the output, but not skip the computation. This attribute hides
    # the method `forward` of the class until the `finally` block below deletes the attribute.
    base.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del base.forward


def _run_padded(encoder: Encoder, model: torch.nn.Module, batch: TokenBatch) -> Any:  # noqa: ANN401 - a model's output
    """Run `model` on a padded batch, and return the output of `model`."""
    padding = getattr(encoder.tokenizer, "pad_token_id", None) or 0
    types = None if batch.type_ids is None else batch.pad(batch.type_ids)
    arguments = _arguments(model, batch.pad(batch.token_ids, padding), types)
    return model(attention_mask=batch.attention_mask().long(), **arguments)


def _arguments(model: torch.nn.Module, ids: Tensor, types: Tensor | None) -> dict[str, Any]:
    """Return the arguments for a call of `model`. Leave out arguments that `model` does not accept.

    Args:
        model: the model.
        ids: the token ids, [num_texts, length].
        types: the type ids of the tokens, [num_texts, length]; None for the model's default.
    """
    arguments: dict[str, Any] = {"input_ids": ids}
    if types is not None and accepts(model.forward, "token_type_ids"):
        arguments["token_type_ids"] = types
    if accepts(model.forward, "use_cache"):
        arguments["use_cache"] = False
    return arguments
