# SPDX-License-Identifier: Apache-2.0
"""Limits the size of texts and the number of inputs.

These limits are checked before anything is tokenised.

A text of n bytes usually has at least n / b tokens, where b is the number of bytes of the longest
token. A text with more than max_model_len * b bytes is therefore too long. This module does not
import torch, so that the stubs can use it.
"""

from dataclasses import dataclass

from nereid_backend.errors import RequestError

# The size limit of a text is max_model_len times the number of bytes of the longest token, but at
# least max_model_len times `_MIN_TOKEN_BYTES`. The minimum is necessary because some tokenizers
# shorten a text before they divide it into tokens. A long text can then have few tokens, even if
# each token is short.
_MIN_TOKEN_BYTES = 16
TRUNCATE_REMEDY = 'Shorten the input, or send truncate=true (in Cohere\'s API, truncate="END").'
# A long text does not always have many tokens: some tokenizers drop white space, or convert a long
# unknown word to one token. A text of at most `_MIN_TEXT_BYTES` bytes is therefore always
# tokenised, and the number of its tokens is checked. Tokenising such a text takes at most about 50
# ms.
_MIN_TEXT_BYTES = 2**16
# The default length of the queue is chosen so that a full queue of the largest inputs needs at most
# `_QUEUE_BYTES` bytes. However, the length is at least 2048, because OpenAI's API permits 2048
# inputs in one request.
_QUEUE_BYTES = 2**30
_MIN_QUEUE_LENGTH, _MAX_QUEUE_LENGTH = 2048, 16384
# The size of a token id in a Python list: 8 bytes for a pointer, and 32 bytes for an integer
# object.
_TOKEN_ID_BYTES = 40


@dataclass(frozen=True, slots=True)
class TextLimit:
    """Checks the size of texts, and truncates texts that are too large.

    Attributes:
        max_model_len: the length limit of inputs in tokens.
        max_token_bytes: the number of bytes of the longest token.
        truncation_side: the end of a text that is removed by truncation: "right" or "left".
    """

    max_model_len: int
    max_token_bytes: int
    truncation_side: str = "right"

    @property
    def max_text_bytes(self) -> int:
        """The largest number of bytes of a text. A larger text is not tokenised."""
        return max(self.max_model_len * self._max_bytes_per_token, _MIN_TEXT_BYTES)

    @property
    def default_max_num_waiting(self) -> int:
        """The default of the setting max_num_waiting.

        Longer inputs need more memory, so the default is smaller if max_model_len is larger.
        Example: 12,483 inputs for a limit of 512 tokens, 2048 inputs for a limit of 32,768 tokens.
        """
        input_bytes = self.max_text_bytes + _TOKEN_ID_BYTES * self.max_model_len
        return min(max(_QUEUE_BYTES // input_bytes, _MIN_QUEUE_LENGTH), _MAX_QUEUE_LENGTH)

    @property
    def _max_bytes_per_token(self) -> int:
        """The number of text bytes that count as one token; see `_MIN_TOKEN_BYTES`."""
        return max(self.max_token_bytes, _MIN_TOKEN_BYTES)

    def fits(self, text: str) -> bool:
        """Return whether a text has at most `max_text_bytes` bytes in UTF-8."""
        return self._min_num_bytes(text) <= self.max_text_bytes

    def check(self, subject: str, text: str | bytes, remedy: str = "Send a shorter text.") -> None:
        """Raise a RequestError if a text has more than `max_text_bytes` bytes.

        Args:
            subject: the beginning of the error message, such as "prompt: the prompt".
            text: the text, as a string or as bytes in UTF-8.
            remedy: the last sentence of the error message.

        Raises:
            RequestError: the text has more than `max_text_bytes` bytes in UTF-8.
        """
        # Encoding a very long string would take long. For such a string, `_min_num_bytes` returns a
        # lower bound: the number of characters.
        num_bytes = len(text) if isinstance(text, bytes) else self._min_num_bytes(text)
        if num_bytes > self.max_text_bytes:
            # Clients know the limit as a number of tokens, so the error reports the size of the
            # text as a number of tokens. The number of bytes is divided and rounded down, so the
            # quotient can equal the limit. Therefore, report at least one token more than the
            # limit.
            min_num_tokens = max(num_bytes // self._max_bytes_per_token, self.max_model_len + 1)
            raise RequestError(
                f"{subject} has at least {num_bytes} bytes, which count as at least "
                f"{min_num_tokens} tokens, but the limit is {self.max_model_len} (max_model_len). "
                f"{remedy}"
            )

    def truncate(self, text: str) -> str:
        """Remove characters from a text until the text has at most `max_text_bytes` bytes in UTF-8.

        `truncation_side` determines the end at which characters are removed. Only whole characters
        are removed. Example: the limit is 3 bytes, and the text is "aää". If `truncation_side` is
        "right", "aä" is returned. If it is "left", "ä" is returned.
        """
        if self.fits(text):
            return text
        limit = self.max_text_bytes
        # First cut the text to `limit` characters. Then encode the text, and cut the result to
        # `limit` bytes. The first cut avoids encoding the whole of a long text. The first cut never
        # removes too many characters, because each character has at least one byte.
        # "surrogatepass" encodes lone surrogates instead of raising an error. "ignore" removes
        # incomplete characters and lone surrogates when the bytes are decoded.
        if self.truncation_side == "left":
            encoded = text[-limit:].encode("utf-8", "surrogatepass")[-limit:]
        else:
            encoded = text[:limit].encode("utf-8", "surrogatepass")[:limit]
        return encoded.decode("utf-8", "ignore")

    def _min_num_bytes(self, text: str) -> int:
        """Return the number of bytes of a text in UTF-8. For a large text, return a lower bound.

        The lower bound is the number of characters. It is returned if it exceeds `max_text_bytes`.
        Such a text is not encoded, because encoding a large text takes time and memory.
        """
        if len(text) > self.max_text_bytes or text.isascii():
            return len(text)
        return len(text.encode("utf-8", "surrogatepass"))


def check_num_inputs(field: str, count: int, limit: int) -> None:
    """Raise a RequestError if a request has more inputs than the queue can contain.

    Args:
        field: the field that contains the inputs, for the error message.
        count: the number of inputs of the request.
        limit: the setting max_num_waiting.

    Raises:
        RequestError: `count` exceeds `limit`.
    """
    if count > limit:
        raise RequestError(
            f"{field}: the request has {count} inputs, but the limit is {limit} (max_num_waiting). "
            "Send fewer inputs."
        )
