# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, a few at a time, in time linear in the output and never half a character."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]

_REPLACEMENT = "�"
# A character has at most 4 bytes, hence at most 4 byte tokens; more undecodable tokens than that in
# a row are wrong bytes, and waiting longer will not mend them.
_MAX_HELD_TOKENS = 8


def decoder(tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool) -> Decode:
    """The quickest exact way to decode ids with this tokenizer.

    A fast tokenizer whose class adds nothing to decoding is asked directly, which saves most of a
    call's cost; any other goes through transformers.
    """
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    untouched = all(
        getattr(kind, name) is getattr(TokenizersBackend, name, None)
        for name in ("decode", "_decode", "convert_tokens_to_string")
    )
    if isinstance(tokenizer, TokenizersBackend) and untouched:
        backend = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(
        tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


class Detokenizer:
    """Incremental detokeniser of one answer.

    Text is found as the difference of two decodings: of the tokens that were last given out, and of
    those with the new ones behind. What a tokenizer does at the very start of a text (dropping the
    first space, say) is in both, and so falls away. Text that ends in the middle of a character is
    held until the rest of it is there.

    Args:
        decode: ids to text.
        seed_token_ids: tokens before the first (the prompt's last ones); their text is not given.
    """

    def __init__(self, decode: Decode, seed_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        # Given out last, and where the new ones begin behind them.
        self._window = list(seed_token_ids)
        self._start = len(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        before = self._decode(self._window[: self._start]) if self._start else ""
        text = self._decode(self._window)
        may_hold = len(self._window) - self._start <= _MAX_HELD_TOKENS
        if may_hold and len(text) == len(before):
            # Tokens without text (special ones) would be poor context for what follows them.
            return ""
        if text.endswith(_REPLACEMENT):
            return "" if may_hold else self._give_all_but_the_end(before)
        self._advance(len(self._window))
        return text[len(before) :]

    def finish(self) -> str:
        """What is still held; an incomplete character comes as U+FFFD."""
        if self._start == len(self._window):
            return ""
        before = self._decode(self._window[: self._start]) if self._start else ""
        text = self._decode(self._window)[len(before) :]
        self._advance(len(self._window))
        return text

    def _give_all_but_the_end(self, before: str) -> str:
        """Text up to the last of the held tokens that ends a character.

        Where none does, all but the last few: wrong bytes come as U+FFFD.
        """
        newest = len(self._window)
        for end in range(newest - 1, max(newest - 4, self._start), -1):
            text = self._decode(self._window[:end])
            if not text.endswith(_REPLACEMENT):
                self._advance(end)
                return text[len(before) :]
        end = newest - 4
        text = self._decode(self._window[:end])
        self._advance(end)
        return text[len(before) :]

    def _advance(self, end: int) -> None:
        """Tokens before `end` are given out now; those of this turn stay as context."""
        self._window = self._window[self._start :] if self._start < end else self._window
        self._start = end - self._start
