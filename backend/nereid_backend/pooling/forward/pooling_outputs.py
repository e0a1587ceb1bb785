# SPDX-License-Identifier: Apache-2.0
"""Converts token vectors, pooled vectors and logits into the outputs of prepared items."""

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.inputs.prepare_items import Prepared
from nereid_backend.pooling.loading.output_layers import OutputLayers
from nereid_backend.pooling.pooling_items import Floats, Value

# A vector is divided by its norm, or by this number if the norm is smaller.
_MIN_NORM = 1e-12


def dense_outputs(
    vectors: Tensor, items: Sequence[Prepared], *, normalizes: bool
) -> list[Value | None]:
    """Truncate each vector to its item's `dimensions`. If requested, scale the vector to length 1.

    Args:
        vectors: [num_items, dimension], any float dtype.
        items: the items. The field `normalize` of an item overrides `normalizes`.
        normalizes: whether a vector is scaled to length 1 if the field `normalize` of its item is
            None.

    Returns:
        One float32 vector for each item. If a vector is not finite, None replaces the vector.
    """
    outputs: list[Value | None] = []
    for row, prepared in zip(_array(vectors), items, strict=True):
        item = prepared.item
        vector = row[: item.dimensions]  # the whole row if `dimensions` is None
        is_normalized = normalizes if item.normalize is None else item.normalize
        if is_normalized:
            norm = float(np.linalg.norm(vector.astype(np.float64)))
            vector = vector / max(norm, _MIN_NORM)
        vector = np.ascontiguousarray(vector, dtype=np.float32)
        outputs.append(vector if np.isfinite(vector).all() else None)
    return outputs


def score_outputs(
    logits: Tensor, items: Sequence[Prepared], *, activation: str
) -> list[Value | None]:
    """Convert the logits of each text into scores by applying the activation.

    Args:
        logits: [num_items, num_labels] float32.
        items: the items. The field `activation` of an item overrides `activation`.
        activation: the default activation: "none", "sigmoid" or "softmax".

    Returns:
        One value for each item: a float for the kind "score", and a float32 array [num_labels] for
        the kind "classify". If a number is not finite, None replaces the value.
    """
    outputs: list[Value | None] = []
    for row, prepared in zip(logits, items, strict=True):
        scores = _activate(row, prepared.item.activation or activation)
        if not scores.isfinite().all():
            outputs.append(None)
        elif prepared.item.kind == "score":
            outputs.append(float(scores[0]))
        else:
            outputs.append(_array(scores))
    return outputs


def token_score_outputs(
    logits: Tensor, items: Sequence[Prepared], *, activation: str
) -> list[Value | None]:
    """Convert the logits of each token into scores by applying the activation.

    Args:
        logits: [num_tokens, num_labels] float32, the tokens of all items one after another.
        items: the items. The field `activation` of an item overrides `activation`.
        activation: the default activation: "none", "sigmoid" or "softmax".

    Returns:
        One float32 array [num_tokens, num_labels] for each item. If a number is not finite, None
        replaces the array.
    """
    outputs: list[Value | None] = []
    counts = [len(prepared.token_ids) for prepared in items]
    for rows, prepared in zip(torch.split(logits, counts), items, strict=True):
        scores = _activate(rows, prepared.item.activation or activation)
        outputs.append(_array(scores) if scores.isfinite().all() else None)
    return outputs


