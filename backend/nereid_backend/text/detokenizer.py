# SPDX-License-Identifier: Apache-2.0
"""Converts token ids into text while the tokens are being generated.

The total time is linear in the length of the output. No incomplete character is returned.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]

_REPLACEMENT = "�"
# A character has at most 4 bytes in UTF-8, so it consists of at most 4 tokens of one byte.
_MAX_CHARACTER_TOKENS = 4
# The largest number of tokens whose text is not returned yet. If more tokens in a row cannot be
# decoded, their bytes are invalid, and further tokens would not complete a character.
_MAX_HELD_TOKENS = 8


def decoder(tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool) -> Decode:
    """Return the fastest function that converts token ids to text with this tokenizer.

    If the tokenizer's class does not change how transformers decodes, the function calls the
    library tokenizers directly. Such a call costs much less than a call of transformers.

    Args:
        tokenizer: the tokenizer of the checkpoint.
        skip_special_tokens: whether the text of special tokens is left out.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    has_standard_decoding = all(
        getattr(kind, name) is getattr(TokenizersBackend, name, None)
        for name in ("decode", "_decode", "convert_tokens_to_string")
    )
    if isinstance(tokenizer, TokenizersBackend) and has_standard_decoding:
        backend = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(
        tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


class Detokenizer:
    """Converts the tokens of one answer into text, a few tokens at a time.

    The new text is the difference of two decodings: the text of the last returned tokens, and the
    text of these tokens followed by the new tokens. Some tokenizers change the start of a text, for
    example by dropping its first space. Both decodings contain this change, so the difference is
    not affected.

    If a text ends in the middle of a character, it is not returned until the rest of the character
    arrives. Example: two tokens contain the two bytes of "é". The first call of `feed` returns "",
    and the second call returns "é".
    """

    def __init__(self, decode: Decode, seed_token_ids: Sequence[int] = ()) -> None:
        """Set the state before the first token of an answer.

        Args:
            decode: converts token ids into text; see `decoder`.
            seed_token_ids: the tokens directly before the answer, usually the last tokens of the
                prompt. The text of these tokens is not returned.
        """
        self._decode = decode
        # The window has two parts: first the tokens whose text was returned, and then the tokens
        # whose text was not returned yet. `_start` is the index of the first token of the second
        # part.
        self._window = list(seed_token_ids)
        self._start = len(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add new tokens of the answer, and return the new text.

        If the new text ends in the middle of a character, return "" and wait for further tokens.
        """
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        before = self._decode(self._window[: self._start]) if self._start else ""
        text = self._decode(self._window)
        may_hold = len(self._window) - self._start <= _MAX_HELD_TOKENS
        if may_hold and len(text) == len(before):
            # The new tokens have no text, for example because they are special tokens. Do not mark
            # them as returned, because they are no useful context for decoding further tokens.
            return ""
        if text.endswith(_REPLACEMENT):
            return "" if may_hold else self._return_decodable(before)
        self._advance(len(self._window))
        return text[len(before) :]

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD in place of an incomplete character."""
        if self._start == len(self._window):
            return ""
        before = self._decode(self._window[: self._start]) if self._start else ""
        text = self._decode(self._window)[len(before) :]
        self._advance(len(self._window))
        return text

    def _return_decodable(self, before: str) -> str:
        """Return the decoded text up to its last complete character.

        This method is called if too many tokens wait for the rest of a character.

        The returned text ends after the last token that completes a character. If none of the last
        four tokens completes a character, their bytes are invalid. In that case, return the text of
        all tokens except the last four, with U+FFFD for invalid bytes.

        Args:
            before: the text of the tokens before `_start`.
        """
        length = len(self._window)
        for num_left in range(1, _MAX_CHARACTER_TOKENS + 1):
            text = self._decode(self._window[: length - num_left])
            if not text.endswith(_REPLACEMENT):
                break
        # If no iteration has reached `break`, `text` is the text of all tokens except the last
        # four.
        self._advance(length - num_left)
        return text[len(before) :]

    def _advance(self, end: int) -> None:
        """Mark the tokens before `end` as returned. Remove tokens that were marked earlier.

        Example: the window is [5, 6, 7, 8], and its first 2 tokens have been returned. After
        `_advance(3)`, the window is [7, 8], and its first token has been returned.
        """
        del self._window[: self._start]
        self._start = end - self._start
