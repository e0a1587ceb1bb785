# SPDX-License-Identifier: Apache-2.0
"""Divides a batch of inputs into parts. Each part is computed by one method."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from nereid_backend.pooling.inputs.prepare_items import Prepared

# A padded batch contains texts of similar lengths. If the shortest text of a batch has n tokens, a
# text with more than 1.25 * n + 8 tokens begins a new batch.
_PADDING_FACTOR = 1.25
_PADDING_TOKENS = 8


class Part(NamedTuple):
    """The items of a batch that are computed by the same method.

    Attributes:
        method: "images" (the image tower computes the items as one batch), "alone" (the model
            computes one item at a time) or "texts" (the model computes the items as one batch).
        indices: the indices of the items in the batch.
    """

    method: Literal["images", "alone", "texts"]
    indices: list[int]


def split_batch(
    batch: Sequence[Prepared], *, computes_all_alone: bool, is_packed: bool
) -> list[Part]:
    """Divide prepared items into parts. All items of a part are computed by the same method.

    All images for an image tower form one part. All inputs that a vision-language model computes
    one by one form another part. All expanded queries (short queries with appended mask tokens)
    form a third part. The other texts form one packed batch, or several padded batches (see
    `_padded_batches`).

    Example: three texts of 50, 5 and 6 tokens, and an image for an image tower give the parts
    ("images", [3]), ("texts", [1, 2]) and ("texts", [0]) if `is_packed` is False.

    Args:
        batch: the items.
        computes_all_alone: whether the model computes all inputs one by one, even texts.
        is_packed: whether texts are computed as one packed batch.
    """
    # The index of each item is added to one of these lists.
    images = []
    alone = []
    expanded = []
    texts = []
    for index, prepared in enumerate(batch):
        if prepared.pixels is not None:  # an image for an image tower
            images.append(index)
        elif computes_all_alone or prepared.images is not None:  # for a vision-language model
            alone.append(index)
        elif prepared.num_attended is not None:  # an expanded query
            expanded.append(index)
        else:
            texts.append(index)
    # `_padded_batches` needs the texts in the order of their lengths.
    texts.sort(key=lambda index: len(batch[index].token_ids))
    lens = [len(batch[index].token_ids) for index in texts]
    text_batches = [texts] if is_packed else _padded_batches(texts, lens)
    parts = [Part("images", images), Part("alone", alone), Part("texts", expanded)]
    parts += [Part("texts", indices) for indices in text_batches]
    return [part for part in parts if part.indices]


def _padded_batches(indices: list[int], lens: list[int]) -> list[list[int]]:
    """Divide texts into batches of similar lengths. Such batches have little padding.

    Example: the indices [2, 1, 0] of texts with 5, 6 and 50 tokens return [[2, 1], [0]].

    Args:
        indices: the indices of the texts, sorted by length.
        lens: the number of tokens of each text, in the order of `indices`.
    """
    batches: list[list[int]] = []
    longest_allowed = 0.0
    for index, length in zip(indices, lens, strict=True):
        if not batches or length > longest_allowed:
            batches.append([])
            # The first text of a batch is the shortest. It determines the longest allowed text.
            longest_allowed = length * _PADDING_FACTOR + _PADDING_TOKENS
        batches[-1].append(index)
    return batches