def splade_outputs(
    logit_slices: Iterator[tuple[int, Tensor]],
    batch: TokenBatch,
    strategy: str,
    num_log1p: int,
    max_weights: int | None = None,
) -> list[Value | None]:
    """Return the nonzero SPLADE weights of each text, as a dict from token ids to weights.

    SPLADE computes logits over the vocabulary at each token of a text. The weight of a vocabulary
    entry is the maximum (or the sum) of log1p(relu(logit)) over the tokens of the text. Example:
    the entry 7 has the logits -1, 0 and 2 at the three tokens of a text. Its maximum is 2, so its
    weight is log1p(2) = 1.1.

    Args:
        logit_slices: the logits over the vocabulary for each token, in slices of consecutive
            tokens. Each slice is a pair: the index of its first token, and its logits [n,
            vocab_size].
        batch: the texts. There is at least one text.
        strategy: the function that combines the weights of a text's tokens: "max" or "sum".
        num_log1p: the number of times that log1p is applied. Example: 2 means
            log1p(log1p(relu(logit))).
        max_weights: the number of weights of a text; only the largest weights are returned. None
            means that all weights are returned.

    Returns:
        One dict for each text. If a weight is not finite, None replaces the dict.
    """
    parts = _logits_of_texts(logit_slices, batch)
    if strategy == "max":
        # log1p is an increasing function, so the maximum of log1p values equals log1p of the
        # maximum. Applying log1p only to the maximum is faster.
        weights = _log1p(_largest_relu(parts, len(batch.lens)), num_log1p)
    else:
        weights = _sum_of_log1p(parts, len(batch.lens), num_log1p)
    if max_weights is not None and max_weights < weights.shape[1]:
        largest, positions = weights.topk(max_weights)
        weights = torch.zeros_like(weights).scatter(1, positions, largest)
    return [_nonzero_weights(row) for row in weights]


def _largest_relu(parts: Iterator[tuple[int, Tensor]], num_texts: int) -> Tensor:
    """Return the largest relu(logit) over the tokens of each text, [num_texts, vocab_size].

    `parts` contains pairs: the number of a text, and the logits [n, vocab_size] of some of its
    tokens. A text can have several parts.
    """
    # The size of the vocabulary is known only after the first logits have been read, so the tensor
    # cannot be created earlier.
    largest: Tensor | None = None
    for number, logits in parts:
        if largest is None:
            # The initial value is 0, because the result is the ReLU of the largest logit.
            largest = logits.new_zeros(num_texts, logits.shape[1])
        largest[number] = torch.maximum(largest[number], logits.amax(0))
    assert largest is not None, "a batch contains at least one text"
    return largest


def _sum_of_log1p(parts: Iterator[tuple[int, Tensor]], num_texts: int, num_log1p: int) -> Tensor:
    """Return the sum of log1p(relu(logit)) over the tokens of each text, [num_texts, vocab_size].

    Some checkpoints apply log1p twice, so log1p is applied `num_log1p` times. `parts` contains
    pairs: the number of a text, and the logits [n, vocab_size] of some of its tokens.
    """
    sums: Tensor | None = None
    for number, logits in parts:
        if sums is None:
            sums = logits.new_zeros(num_texts, logits.shape[1])
        sums[number] += _log1p(logits.relu(), num_log1p).sum(0)
    assert sums is not None, "a batch contains at least one text"
    return sums


def _logits_of_texts(
    logit_slices: Iterator[tuple[int, Tensor]], batch: TokenBatch
) -> Iterator[tuple[int, Tensor]]:
    """Split the slices of logits at text boundaries. Each resulting part belongs to one text.

    Yield pairs: the number of a text, and the float32 logits of some of its tokens. Example: text 0
    has the tokens 0 to 5, and text 1 has the tokens 6 to 9. A slice with the logits of the tokens
    4, 5 and 6 yields two parts: text 0 with the tokens 4 and 5, and text 1 with the token 6.
    """
    for first_token, slice_logits in logit_slices:
        logits = slice_logits.float()
        for number, (start, end) in enumerate(itertools.pairwise(batch.starts)):
            # The text consists of the tokens `start` to `end - 1` of the batch. The token i is in
            # row i - first_token of the slice. For a token before the slice, this row is negative,
            # so the row 0 is used instead.
            first_row = max(0, start - first_token)
            end_row = max(0, end - first_token)
            text_logits = logits[first_row:end_row]
            has_token_in_slice = len(text_logits) > 0
            if has_token_in_slice:
                yield number, text_logits


