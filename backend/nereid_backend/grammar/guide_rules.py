# SPDX-License-Identifier: Apache-2.0
"""Computes token masks and other data that determine which tokens an answer may contain."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nereid_backend.grammar.vocabulary import TokenMask, Vocabulary, mask_of

# The bytes that count as white space before or after a marker such as "</think>".
WHITE_SPACE = b" \t\r\n"


class SpanningToken(NamedTuple):
    """A token that contains the end of a marker such as "</think>", and more text after the end.

    Example: for the marker "</think>", the token `> {` has the `text_after` b"{".

    Attributes:
        token_id: the token.
        text_after: the text of the token after the marker and after any white space.
    """

    token_id: int
    text_after: bytes


@dataclass(frozen=True)
class GuideRules:
    """Token masks and other constant data that determine which tokens requests may generate.

    Attributes:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        stop_mask: the mask of the stop tokens.
        free_mask: the mask of all tokens except the stop tokens. These tokens are allowed before
            the marker, where the grammar does not apply yet.
        grammar_mask: the mask of the tokens that a grammar may allow. It excludes the stop tokens,
            the special tokens that the grammar does not contain, and ids without bytes.
        white_space_mask: the mask of the tokens that are white space. They are allowed between the
            marker and the text of the grammar.
        marker: the bytes after which the grammar applies, without white space around them. The
            marker is b"" if the grammar applies from the first token on.
        spanning: the tokens that contain the end of the marker and further text. The key is the
            beginning of the marker that must come before the token. Example: the marker is
            "</think>". Under the key b"</think", the list contains the token `>{`.
    """

    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    stop_mask: TokenMask
    free_mask: TokenMask
    grammar_mask: TokenMask
    white_space_mask: TokenMask
    marker: bytes
    spanning: Mapping[bytes, list[SpanningToken]]

    @cached_property
    def grammar_bits(self) -> bytes:
        """`grammar_mask` as bytes. Looking up one token is faster in bytes."""
        return self.grammar_mask.tobytes()


def rules_for(
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    allowed_special_ids: Iterable[int],
    marker: str,
) -> GuideRules:
    """Return the constant data of a guide: token masks, and lists of tokens.

    A guide determines which tokens may come next in an answer. A token mask has one bit for each
    token of the vocabulary. The bit is set if the token is allowed.

    Args:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        allowed_special_ids: the special tokens that the grammar contains.
        marker: the text after which the grammar applies, such as "</think>"; "" if the grammar
            applies from the first token on.
    """
    size = vocabulary.size
    stop_mask = mask_of(stop_ids, size)
    # Before the marker, every token except the stop tokens is allowed.
    free_mask = mask_of(range(size), size) & ~stop_mask
    # In the part of the answer that must match the grammar, other special tokens and ids without
    # bytes are not allowed either.
    forbidden_special_ids = vocabulary.special_ids - frozenset(allowed_special_ids)
    forbidden_ids = forbidden_special_ids | vocabulary.unusable_ids
    grammar_mask = free_mask & ~mask_of(forbidden_ids, size)
    # Models do not always generate the white space around the marker, so remove it from the marker.
    # Example: "</think>\n" becomes "</think>".
    marker_bytes = marker.strip().encode()
    return GuideRules(
        vocabulary=vocabulary,
        stop_ids=stop_ids,
        stop_mask=stop_mask,
        free_mask=free_mask,
        grammar_mask=grammar_mask,
        white_space_mask=mask_of(vocabulary.white_space_ids - stop_ids, size),
        marker=marker_bytes,
        # the tokens that contain the end of the marker and the beginning of the grammar's text
        spanning=_spanning_tokens(vocabulary, marker_bytes),
    )


def _spanning_tokens(vocabulary: Vocabulary, marker: bytes) -> dict[bytes, list[SpanningToken]]:
    """Return the tokens that contain the end of the marker and some text after the marker.

    The marker is the text after which a grammar applies. If a token continues after the marker, the
    rest of the token must match the grammar. The result maps each beginning of the marker to the
    tokens that can follow it. The key b"" maps to the tokens with the whole marker.

    Example: the marker is "</think>". The token 5 with the text `>{` gives
    {b"</think": [SpanningToken(5, b"{")]}. The token 9 with the text `</think>[` gives
    {b"": [SpanningToken(9, b"[")]}.
    """
    if not marker:
        return {}
    spanning = {b"": _tokens_with_marker(vocabulary, marker)}
    for length in range(1, len(marker)):
        beginning, end = marker[:length], marker[length:]
        spanning[beginning] = _tokens_with_marker_end(vocabulary, end)
    return {beginning: tokens for beginning, tokens in spanning.items() if tokens}


def _tokens_with_marker(vocabulary: Vocabulary, marker: bytes) -> list[SpanningToken]:
    """Return the tokens that contain the whole marker and text after the marker.

    White space after the marker is ignored, because it need not match the grammar. A token with
    nothing but white space after the marker is left out. Example: for the marker "</think>", the
    token 9 with the text `</think> [` gives SpanningToken(9, b"[").
    """
    tokens = []
    for data, token_id in vocabulary.sorted_tokens:
        _, _, after_marker = data.partition(marker)  # b"" if the token does not contain the marker
        text_after = after_marker.lstrip(WHITE_SPACE)
        if text_after:
            tokens.append(SpanningToken(token_id, text_after))
    return tokens


def _tokens_with_marker_end(vocabulary: Vocabulary, marker_end: bytes) -> list[SpanningToken]:
    """Return the tokens whose text begins with `marker_end` and continues after `marker_end`.

    `marker_end` contains the last bytes of the marker. Example: for the last byte `>` of
    "</think>", the token 5 with the text `>{` gives SpanningToken(5, b"{").
    """
    tokens = []
    for data, token_id in vocabulary.starting_with(marker_end):
        text_after = data.removeprefix(marker_end).lstrip(WHITE_SPACE)
        if text_after:
            tokens.append(SpanningToken(token_id, text_after))
    return tokens
