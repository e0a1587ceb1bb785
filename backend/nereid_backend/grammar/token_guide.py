# SPDX-License-Identifier: Apache-2.0
r"""The state of one sequence under its grammar and its thinking budget.

An answer with a grammar passes through up to four phases. Example: GrammarSpec.after is "</think>",
the grammar is a JSON schema, and the answer is `I see.</think>\n\n{"a": 1}<|im_end|>`.

    GATED     `I see.</think>`: all tokens are allowed, except those that end the answer
    BLANKS    `\n\n`: white space after the text of GrammarSpec.after; the grammar ignores it
    GRAMMAR   `{"a": 1}`: the grammar decides; if its text is complete, the answer may end
    ENDED     `<|im_end|>`: a stop token. If the request ignores it, only stop tokens may follow

A sequence with a thinking budget and no grammar has no phases. Its tokens are limited only while
the budget forces the end marker of the reasoning.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from nereid_backend.errors import EngineError
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.thinking_budget import Thinking
from nereid_backend.grammar.vocabulary import Row, Rows, Vocabulary, row_of

log = logging.getLogger(__name__)

_BLANKS = b" \t\r\n"
# The largest number of bytes of white space after a marker. Without a limit, a model might generate
# only white space until max_tokens.
_MAX_BLANKS = 4
# The number of tokens before a forced text that may influence how the text is split into tokens.
_NUM_RECENT = 4


class Phase(Enum):
    """The phases of an answer, as described at the top of this module."""

    GATED = auto()
    BLANKS = auto()
    GRAMMAR = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Rules:
    """The parts of a guide that do not change while answers are generated. Requests share them.

    Attributes:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        stop_row: the mask of the stop tokens.
        free_row: the mask of all tokens except the stop tokens.
        grammar_row: the mask of the tokens that a grammar may allow: no stop tokens, and only those
            special tokens that the grammar contains.
        grammar_bits: `grammar_row` as bytes, in which looking up one token is fastest.
        blank_row: the mask of the tokens that are white space.
        marker: the bytes after which the grammar applies, without white space around them. b"" if
            the grammar applies from the first token on.
        spanning: the tokens that contain the end of the marker and text after it. The key is the
            number of the marker's bytes that must come before the token. Each value lists the token
            and its text after the marker. Example: for the marker "</think>", the token `>{` is
            listed under the key 7 with the text `{`.
    """

    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    stop_row: Row
    free_row: Row
    grammar_row: Row
    grammar_bits: bytes
    blank_row: Row
    marker: bytes
    spanning: Mapping[int, list[tuple[int, bytes]]]


def rules_for(
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    allowed_special_ids: Iterable[int],
    after: str,
) -> Rules:
    """Return the rules of a request.

    Args:
        vocabulary: the tokens of the model.
        stop_ids: the tokens that end the answer.
        allowed_special_ids: the special tokens that the grammar contains.
        after: the text after which the grammar applies; see GrammarSpec.
    """
    size = vocabulary.size
    stop_row = row_of(stop_ids, size)
    every = row_of(range(size), size)
    special = vocabulary.special_ids - frozenset(allowed_special_ids)
    excluded = row_of(special | vocabulary.unusable_ids, size)
    grammar_row = every & ~stop_row & ~excluded
    marker = after.strip().encode()
    return Rules(
        vocabulary=vocabulary,
        stop_ids=stop_ids,
        stop_row=stop_row,
        free_row=every & ~stop_row,
        grammar_row=grammar_row,
        grammar_bits=grammar_row.tobytes(),
        blank_row=row_of(vocabulary.blank_ids - stop_ids, size),
        marker=marker,
        spanning=_spanning(vocabulary, marker),
    )


def _spanning(vocabulary: Vocabulary, marker: bytes) -> dict[int, list[tuple[int, bytes]]]:
    """Return the tokens that contain the marker's end and text after it; see Rules.spanning."""
    table: dict[int, list[tuple[int, bytes]]] = {}
    for num_before in range(1, len(marker)):
        ending = marker[num_before:]
        for data, number in vocabulary.starting_with(ending):
            rest = data[len(ending) :].lstrip(_BLANKS)
            if rest:
                table.setdefault(num_before, []).append((number, rest))
    for data, number in vocabulary.sorted_tokens if marker else ():
        if marker in data:
            rest = data.partition(marker)[2].lstrip(_BLANKS)
            if rest:
                table.setdefault(0, []).append((number, rest))
    return table


