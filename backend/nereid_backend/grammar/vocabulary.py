# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes of a model's tokens from the tokenizer, and creates token masks."""

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereid_backend.errors import RequestError
from nereid_backend.grammar.token_bytes import byte_fallback, byte_level, sentence_piece
from nereid_backend.tokenizer_file import apply_tokenizer_file

# The token mask of one sequence. It has ceil(size / 32) words, and one bit for each token. Bit i of
# word w belongs to token 32 * w + i.
TokenMask = NDArray[np.int32]
# The token masks of n sequences, an array of the shape [n, ceil(size / 32)].
TokenMasks = NDArray[np.int32]

# These decoders, which belong to the Python package `tokenizers`, put a space between two words.
# Whether a token begins a word depends on the tokens around it, so the bytes of a single token are
# not known.
_DECODERS_WITH_SPACES = {"WordPiece", "BPEDecoder", "CTC"}
_SHORT_WHITE_SPACE = frozenset({b" ", b"\n", b"  ", b" \n", b"\n ", b"\n\n"})


def mask_width(vocab_size: int) -> int:
    """Return the number of int32 words in a token mask."""
    return (vocab_size + 31) // 32


def mask_of(token_ids: Iterable[int], vocab_size: int) -> TokenMask:
    """Return a mask that sets the bits of the given tokens. Ignore ids outside the vocabulary.

    Example: the tokens 0 and 33 of a vocabulary of 40 tokens give the words [1, 2].
    """
    bits = np.zeros(mask_width(vocab_size) * 32, dtype=np.uint8)
    ids = [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32).copy()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer, in the form that the grammar libraries require.

    Attributes:
        tokens: the bytes of each token, one entry for each of the model's logits. The entry is b""
            if the tokenizer has no token with this id.
        special_ids: the tokens that are never plain text, such as the token that starts a turn.
        marker_ids: the tokens that the tokenizer recognizes before it splits the rest of a text.
            They include special and other added tokens.
        encode: converts a text into token ids without adding special tokens.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    marker_ids: frozenset[int]
    encode: Callable[[str], list[int]] = field(repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the vocabulary without the function `encode`, which cannot be pickled.

        The unpickled vocabulary encodes texts with `spell`.
        """
        return _without_tokenizer, (self.tokens, self.special_ids, self.marker_ids)

    @property
    def size(self) -> int:
        """The number of the model's logits."""
        return len(self.tokens)

    @cached_property
    def sorted_tokens(self) -> list[tuple[bytes, int]]:
        """The (bytes, id) pairs of all tokens that have bytes, sorted by bytes."""
        return sorted((data, number) for number, data in enumerate(self.tokens) if data)

    @cached_property
    def unusable_ids(self) -> frozenset[int]:
        """The ids for which the tokenizer has no bytes."""
        return frozenset(number for number, data in enumerate(self.tokens) if not data)

    @cached_property
    def white_space_ids(self) -> frozenset[int]:
        """The ids of the tokens that consist of one or two spaces or newlines.

        These tokens may follow a marker.
        """
        return frozenset(
            token_id
            for token_id, data in enumerate(self.tokens)
            if data in _SHORT_WHITE_SPACE and token_id not in self.special_ids
        )

    def starting_with(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the (bytes, id) pairs of all tokens that begin with `prefix`."""
        table = self.sorted_tokens
        for index in range(bisect.bisect_left(table, (prefix, -1)), len(table)):
            data, token_id = table[index]
            if not data.startswith(prefix):
                return
            yield data, token_id

    def spell(self, data: bytes) -> list[int]:
        """Split bytes into plain (not special) tokens, and return the ids of the tokens.

        Each token is the longest plain token that is a prefix of the remaining bytes.

        The tokenizer might choose other tokens. Use the result only to advance a matcher, which
        tracks a position in a grammar and accepts any tokens with the right bytes.

        Raises:
            KeyError: if no plain token is a prefix of the remaining bytes.
        """
        token_ids: list[int] = []
        rest = data
        while rest:
            token = self._longest_plain_prefix(rest)
            token_ids.append(self._plain[token])
            rest = rest[len(token) :]
        return token_ids

    def _longest_plain_prefix(self, data: bytes) -> bytes:
        """Return the longest prefix of `data` that is a plain token.

        A plain token is a token that is not special. Raises KeyError if no plain token is a prefix.
        """
        for length in range(len(data), 0, -1):
            prefix = data[:length]
            if prefix in self._plain:
                return prefix
        raise KeyError(data[:1])

    def encode_forced(self, recent: list[int], data: bytes) -> list[int]:
        """Return the tokens that the tokenizer would choose for the forced bytes `data`.

        The grammar allows no other bytes next. The last token is left out, because it may merge
        with the text that follows. A marker, such as </think>, is not left out: the tokenizer
        separates markers from the rest of a text, so a marker never merges. Return no tokens if the
        bytes would merge with the recent tokens.

        Example: the recent tokens spell `{`, and the bytes are `"name": `. If the tokenizer splits
        `{"name": ` into `{`, `"`, `name`, `":` and ` `, the result is the tokens `"`, `name` and
        `":`.

        Args:
            recent: the last tokens of the answer.
            data: the bytes that must follow.
        """
        forced_ids = self._encode_after(recent, data)  # [] if the bytes merge with `recent`
        if not forced_ids:
            return []
        if forced_ids[-1] not in self.marker_ids:
            forced_ids = forced_ids[:-1]
        # If the tokenizer changes the text, for example by Unicode normalisation, the bytes of the
        # tokens differ from `data`.
        is_changed = not data.startswith(self._bytes_of(forced_ids))
        return [] if is_changed else forced_ids

    def _encode_after(self, recent: list[int], data: bytes) -> list[int]:
        """Return the tokens that the tokenizer would choose for `data` if `data` follows `recent`.

        The tokens of a text depend on the preceding text. Return no tokens if the tokenizer would
        merge the two texts, or if one of them cannot be decoded.
        """
        text = _decoded(data)  # "" if the bytes begin in the middle of a character
        recent_text = _decoded(self._bytes_of(recent))
        is_recent_undecodable = bool(recent) and not recent_text
        if not text or is_recent_undecodable:
            return []
        all_ids = self.encode(recent_text + text)
        is_merged = all_ids[: len(recent)] != recent
        return [] if is_merged else all_ids[len(recent) :]

    def _bytes_of(self, token_ids: list[int]) -> bytes:
        """Return the bytes of several tokens."""
        return b"".join(self.tokens[token_id] for token_id in token_ids)

    @cached_property
    def _plain(self) -> Mapping[bytes, int]:
        """Maps the bytes of a token to the id of the token. Special tokens are not included."""
        return {
            data: number
            for number, data in enumerate(self.tokens)
            if data and number not in self.special_ids
        }


def _without_tokenizer(
    tokens: tuple[bytes, ...], special_ids: frozenset[int], marker_ids: frozenset[int]
) -> Vocabulary:
    """Recreate a pickled vocabulary, with a function `encode` that does not need the tokenizer."""

    def encode(text: str) -> list[int]:
        return vocabulary.spell(text.encode())

    vocabulary = Vocabulary(tokens, special_ids, marker_ids, encode)
    return vocabulary


def load_vocabulary(path: str, vocab_size: int) -> Vocabulary:
    """Load the vocabulary of a checkpoint. No code from the checkpoint's folder is run.

    Args:
        path: the folder of the checkpoint.
        vocab_size: the number of the model's logits.

    Raises:
        RequestError: if the tokenizer cannot be loaded, or does not define the bytes of its tokens.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        apply_tokenizer_file(tokenizer, Path(path))
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise RequestError(
            "grammar: grammars and thinking budgets cannot be used, because the checkpoint's "
            f"tokenizer cannot be loaded: {error}"
        ) from error
    return vocabulary_of(tokenizer, vocab_size)


def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:  # noqa: ANN401 - transformers'
    """Return the vocabulary of a transformers tokenizer: the bytes of each token.

    Args:
        tokenizer: a tokenizer of transformers that is built on the library tokenizers. Its
            truncation and padding are turned off.
        vocab_size: the number of the model's logits.

    Raises:
        RequestError: if the tokenizer is not built on the library tokenizers, or if its tokens have
            no fixed bytes.
    """
    backend = _backend_of(tokenizer)  # a `Tokenizer` of the library tokenizers
    # Some checkpoints contain the truncation and the padding with which they were trained.
    backend.no_truncation()
    backend.no_padding()
    # The tokens that were added to the vocabulary. Only some of them are special tokens.
    added_tokens = {
        token_id: token
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token_id < vocab_size
    }
    special_ids = [token_id for token_id, token in added_tokens.items() if token.special]
    # The decoder also converts added tokens. Example: Gemma's vocabulary has the added token "▁▁",
    # which means two spaces.
    tokens = _token_bytes(backend, tokenizer.get_vocab(), vocab_size)

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return Vocabulary(
        tokens=tuple(tokens),
        special_ids=frozenset(special_ids),
        marker_ids=frozenset(added_tokens),
        encode=encode,
    )


def _backend_of(tokenizer: Any) -> Any:  # noqa: ANN401 - the libraries have no types
    """Return the object `tokenizers.Tokenizer` that a tokenizer of transformers uses.

    The decoder of this object defines the bytes of each token.

    Raises:
        RequestError: if the tokenizer is not built on the library tokenizers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            "grammar: grammars and thinking budgets cannot be used with this checkpoint, because "
            f"its tokenizer ({type(tokenizer).__name__}) does not define the bytes of its tokens. "
            "Add a tokenizer.json in the format of the tokenizers library to the checkpoint."
        )
    return backend


def _token_bytes(
    backend: Any,  # noqa: ANN401 - the tokenizers library has no types
    ids: Mapping[str, int],
    vocab_size: int,
) -> list[bytes]:
    """Return the bytes of each token, in the order of the ids.

    The bytes of an id without a token are b"". Example: the entry "Ġhi" of a byte-level vocabulary
    has the bytes b" hi".

    Args:
        backend: a `Tokenizer` of the library tokenizers.
        ids: maps the text of each token to its id.
        vocab_size: the number of the model's logits, which is the length of the result. The model
            cannot generate tokens with larger ids, so these tokens are ignored.
    """
    # `backend.to_str()` returns the content of tokenizer.json. The field "decoder" shows how
    # vocabulary entries represent bytes.
    to_bytes = _bytes_function(json.loads(backend.to_str()).get("decoder"), ids)
    tokens = [b""] * vocab_size
    for text, token_id in ids.items():
        if token_id < vocab_size:
            tokens[token_id] = to_bytes(text)
    return tokens


def _bytes_function(decoder: object, ids: Mapping[str, int]) -> Callable[[str], bytes]:
    """Return the function that converts the entries of a vocabulary into bytes.

    A vocabulary represents bytes in one of three ways:

    - byte-level BPE: one character for each byte. The token " a" has the entry "Ġa".
    - SentencePiece: text. The token " a" has the entry "▁a".
    - byte fallback: SentencePiece, with one more entry for each byte, such as "<0x80>".

    Args:
        decoder: the value of "decoder" in tokenizer.json.
        ids: maps the text of each token to its id.

    Raises:
        RequestError: if the text of a token depends on the token before it.
    """
    types = set(_decoder_types(decoder))  # such as {"Sequence", "ByteFallback"}
    unusable = sorted(types & _DECODERS_WITH_SPACES)
    if unusable:
        raise RequestError(
            "grammar: grammars and thinking budgets cannot be used with this checkpoint, because "
            f"the decoder {unusable[0]} of its tokenizer adds spaces between the tokens."
        )
    if "ByteLevel" in types:
        return byte_level
    if "ByteFallback" in types or _has_byte_tokens(ids):
        return byte_fallback
    has_decoder = bool(types)
    if not has_decoder and "Ġ" in ids:  # "Ġ" is a space in a byte-level vocabulary
        return byte_level
    return sentence_piece


def _has_byte_tokens(ids: Mapping[str, int]) -> bool:
    """Return whether a vocabulary has the tokens "<0x80>" to "<0xFF>".

    For a byte below 128, a vocabulary often contains only the ASCII character, such as `A` instead
    of "<0x41>".
    """
    return all(f"<0x{byte:02X}>" in ids for byte in range(128, 256))


def _decoder_types(decoder: object) -> Iterator[str]:
    """Yield the type of a decoder, such as "ByteLevel", and the types of all nested decoders."""
    if isinstance(decoder, Mapping):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _decoder_types(part)


def _decoded(data: bytes) -> str:
    """Decode UTF-8 bytes as text. Stop before the first byte that cannot be decoded."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
