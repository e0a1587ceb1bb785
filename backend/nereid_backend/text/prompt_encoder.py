# SPDX-License-Identifier: Apache-2.0
"""Converts prompts to token ids. If a prompt is much too long, the conversion stops early."""

from typing import TYPE_CHECKING, Any

from nereid_backend.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text usually has at most `_USUAL_CHARS_PER_TOKEN` characters per token. A text may be too long
# if it has more than `_USUAL_CHARS_PER_TOKEN` characters for each allowed token. Before such a text
# is converted as a whole, its tokens are counted piece by piece.
_USUAL_CHARS_PER_TOKEN = 8
# To count the tokens of a long text, the text is divided into pieces of `_PIECE_CHARS` characters.
# Dividing a text can increase the number of its tokens, but at most by the factor `_SPLIT_FACTOR`.
# Therefore a text is rejected only if its pieces have more than `_SPLIT_FACTOR` times the allowed
# number of tokens.
_PIECE_CHARS = 32_768
_SPLIT_FACTOR = 1.1


class PromptEncoder:
    """Converts texts to token ids with one tokenizer. The class is thread-safe.

    The methods call the tokenizers library directly. A direct call takes about 40 % less time than
    a call of the transformers tokenizer. It also releases Python's global lock, and changes no
    state of the tokenizer. If a tokenizer is not built on the tokenizers library, the methods call
    transformers.

    Attributes:
        max_token_bytes: the number of bytes of the longest token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None = None) -> None:
        """Create an encoder. It calls the tokenizers library if possible, otherwise transformers.

        Args:
            tokenizer: the checkpoint's tokenizer. Its truncation and padding are turned off.
            max_tokens: the largest number of tokens of a prompt; None means no limit.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            # `encode_special_tokens` and `split_special_tokens` have the same meaning. If the value
            # is True, a special token in a text, such as "<|im_end|>", is split into normal tokens.
            # If the value is False, the special token becomes one token id.
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        # An upper bound for the number of bytes of a token. Callers use it to compute the largest
        # allowed size of a prompt.
        self.max_token_bytes = _max_token_bytes(tokenizer, self._backend)

    def encode(
        self, text: str, *, add_special_tokens: bool = False, refuse_overlong: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        A special token that is written in the text (`<|im_end|>`) becomes one token id.

        Args:
            text: the text.
            add_special_tokens: whether the tokenizer adds its own special tokens.
            refuse_overlong: whether to refuse a very long text that certainly has more tokens than
                the encoder's limit. Callers that remove surplus tokens themselves set this to
                False. A text that is only slightly too long is never refused, so callers must
                compare the number of tokens with their limit.

        Raises:
            RequestError: `refuse_overlong` is true, and a very long text has too many tokens.
        """
        if refuse_overlong and self._max_tokens is not None:
            self._check_length(text, self._max_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`, without a limit on the number of token ids."""
        if self._backend is None:
            return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        # encode_batch_fast is faster than `encode`, because it does not compute the position of
        # each token in the text.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def _check_length(self, text: str, limit: int) -> None:
        """Raise a RequestError if a very long text certainly has more than `limit` tokens."""
        # If the text probably has at most `limit` tokens, or only slightly more, counting its
        # tokens piece by piece saves no time. Such a text is not checked.
        if len(text) <= _USUAL_CHARS_PER_TOKEN * limit + _PIECE_CHARS:
            return
        min_tokens = self._min_tokens(text, limit)
        if min_tokens > limit:
            raise RequestError(
                f"prompt has more than {int(min_tokens)} tokens; the limit is {limit} "
                "(max_model_len). Send a shorter prompt."
            )

    def _min_tokens(self, text: str, limit: int) -> float:
        """Return a lower bound for the number of tokens of a text.

        The text is divided into pieces, and the tokens of the pieces are counted. A token can be
        cut in two at the end of a piece. Therefore the pieces can have more tokens than the text,
        but at most `_SPLIT_FACTOR` times as many. Stop when the bound exceeds `limit`, because
        converting a very long text takes long.
        """
        num_piece_tokens = 0
        min_tokens = 0.0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_piece_tokens += len(self._encode(piece, add_special_tokens=False))
            min_tokens = num_piece_tokens / _SPLIT_FACTOR
            if min_tokens > limit:
                break
        return min_tokens


def _max_token_bytes(tokenizer: "PreTrainedTokenizerBase", backend: Any) -> int:  # noqa: ANN401
    """Return an upper bound for the number of bytes in one token of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        backend: the object of the library tokenizers that `tokenizer` calls, or None.
    """
    from tokenizers.decoders import ByteLevel

    token_texts = tokenizer.get_vocab()
    if backend is not None and isinstance(backend.decoder, ByteLevel):
        # A byte-level vocabulary writes each byte as one character. Example: " a" is "Ġa".
        return max((len(text) for text in token_texts), default=1)
    return max((len(text.encode()) for text in token_texts), default=1)
