"""Finds the labelled sections of a text, from the label probabilities of the text's tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nereid_client.embeddings.embedding_output import Floats
from nereid_client.embeddings.pooling_backend import PoolingOutputs

Offsets = npt.NDArray[np.int32]

_OUTSIDE = "O"
"""The label of a token that belongs to no labelled section."""


class _Group(NamedTuple):
    """Neighbouring tokens with the same label.

    Attributes:
        name: the label without its prefix, such as "LOC".
        tokens: the tokens, as returned by `_best_labels`.
    """

    name: str
    tokens: list[dict[str, Any]]


def tokens_of(outputs: PoolingOutputs) -> list[tuple[Floats, Offsets]]:
    """Split the outputs of a token classifier into one pair of arrays for each text.

    Returns: for each text, the probabilities, [num_tokens, num_labels], and the offsets,
        [num_tokens, 2]. The offsets of a token are the index of its first character and the index
        after its last character.
    """
    ends = np.cumsum(outputs.arrays["num_tokens"])[:-1]
    probabilities = np.split(outputs.arrays["probabilities"], ends)
    return list(zip(probabilities, np.split(outputs.arrays["offsets"], ends), strict=True))


def labelled_tokens(
    text: str, probabilities: Floats, offsets: Offsets, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the most probable label of each token, in the format of transformers pipelines.

    Special tokens and tokens with the label "O" are left out.

    Example: the text "in Rome" returns [{"entity": "B-LOC", "score": 0.9, "index": 2, "word":
    "Rome", "start": 3, "end": 7}].

    Args:
        text: the text.
        probabilities: [num_tokens, num_labels], float32.
        offsets: for each token, the index of its first character and the index after its last
            character, [num_tokens, 2].
        labels: the labels, in the order of the probabilities.
    """
    tokens = _best_labels(text, probabilities, offsets, labels)
    return [token for token in tokens if token["entity"] != _OUTSIDE]


def labelled_groups(
    text: str, probabilities: Floats, offsets: Offsets, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Join neighbouring tokens with the same label into labelled sections of the text.

    A label that begins with "B-" begins a new group, and a label that begins with "I-" continues
    the group. The score of a group is the mean of the scores of its tokens. Tokens with the label
    "O" are left out.

    Example: the tokens "New" (B-LOC, 0.9) and "York" (I-LOC, 0.7) return [{"entity_group": "LOC",
    "score": 0.8, "word": "New York", "start": 0, "end": 8}].

    Args:
        text: the text.
        probabilities: the probability of each label for each token, [num_tokens, num_labels].
        offsets: for each token, the index of its first character and the index after its last
            character, [num_tokens, 2].
        labels: the labels, in the order of the probabilities.
    """
    groups: list[_Group] = []
    for token in _best_labels(text, probabilities, offsets, labels):
        prefix, name = _split_label(token["entity"])
        continues_group = bool(groups) and name == groups[-1].name and prefix != "B"
        if continues_group:
            groups[-1].tokens.append(token)
        else:
            groups.append(_Group(name, [token]))
    return [_section(text, group) for group in groups if group.name != _OUTSIDE]


def _best_labels(
    text: str, probabilities: Floats, offsets: Offsets, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the most probable label of each token. Skip special tokens, which have no characters.

    Args:
        text: the text.
        probabilities: the probability of each label for each token, [num_tokens, num_labels].
        offsets: for each token, the index of its first character and the index after its last
            character, [num_tokens, 2].
        labels: the labels, in the order of the probabilities.
    """
    best_labels = probabilities.argmax(axis=1)
    tokens = []
    for index, (start, end) in enumerate(offsets.tolist()):
        if end <= start:
            continue
        best = best_labels[index]
        tokens.append(
            {
                "entity": labels[best],
                "score": float(probabilities[index, best]),
                "index": index,
                "word": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return tokens


def _split_label(label: str) -> tuple[str, str]:
    """Split a label such as "B-LOC" into its prefix "B" and its name "LOC".

    Examples: "B-LOC" returns ("B", "LOC"), and "LOC" returns ("I", "LOC").
    """
    prefix, dash, name = label.partition("-")
    return (prefix, name) if dash and prefix in ("B", "I") else ("I", label)


def _section(text: str, group: _Group) -> dict[str, Any]:
    """Convert a group of tokens to one labelled section of the text.

    Example: in the text "in New York", the tokens "New" (score 0.9) and "York" (0.7) with the name
    "LOC" return {"entity_group": "LOC", "score": 0.8, "word": "New York", "start": 3, "end": 11}.
    """
    tokens = group.tokens
    start, end = tokens[0]["start"], tokens[-1]["end"]
    section = text[start:end]
    word = section.lstrip()  # in some tokenizers, a token includes the space before its word
    num_spaces = len(section) - len(word)
    return {
        "entity_group": group.name,
        "score": sum(token["score"] for token in tokens) / len(tokens),
        "word": word,
        "start": start + num_spaces,
        "end": end,
    }