class TokenGuide:
    """The guide of one sequence; implements core.grammar.Guide."""

    def __init__(
        self, rules: Rules, matcher: Matcher | None, thinking: Thinking | None = None
    ) -> None:
        """Start before the first token of an answer.

        Args:
            rules: the rules of the request.
            matcher: the matcher of the grammar at its start; None if the request has no grammar.
            thinking: finds the reasoning; None if the request has no thinking budget.
        """
        self._rules = rules
        self._matcher = matcher
        self._thinking = thinking
        self._phase = Phase.GATED if rules.marker else Phase.GRAMMAR
        # The last bytes of the text in the phase GATED, which may be the beginning of the marker.
        self._tail = b""
        self._num_blanks = 0
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    # ---- tokens of the answer --------------------------------------------------------------------

    def accept(self, token_ids: list[int]) -> None:
        """Advance the state by tokens of the answer, in order.

        Raises:
            EngineError: if a token is not allowed. The guide has then advanced by the tokens before
                it.
        """
        rules = self._rules
        matcher = self._matcher
        for token_id in token_ids:
            # This fast path handles nearly all tokens: only the grammar limits the answer.
            if (
                self._phase is Phase.GRAMMAR
                and matcher is not None
                and self._thinking is None
                and 0 <= token_id < rules.vocabulary.size
                and _has(rules.grammar_bits, token_id)
            ):
                self._check(token_id, matcher.accept(token_id))
                self._recent.append(token_id)
            else:
                self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        """Advance by one token."""
        rules = self._rules
        if not 0 <= token_id < rules.vocabulary.size:
            raise EngineError(
                f"Token {token_id} is not in the vocabulary of {rules.vocabulary.size} tokens."
            )
        data = rules.vocabulary.tokens[token_id]
        if self._matcher is not None:
            self._check(token_id, self._take(self._matcher, token_id, data))
        if self._thinking is not None and token_id not in rules.stop_ids:
            self._thinking.feed(token_id, data)
        self._recent.append(token_id)

    def _check(self, token_id: int, is_taken: bool) -> None:
        """Raise EngineError if the grammar did not allow a token."""
        if not is_taken:
            text = self._rules.vocabulary.tokens[token_id]
            raise EngineError(
                f"Token {token_id} ({text!r}) is not allowed by the request's grammar at this "
                "position."
            )

    def _take(self, matcher: Matcher, token_id: int, data: bytes) -> bool:
        """Advance the phase and the grammar by one token. Return whether they allow the token."""
        if token_id in self._rules.stop_ids:
            may_end = self._phase is Phase.ENDED or (
                self._phase in (Phase.BLANKS, Phase.GRAMMAR)
                and (matcher.is_complete() or self._is_stuck(matcher))
            )
            self._phase = Phase.ENDED if may_end else self._phase
            return may_end
        if self._phase is Phase.GATED:
            return self._take_gated(matcher, data)
        if self._phase is Phase.BLANKS:
            if self._num_blanks < _MAX_BLANKS and data and not data.strip(_BLANKS):
                self._num_blanks += len(data)
                return True
            self._phase = Phase.GRAMMAR
        if self._phase is Phase.ENDED or not _has(self._rules.grammar_bits, token_id):
            return False
        return matcher.accept(token_id)

    def _take_gated(self, matcher: Matcher, data: bytes) -> bool:
        """Look for the marker in the text so far, and return whether the grammar allows the token.

        A token that contains text after the marker must match the start of the grammar.
        """
        marker = self._rules.marker
        text = self._tail + data
        _, match, rest = text.partition(marker)
        if not match:
            self._tail = text[-len(marker) + 1 :] if len(marker) > 1 else b""
            return True
        self._phase = Phase.BLANKS
        self._tail = b""
        after = rest.lstrip(_BLANKS)
        self._num_blanks = len(rest) - len(after)
        if not after:
            return True
        self._phase = Phase.GRAMMAR
        return matcher.accept_bytes(after)

    # ---- tokens that may follow ------------------------------------------------------------------

    def fill(self, row: Row) -> bool:
        """Set the bits of the tokens that may come next, and clear all other bits.

        Args:
            row: the mask, [ceil(vocab_size / 32)] int32, contiguous.

        Returns:
            Whether any token is forbidden. If not, the row is unchanged.

        Mutates: row.
        """
        return self.fill_all([self], row[None], [0])[0]

    @staticmethod
    def fill_all(guides: Sequence["TokenGuide"], rows: Rows, places: Sequence[int]) -> list[bool]:
        """Call fill for several guides.

        Args:
            guides: the guides.
            rows: the masks of the batch, [n, ceil(vocab_size / 32)] int32, contiguous.
            places: the index of each guide's row in `rows`.

        Returns:
            For each guide, whether any token is forbidden. If not, its row is unchanged.

        Mutates: rows.
        """
        is_limited = []
        by_class: dict[type[Matcher], list[tuple[TokenGuide, Matcher, int]]] = {}
        for guide, place in zip(guides, places, strict=True):
            matcher = guide._deciding_matcher()
            if matcher is None:
                is_limited.append(guide._fill_otherwise(rows[place]))
            else:
                is_limited.append(True)
                by_class.setdefault(type(matcher), []).append((guide, matcher, place))
        for matcher_class, entries in by_class.items():
            matchers = [matcher for _, matcher, _ in entries]
            matcher_class.fill_all(matchers, rows, [place for _, _, place in entries])
            for guide, matcher, place in entries:
                guide._finish_row(matcher, rows[place])
        return is_limited

    def _deciding_matcher(self) -> Matcher | None:
        """Return the matcher if the grammar alone decides which tokens may come next, or None."""
        is_forced = self._thinking is not None and self._thinking.forced
        decides = self._phase is Phase.GRAMMAR or self._phase is Phase.BLANKS
        return self._matcher if decides and not is_forced else None

    def _fill_otherwise(self, row: Row) -> bool:
        """Fill a row while the grammar does not decide. Return whether any token is forbidden."""
        if self._thinking is not None and self._thinking.forced:
            row[:] = row_of(self._thinking.forced[:1], self._rules.vocabulary.size)
            return True
        if self._matcher is None:
            return False
        if self._phase is Phase.ENDED:
            row[:] = self._rules.stop_row
        else:
            self._fill_gated(self._matcher, row)
        return True

    def _fill_gated(self, matcher: Matcher, row: Row) -> None:
        """Allow all tokens that do not end the answer.

        Tokens that contain text after the marker are allowed only if the grammar allows that text.
        """
        rules = self._rules
        row[:] = rules.free_row
        for num_before, tokens in rules.spanning.items():
            if num_before and not self._tail.endswith(rules.marker[:num_before]):
                continue
            for token_id, rest in tokens:
                if not matcher.fork().accept_bytes(rest):
                    row[token_id >> 5] &= ~_bit(token_id)

    def _finish_row(self, matcher: Matcher, row: Row) -> None:
        """Add stop tokens and white space to a row that the grammar library has filled."""
        rules = self._rules
        np.bitwise_and(row, rules.grammar_row, out=row)
        if matcher.is_complete():
            row |= rules.stop_row
        elif not np.count_nonzero(row):
            # The library has reached one of its limits, or the vocabulary has no token that the
            # grammar needs. The answer ends here. If it must match a strict schema, the
            # postprocessor reports an error.
            log.error(
                "A grammar allows no token although the answer is not complete. The answer ends "
                "here."
            )
            row |= rules.stop_row
        if self._phase is Phase.BLANKS and self._num_blanks < _MAX_BLANKS:
            row |= rules.blank_row

    def _is_stuck(self, matcher: Matcher) -> bool:
        """Return whether the grammar allows no token."""
        row = self._rules.stop_row.copy()
        matcher.fill(row)
        row &= self._rules.grammar_row
        return not row.any()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, or an empty list.

        The tokens are those that the tokenizer would choose for the forced text. The engine appends
        them without sampling.
        """
        if self._thinking is not None and self._thinking.is_open:
            return list(self._thinking.forced)
        if self._matcher is None or self._phase is not Phase.GRAMMAR:
            return []
        data = self._matcher.forced()
        tokens = tokens_of(self._rules.vocabulary, [*self._recent], data) if len(data) > 1 else []
        usable = self._rules.grammar_bits
        return tokens if all(_has(usable, token_id) for token_id in tokens) else []

    def fork(self) -> "TokenGuide":
        """Return an independent copy for another sequence."""
        matcher = self._matcher.fork() if self._matcher is not None else None
        thinking = self._thinking.fork() if self._thinking is not None else None
        copy = TokenGuide(self._rules, matcher, thinking)
        copy._phase = self._phase
        copy._tail = self._tail
        copy._num_blanks = self._num_blanks
        copy._recent = self._recent.copy()
        return copy


def tokens_of(vocabulary: Vocabulary, recent: list[int], data: bytes) -> list[int]:
    """Return the tokens that the tokenizer would choose for forced bytes after some recent tokens.

    The last token is left out, unless it is a marker, because text that follows may merge with it.
    Return no tokens if the bytes would merge with the recent tokens.

    Example: the recent tokens spell `{` and the forced bytes are `"name": `. If the tokenizer
    splits `{"name": ` into `{`, `"`, `name`, `":` and ` `, the result is the tokens `"`, `name` and
    `":`.

    Args:
        vocabulary: the tokens of the model.
        recent: the last tokens of the answer.
        data: the bytes that must follow.
    """
    text = _decoded(data)
    before = _decoded(b"".join(vocabulary.tokens[token_id] for token_id in recent))
    if not text or (recent and not before):
        return []
    tokens = vocabulary.encode(before + text)
    if tokens[: len(recent)] != recent:
        return []
    tokens = tokens[len(recent) :]
    if tokens and tokens[-1] not in vocabulary.marker_ids:
        tokens.pop()
    spelled = b"".join(vocabulary.tokens[token_id] for token_id in tokens)
    return tokens if data.startswith(spelled) else []


def _decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes up to the first byte that cannot be decoded."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _has(bits: bytes, token_id: int) -> bool:
    """Return whether the bit of a token is set in a mask."""
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def _bit(token_id: int) -> int:
    """Return the bit of a token in its word of a mask, as a signed 32-bit integer."""
    bit = 1 << (token_id & 31)
    return bit - (1 << 32) if bit >> 31 else bit
