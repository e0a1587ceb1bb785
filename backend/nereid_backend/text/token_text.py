# SPDX-License-Identifier: Apache-2.0
"""Returns the exact bytes and the text of single tokens.

A token may contain only some bytes of a character. The text of such a token is U+FFFD. Clients that
join tokens therefore need the bytes.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nereid_backend.grammar.token_bytes import SPACE, byte_fallback, byte_level, sentence_piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BytesOfPiece = Callable[[str], bytes]


class TokenText:
    """The bytes and texts of single tokens. Each result is computed once and then cached."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Determine how the vocabulary of a tokenizer represents bytes.

        Args:
            tokenizer: any tokenizer of transformers. The bytes are exact if the tokenizer's decoder
                defines how the vocabulary represents bytes (byte-level, byte fallback or
                SentencePiece). Otherwise, the bytes are the UTF-8 bytes of the token's text.
        """
        self._tokenizer = tokenizer
        # The texts of tokens that were added to the vocabulary, such as special tokens.
        self._added = {
            token_id: str(token.content)
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        # Converts an entry of the vocabulary to bytes; None if the representation is unknown.
        self._bytes_of_piece = _piece_reader(tokenizer)
        # Caches the results of the method `data` by token id.
        self._bytes: dict[int, bytes] = {}
        # Caches the results of the method `text` by token id.
        self._texts: dict[int, str] = {}

    def data(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, or b"" for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._read(token_id)
            self._bytes[token_id] = data
        return data

    def text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD in place of incomplete characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.data(token_id).decode("utf-8", errors="replace")
            self._texts[token_id] = text
        return text

    def _read(self, token_id: int) -> bytes:
        """Compute the bytes of a token, or return b"" for an id without a token."""
        if self._bytes_of_piece is None:
            text = self._added.get(token_id)
            if text is None:
                text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            return str(text).encode("utf-8")
        # The vocabulary entry for `token_id`; None if there is no token with this id. The decoder
        # also converts added tokens, such as "▁▁" in Gemma's vocabulary, which means two spaces.
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        return self._bytes_of_piece(piece) if isinstance(piece, str) else b""


def _piece_reader(tokenizer: "PreTrainedTokenizerBase") -> BytesOfPiece | None:
    """Return the function that converts vocabulary entries to bytes, or None for unknown formats.

    The decoder of a tokenizer is a list of steps. The types of these steps show how the vocabulary
    represents bytes. Example: for a decoder with a step of the type "ByteLevel", the result is the
    function `byte_level`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    settings = json.loads(backend.to_str())  # the content of tokenizer.json
    steps = _decoder_steps(settings.get("decoder"))
    step_types = {step["type"] for step in steps}
    if "ByteLevel" in step_types:
        # In byte-level BPE, as in GPT-2, each character of an entry represents one byte.
        return byte_level
    # In SentencePiece, as in Llama, "▁" represents a space.
    is_sentence_piece = "Metaspace" in step_types or any(map(_replaces_with_space, steps))
    if not is_sentence_piece:
        return None
    # With byte fallback, an entry such as "<0xE2>" represents one byte.
    return byte_fallback if "ByteFallback" in step_types else sentence_piece


def _replaces_with_space(step: dict[str, Any]) -> bool:
    """Return whether `step`, one operation of a tokenizer's decoder, replaces "▁" by a space."""
    if step["type"] != "Replace" or step.get("content") != " ":
        return False
    return SPACE in str(step["pattern"])


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return all operations of a tokenizer's decoder as a flat list."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]
