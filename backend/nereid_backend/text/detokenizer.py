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
# A tokenizer's class can override these methods of transformers, which convert token ids to text.
_DECODING_METHODS = ("decode", "_decode", "convert_tokens_to_string")
# A character has at most 4 bytes in UTF-8. Even if each byte is a separate token, the character
# consists of at most 4 tokens.
_MAX_CHARACTER_TOKENS = 4
# A token can end in the middle of a character. Such a token waits for further tokens that complete
# the character. If more than `_MAX_WAITING_TOKENS` tokens wait, their bytes are invalid, and
# further tokens would not help.
_MAX_WAITING_TOKENS = 8


def decoder(tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool) -> Decode:
    """Return the fastest function that can convert the token ids of a tokenizer to text.

    Usually, the function calls the library tokenizers directly, which takes much less time than a
    call of transformers. If the tokenizer is not built on this library, or if the tokenizer's class
    overrides a decoding method of transformers, the function calls transformers.

    Args:
        tokenizer: the tokenizer of the checkpoint.
        skip_special_tokens: whether the text of special tokens is left out.
    """
    from transformers import TokenizersBackend

    def decode_with_transformers(token_ids: list[int]) -> str:
        text = tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    if not isinstance(tokenizer, TokenizersBackend):
        return decode_with_transformers
    overrides_decoding = any(
        getattr(type(tokenizer), name) is not getattr(TokenizersBackend, name, None)
        for name in _DECODING_METHODS
    )
    if overrides_decoding:
        return decode_with_transformers
    backend = tokenizer.backend_tokenizer
    return lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))


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
        """Create a detokenizer for an answer that has no tokens yet.

        Args:
            decode: a function that converts token ids into text, such as the result of `decoder`.
            seed_token_ids: the tokens directly before the answer, usually the last tokens of the
                prompt. The text of these tokens is not returned.
        """
        self._decode = decode
        # `_window` contains the last tokens of the text. Its first `_num_returned` tokens are only
        # the context for decoding the tokens after them. Each of these first tokens is a seed
        # token, or a token whose text was already returned.
        self._window = list(seed_token_ids)
        self._num_returned = len(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add new tokens of the answer, and return the new text.

        If the text ends in the middle of a character, return "" and wait for the next tokens.
        Example: two tokens contain the two bytes of "é". Two calls of this method return "" and
        "é". If more than 8 tokens wait, their bytes are invalid, so waiting longer would not help.
        The text before the invalid bytes is then returned.
        """
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        returned_text = self._returned_text()
        text = self._decode(self._window)
        # The bytes of an incomplete character are decoded as the replacement character U+FFFD.
        ends_within_character = text.endswith(_REPLACEMENT)
        can_wait = len(self._window) - self._num_returned <= _MAX_WAITING_TOKENS
        if ends_within_character:
            return "" if can_wait else self._return_decodable(returned_text)
        # If the new tokens add no text (for example, special tokens), wait for more tokens, because
        # tokens without text are not useful as the context for decoding the next tokens.
        has_new_text = len(text) != len(returned_text)
        if can_wait and not has_new_text:
            return ""
        self._mark_returned(len(self._window))
        return text[len(returned_text) :]

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD in place of an incomplete character."""
        if self._num_returned == len(self._window):
            return ""
        returned_text = self._returned_text()
        text = self._decode(self._window)
        self._mark_returned(len(self._window))
        return text[len(returned_text) :]

    def _returned_text(self) -> str:
        """Decode the tokens whose text was already returned, and return this text again."""
        if self._num_returned == 0:
            return ""
        return self._decode(self._window[: self._num_returned])

    def _return_decodable(self, returned_text: str) -> str:
        """Return the new text without the incomplete character at its end.

        The tokens of this character still wait. Call this method only if more than four tokens
        wait. `returned_text` is the text of the tokens whose text was returned earlier.
        """
        num_decodable = self._num_decodable()
        text = self._decode(self._window[:num_decodable])
        self._mark_returned(num_decodable)
        return text[len(returned_text) :]

    def _num_decodable(self) -> int:
        """Return how many tokens of the window can be decoded.

        The window ends with an incomplete character. The tokens of this character are left out.

        A character has at most four tokens, and the window contains more tokens. Example: the text
        without the last token ends with U+FFFD, and the text without the last two tokens ends with
        "a". In this case, all tokens except the last two can be decoded. If the text without the
        last three tokens still ends with U+FFFD, the bytes are invalid, and only the last four
        tokens are left out.
        """
        num_tokens = len(self._window)
        for num_left_out in range(1, _MAX_CHARACTER_TOKENS):
            text = self._decode(self._window[: num_tokens - num_left_out])
            if not text.endswith(_REPLACEMENT):
                return num_tokens - num_left_out
        return num_tokens - _MAX_CHARACTER_TOKENS

    def _mark_returned(self, end: int) -> None:
        """Record that the text of the tokens before the index `end` has been returned.

        The tokens whose text was returned earlier are removed from the window.

        Example: the window is [5, 6, 7, 8], and its first 2 tokens have been returned. After
        `_mark_returned(3)`, the window is [7, 8], and its first token has been returned.
        """
        del self._window[: self._num_returned]
        self._num_returned = end - self._num_returned
