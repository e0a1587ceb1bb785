# SPDX-License-Identifier: Apache-2.0
"""Computes token masks and other constant data for the guides that limit the next tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereid_backend.grammar.vocabulary import TokenMask, Vocabulary, mask_of

# The bytes that count as white space before or after a marker.
WHITE_SPACE = b" \t\r\n"


@dataclass(frozen=True)
class GuideRules:
    """The constant data of guides. The guides of several requests can share one object.

    Attributes:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        stop_mask: the mask of the stop tokens.
        free_mask: the mask of all tokens except the stop tokens.
        grammar_mask: the mask of the tokens that a grammar may allow. It excludes the stop tokens,
            and all special tokens that the grammar does not contain.
        grammar_bits: `grammar_mask` as bytes. Looking up one token is faster in bytes.
        white_space_mask: the mask of the tokens that are white space.
        marker: the bytes after which the grammar applies, without white space around them. The
            marker is b"" if the grammar applies from the first token on.
        spanning: the tokens that contain the end of the marker and further text. The key is the
            number of the marker's bytes that must come before the token. Each value is a list of
            pairs: a token, and the text of the token after the marker. Example: the marker is
            "</think>". Under the key 7, the list contains the token `>{` with the text `{`.
    """

    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    stop_mask: TokenMask
    free_mask: TokenMask
    grammar_mask: TokenMask
    grammar_bits: bytes
    white_space_mask: TokenMask
    marker: bytes
    spanning: Mapping[int, list[tuple[int, bytes]]]


def rules_for(
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    allowed_special_ids: Iterable[int],
    after: str,
) -> GuideRules:
    """Return the constant data for the guide of a request.

    A guide determines which tokens may come next in an answer. It looks up the token masks and the
    token lists of this data for each token of the answer.

    Args:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        allowed_special_ids: the special tokens that the grammar contains.
        after: the text after which the grammar applies, such as "</think>"; see GrammarSpec.
    """
    size = vocabulary.size
    stop_mask = mask_of(stop_ids, size)
    all_tokens = mask_of(range(size), size)
    free_mask = all_tokens & ~stop_mask
    forbidden_special_ids = vocabulary.special_ids - frozenset(allowed_special_ids)
    forbidden_mask = mask_of(forbidden_special_ids | vocabulary.unusable_ids, size)
    grammar_mask = free_mask & ~forbidden_mask
    marker = after.strip().encode()
    return GuideRules(
        vocabulary=vocabulary,
        stop_ids=stop_ids,
        stop_mask=stop_mask,
        free_mask=free_mask,
        grammar_mask=grammar_mask,
        grammar_bits=grammar_mask.tobytes(),
        white_space_mask=mask_of(vocabulary.white_space_ids - stop_ids, size),
        marker=marker,
        spanning=_spanning_tokens(vocabulary, marker),
    )


def _spanning_tokens(vocabulary: Vocabulary, marker: bytes) -> dict[int, list[tuple[int, bytes]]]:
    """Return the tokens that contain the end of the marker and some text after the marker.

    The marker is the text after which a grammar applies. If a token continues after the marker, the
    rest of the token must match the grammar. A key of the result is the number of the marker's
    bytes that must come before the token. Each value is a list of pairs: a token, and the text of
    the token after the marker and after any white space.

    Example: the marker is "</think>". The token 5 with the text `>{` gives {7: [(5, b"{")]}. The
    token 9 with the text `</think>[` gives {0: [(9, b"[")]}.
    """
    if not marker:
        return {}
    spanning = {0: _tokens_with_marker(vocabulary, marker)}
    for num_before in range(1, len(marker)):
        spanning[num_before] = _tokens_with_marker_end(vocabulary, marker[num_before:])
    return {num_before: tokens for num_before, tokens in spanning.items() if tokens}


def _tokens_with_marker(vocabulary: Vocabulary, marker: bytes) -> list[tuple[int, bytes]]:
    """Return the tokens that contain the whole marker and text after the marker.

    Each item is a token, and the text of the token after the marker and after any white space.
    Example: for the marker "</think>", the token 9 with the text `</think>[` gives (9, b"[").
    """
    tokens = []
    for data, token_id in vocabulary.sorted_tokens:
        _, _, after_marker = data.partition(marker)  # b"" if the token does not contain the marker
        text_after = after_marker.lstrip(WHITE_SPACE)
        if text_after:
            tokens.append((token_id, text_after))
    return tokens


def _tokens_with_marker_end(vocabulary: Vocabulary, marker_end: bytes) -> list[tuple[int, bytes]]:
    """Return the tokens that start with `marker_end`, followed by more text.

    `marker_end` contains the last bytes of the marker. Each item of the result is a token, and the
    text of the token after the marker and after any white space. Example: for the last byte `>` of
    "</think>", the token 5 with the text `>{` gives (5, b"{").
    """
    tokens = []
    for data, token_id in vocabulary.starting_with(marker_end):
        text_after = data.removeprefix(marker_end).lstrip(WHITE_SPACE)
        if text_after:
            tokens.append((token_id, text_after))
    return tokens
