# SPDX-License-Identifier: Apache-2.0
"""Divides the inputs of a step into batches. The inputs of a batch are computed together."""

from collections.abc import Sequence

from nereid_backend.pooling.inputs.prepare_items import Prepared

# A padded batch contains texts of similar lengths. If the shortest text of a batch has n tokens, a
# text with more than 1.25 * n + 8 tokens begins a new batch.
_PADDING_FACTOR = 1.25
_PADDING_TOKENS = 8


def split_batch(
    batch: Sequence[Prepared], *, computes_all_alone: bool, is_packed: bool
) -> list[list[int]]:
    """Divide prepared items into batches. Each batch is a list of indices of items.

    All images for an image tower form one batch. All inputs that a vision-language model computes
    one by one form another batch. All expanded queries form a third batch. The other texts form one
    packed batch, or several padded batches (see `_padded_batches`).

    Args:
        batch: the items.
        computes_all_alone: whether the model computes all inputs one by one, even texts.
        is_packed: whether texts are computed as one packed batch.
    """
    images = []
    alone = []
    expanded = []
    texts = []
    for index, prepared in enumerate(batch):
        if prepared.pixels is not None:
            images.append(index)
        elif computes_all_alone or prepared.images is not None:
            alone.append(index)
        elif prepared.num_attended is not None:
            expanded.append(index)
        else:
            texts.append(index)
    texts.sort(key=lambda index: len(batch[index].token_ids))
    lens = [len(batch[index].token_ids) for index in texts]
    text_batches = [texts] if is_packed else _padded_batches(texts, lens)
    return [indices for indices in (images, alone, expanded, *text_batches) if indices]


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
            longest_allowed = length * _PADDING_FACTOR + _PADDING_TOKENS
        batches[-1].append(index)
    return batches
