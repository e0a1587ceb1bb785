# SPDX-License-Identifier: Apache-2.0
"""The bytes that every token stands for, read from a checkpoint's tokenizer."""

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereid_backend.errors import RequestError

Row = NDArray[np.int32]  # one bit a token, ceil(size / 32) words
Rows = NDArray[np.int32]  # [n, ceil(size / 32)], contiguous


def row_width(vocab_size: int) -> int:
    """Words in a mask's row."""
    return (vocab_size + 31) // 32


def row_of(token_ids: Iterable[int], vocab_size: int) -> Row:
    """A row in which the bits of these tokens are set."""
    bits = np.zeros(row_width(vocab_size) * 32, dtype=np.uint8)
    ids = [one for one in token_ids if 0 <= one < vocab_size]
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32).copy()


@dataclass(frozen=True)
class Vocabulary:
    """What the grammar backends must know of a tokenizer.

    Attributes:
        tokens: bytes of each token, one entry for each of the model's logits; b"" where the
            tokenizer has no such token.
        special_ids: tokens that are markup and never plain text (bos, turn markers, ...).
        marker_ids: tokens that the tokenizer finds before all others, special or not.
        encode: text to token ids, without any special tokens around it.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    marker_ids: frozenset[int]
    encode: Callable[[str], list[int]] = field(repr=False)

    @property
    def size(self) -> int:
        """Width of the model's logits."""
        return len(self.tokens)

    @cached_property
    def sorted_tokens(self) -> list[tuple[bytes, int]]:
        """(bytes, id) of every token that has bytes, in the order of the bytes."""
        return sorted((data, number) for number, data in enumerate(self.tokens) if data)

    @cached_property
    def unusable_ids(self) -> frozenset[int]:
        """Tokens without bytes."""
        return frozenset(number for number, data in enumerate(self.tokens) if not data)

    @cached_property
    def blank_ids(self) -> frozenset[int]:
        """Tokens of one or two blanks, which may stand behind a marker."""
        return frozenset(
            number
            for number, data in enumerate(self.tokens)
            if 0 < len(data) <= 2 and not data.strip(b" \n") and number not in self.special_ids
        )

    def starting_with(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """Tokens that begin with these bytes, themselves included."""
        table = self.sorted_tokens
        for at in range(bisect.bisect_left(table, (prefix, -1)), len(table)):
            if not table[at][0].startswith(prefix):
                return
            yield table[at]

    def spell(self, data: bytes) -> list[int]:
        """Plain tokens that make up these bytes, the longest first; for feeding a matcher only.

        Raises:
            KeyError: some byte has no token.
        """
        found: list[int] = []
        while data:
            end = next(end for end in range(len(data), -1, -1) if data[:end] in self._plain)
            if not end:
                raise KeyError(data[:1])
            found.append(self._plain[data[:end]])
            data = data[end:]
        return found

    @cached_property
    def _plain(self) -> Mapping[bytes, int]:
        table = {
            data: number
            for number, data in enumerate(self.tokens)
            if data and number not in self.special_ids
        }
        return {b"": -1, **table}


def load_vocabulary(path: str, vocab_size: int) -> Vocabulary:
    """The vocabulary of the tokenizer in a checkpoint's folder. Runs no code from there.

    Raises:
        RequestError: the checkpoint has none from which the tokens' bytes can be told.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise RequestError(
            f"grammar: the checkpoint's tokenizer cannot be loaded, so nothing can be constrained: "
            f"{error}"
        ) from error
    return vocabulary_of(tokenizer, vocab_size)


def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:  # noqa: ANN401 - transformers'
    """The vocabulary of a transformers tokenizer that is built on the tokenizers library.

    Raises:
        RequestError: it is built on something else.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"grammar: {type(tokenizer).__name__} does not say which bytes its tokens stand for, "
            "so nothing can be constrained with this checkpoint"
        )
    named = tokenizer.get_vocab()
    read = _reader(json.loads(backend.to_str()).get("decoder"), named)
    tokens = [b""] * vocab_size
    for text, number in named.items():
        if number < vocab_size:
            tokens[number] = read(text)
    special, markers = set(), set()
    for number, added in tokenizer.added_tokens_decoder.items():
        if number < vocab_size:
            tokens[number] = added.content.encode()
            markers.add(number)
            if added.special:
                special.add(number)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Vocabulary(tuple(tokens), frozenset(special), frozenset(markers), encode)


# ---- how a token's text spells its bytes ---------------------------------------------------------


def _reader(decoder: object, named: Mapping[str, int]) -> Callable[[str], bytes]:
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds or all(f"<0x{byte:02X}>" in named for byte in range(128, 256)):
        return _byte_fallback
    if not kinds and "Ġ" in named:
        return _byte_level
    return _with_blanks


def _kinds(decoder: object) -> Iterator[str]:
    if isinstance(decoder, Mapping):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _kinds(part)


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE spells bytes (GPT-2's bytes_to_unicode)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(kept)]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + number): byte for number, byte in enumerate(shifted)})
    return table


_ALPHABET = _alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in text)
    except KeyError:
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return _with_blanks(text)


def _with_blanks(text: str) -> bytes:
    return text.replace("▁", " ").encode()