def sparse_output(
    token_vectors: Tensor, token_ids: list[int], layers: OutputLayers
) -> Value | None:
    """Return the weights of a text's tokens, as a dict from token ids to weights.

    If a token occurs several times, its largest weight is returned. Example: the tokens [7, 9, 7]
    with the weights [0.2, 0.5, 0.3] return {7: 0.3, 9: 0.5}. Special tokens are left
    out (`layers.ids_without_output`). Return None if a weight is not finite.

    Args:
        token_vectors: [num_tokens, hidden_size] float32.
        token_ids: the tokens of the text.
        layers: the layers of the model, including the layer `sparse`.
    """
    assert layers.sparse is not None
    weights = layers.sparse(token_vectors).squeeze(-1).relu()
    if not weights.isfinite().all():
        return None
    weight_of_token: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights.tolist(), strict=True):
        largest_weight = weight_of_token.get(token_id, 0.0)
        if weight > largest_weight and token_id not in layers.ids_without_output:
            weight_of_token[token_id] = weight
    return weight_of_token


def multi_vector_output(
    token_vectors: Tensor, prepared: Prepared, layers: OutputLayers
) -> Value | None:
    """Return the token vectors of a text, float32 [n, dimension]; None if a vector is not finite.

    n can be less than the number of tokens, because some tokens get no vector, such as punctuation
    in a document for ColBERT (`layers.ids_without_output`).

    Args:
        token_vectors: [num_tokens, hidden_size] float32. If the checkpoint contains a layer that
            scales token vectors to length 1, this layer has already been applied.
        prepared: the text.
        layers: the layers of the model.
    """
    if layers.multi_vector is not None:
        # This model has a dense output, and a separate layer for the multi-vector output. Leave out
        # the vector of the first token, because it describes the whole text, like the dense vector.
        # Keep the vectors of all other tokens, because the checkpoints of such models list no
        # tokens to leave out.
        vectors = functional.normalize(layers.multi_vector(token_vectors[1:]), dim=-1)
    elif prepared.skips_words:
        vectors = _without_tokens(token_vectors, prepared.token_ids, layers.ids_without_output)
    else:
        vectors = token_vectors
    dimensions = prepared.item.dimensions
    if dimensions is not None:
        # The shortened vectors no longer have length 1. Scale them again, because late interaction
        # needs vectors of length 1.
        vectors = functional.normalize(vectors[:, :dimensions], dim=-1)
    return _array(vectors) if vectors.isfinite().all() else None


def _without_tokens(
    token_vectors: Tensor, token_ids: list[int], removed_ids: Collection[int]
) -> Tensor:
    """Return the vectors of all tokens whose ids are not in `removed_ids`.

    Example: the vectors [a, b, c] of the tokens [7, 9, 7] and the removed id 9 return [a, c].
    """
    if not removed_ids:
        return token_vectors
    kept = [index for index, token_id in enumerate(token_ids) if token_id not in removed_ids]
    return token_vectors[torch.tensor(kept, dtype=torch.int64, device=token_vectors.device)]


def _array(values: Tensor) -> Floats:
    """Convert a tensor to a float32 array on the CPU."""
    array: Floats = values.float().cpu().numpy()
    return array


def _nonzero_weights(row: Tensor) -> Value | None:
    """Return a dict from token ids to nonzero weights, or None if a weight is not finite.

    Example: [0, 0.5, 0, 2] returns {1: 0.5, 3: 2.0}.
    """
    if not row.isfinite().all():
        return None
    token_ids = row.nonzero().squeeze(1)
    return dict(zip(token_ids.tolist(), row[token_ids].tolist(), strict=True))


def _log1p(values: Tensor, times: int) -> Tensor:
    """Apply log1p to the values repeatedly, and return the result.

    `times` is the number of repetitions. Example: 2 returns log1p(log1p(values)).
    """
    for _ in range(times):
        values = values.log1p()
    return values


def _activate(logits: Tensor, activation: str) -> Tensor:
    """Apply an activation to logits [..., num_labels], and return the result."""
    if activation == "none":
        return logits
    return logits.sigmoid() if activation == "sigmoid" else logits.softmax(-1)
