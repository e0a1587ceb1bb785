# SPDX-License-Identifier: Apache-2.0
"""What single tokens stand for: their exact bytes, which text alone cannot show.

A token of a byte-level vocabulary may be part of a character; its text is then U+FFFD, and a client
that joins tokens needs the bytes.
"""

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BytesOfPiece = Callable[[str], bytes]

_BLANK = "▁"  # how SentencePiece vocabularies write a space


class TokenText:
    """Bytes and text of token ids, remembered once asked for.

    Args:
        tokenizer: any of transformers'. Bytes are exact where its decoder says how its vocabulary
            is written (byte-level, byte fallback, SentencePiece); else they are the text's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: str(token.content)
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._of_piece = _piece_reader(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def data(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; empty for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read(token_id)
        return known

    def text(self, token_id: int) -> str:
        """The same as text; what is no whole character is U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self.data(token_id).decode("utf-8", errors="replace")
            self._texts[token_id] = known
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        if self._of_piece is None:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            return str(text).encode("utf-8")
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        return self._of_piece(piece) if isinstance(piece, str) else b""


def _piece_reader(tokenizer: "PreTrainedTokenizerBase") -> BytesOfPiece | None:
    """How a piece of this vocabulary is read; None where its decoder does not say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    steps = _decoder_steps(json.loads(backend.to_str()).get("decoder"))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = any(
        step["type"] == "Replace" and step.get("content") == " " and _BLANK in str(step["pattern"])
        for step in steps
    )
    if replaced or "Metaspace" in kinds:
        return _byte_fallback if "ByteFallback" in kinds else _sentence_piece
    return None


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _byte_level(piece: str) -> bytes:
    table = _byte_of_letter()
    return b"".join(
        bytes([table[letter]]) if letter in table else letter.encode("utf-8") for letter in piece
    )


def _sentence_piece(piece: str) -> bytes:
    return piece.replace(_BLANK, " ").encode("utf-8")


def _byte_fallback(piece: str) -> bytes:
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    if is_byte:
        with contextlib.suppress(ValueError):
            return bytes([int(piece[3:5], 16)])
    return _sentence_piece(piece)


@cache
def _byte_of_letter() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet (GPT-2).

    Printable bytes of Latin-1 stand for themselves; the others, in order, for the letters from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
