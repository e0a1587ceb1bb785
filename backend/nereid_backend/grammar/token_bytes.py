# SPDX-License-Identifier: Apache-2.0
"""Converts the entries of a tokenizer's vocabulary into bytes.

A vocabulary represents bytes in one of three ways: byte-level BPE, SentencePiece, or SentencePiece
with entries for single bytes (byte fallback).
"""

import contextlib
from functools import cache

# SentencePiece vocabularies write a space as this character.
SPACE = "▁"
# The length of a vocabulary entry that represents one byte, such as "<0x0A>".
_BYTE_ENTRY_LENGTH = 6


def byte_level(text: str) -> bytes:
    """Return the bytes of a byte-level BPE entry. Example: "Ġhi" gives b" hi".

    If an entry contains a character outside the byte-level alphabet, the entry is plain text.
    """
    table = _byte_of_character()
    try:
        return bytes(table[char] for char in text)
    except KeyError:
        return text.encode()


def sentence_piece(text: str) -> bytes:
    """Return the bytes of a SentencePiece entry. Example: "▁hi" gives b" hi"."""
    return text.replace(SPACE, " ").encode()


def byte_fallback(text: str) -> bytes:
    r"""Return the bytes of the text that a token of a SentencePiece vocabulary represents.

    Examples: "<0x0A>" gives b"\n", and "▁a" gives b" a".
    """
    if len(text) == _BYTE_ENTRY_LENGTH and text.startswith("<0x") and text.endswith(">"):
        with contextlib.suppress(ValueError):
            return bytes([int(text[3:5], 16)])
    return sentence_piece(text)


@cache
def _byte_of_character() -> dict[str, int]:
    """Return a mapping from each character of the byte-level alphabet to its byte.

    Example: "Ġ" is mapped to the byte 32, which is a space.

    Printable characters of Latin-1 represent themselves. The characters from U+0100 on represent
    all other bytes, in order. Source: bytes_to_unicode of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}
