# SPDX-License-Identifier: Apache-2.0
"""The state of one sequence under its grammar and its thinking budget.

An answer passes through up to four phases:

    GATED     the model reasons; nothing is limited, except that the answer may not end yet
    BLANKS    the text of GrammarSpec.after has come; blanks behind it belong to nothing
    GRAMMAR   the grammar decides; once its sentence is complete, stop tokens may end the answer
    ENDED     a stop token came; only such may follow (a request that ignores them goes on)

A sequence that has a thinking budget but no grammar has no phase and is limited only where the
budget forces the end marker.
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
_MAX_BLANKS = 4  # bytes behind a marker; without a bound, sampling might never go on
_NUM_RECENT = 4  # tokens before a forced text that its tokenisation may depend on


class Phase(Enum):
    """See the module."""

    GATED = auto()
    BLANKS = auto()
    GRAMMAR = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Rules:
    """What does not change while sequences of a request are generated.

    Attributes:
        stop_ids: tokens that end the answer.
        stop_row: their bits.
        free_row: bits of every token but those.
        grammar_row: bits of the tokens that the grammar may choose from: no stop token, and markup
            only where the grammar itself names it.
        grammar_bits: the same as bytes, which are the quickest to look one token up in.
        blank_row: bits of the tokens that are blanks.
        marker: text behind which the grammar begins, without blanks around it; b"" is at once.
        spanning: tokens that end the marker and say more, by how much of it stands before them;
            with what they say.
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
    """The rules of a request whose grammar names these special tokens and begins behind `after`."""
    size = vocabulary.size
    stop_row = row_of(stop_ids, size)
    every = row_of(range(size), size)
    special = vocabulary.special_ids - frozenset(allowed_special_ids)
    barred = row_of(special | vocabulary.unusable_ids, size)
    grammar_row = every & ~stop_row & ~barred
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
    table: dict[int, list[tuple[int, bytes]]] = {}
    for known in range(1, len(marker)):
        ending = marker[known:]
        for data, number in vocabulary.starting_with(ending):
            rest = data[len(ending) :].lstrip(_BLANKS)
            if rest:
                table.setdefault(known, []).append((number, rest))
    for data, number in vocabulary.sorted_tokens if marker else ():
        if marker in data:
            rest = data.partition(marker)[2].lstrip(_BLANKS)
            if rest:
                table.setdefault(0, []).append((number, rest))
    return table


class TokenGuide:
    """See core.guide.Guide."""

    def __init__(
        self, rules: Rules, matcher: Matcher | None, thinking: Thinking | None = None
    ) -> None:
        self._rules = rules
        self._matcher = matcher
        self._thinking = thinking
        self._phase = Phase.GATED if rules.marker else Phase.GRAMMAR
        self._tail = b""  # of the text while GATED: what may be the marker's beginning
        self._num_blanks = 0
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    # ---- tokens that came ------------------------------------------------------------------------

    def accept(self, token_ids: list[int]) -> None:
        """Take in tokens of the answer, in order.

        Raises:
            EngineError: one of them is not allowed here; those before it are taken in.
        """
        rules, matcher = self._rules, self._matcher
        for token_id in token_ids:
            # Nearly always: a token in the middle of what the grammar says.
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
        rules = self._rules
        if not 0 <= token_id < rules.vocabulary.size:
            raise EngineError(f"token {token_id} is outside of the {rules.vocabulary.size} logits")
        data = rules.vocabulary.tokens[token_id]
        if self._matcher is not None:
            self._check(token_id, self._take(self._matcher, token_id, data))
        if self._thinking is not None and token_id not in rules.stop_ids:
            self._thinking.feed(token_id, data)
        self._recent.append(token_id)

    def _check(self, token_id: int, is_taken: bool) -> None:
        if not is_taken:
            text = self._rules.vocabulary.tokens[token_id]
            raise EngineError(f"token {token_id} ({text!r}) is not allowed by the grammar here")

    def _take(self, matcher: Matcher, token_id: int, data: bytes) -> bool:
        """Whether the grammar's side takes the token."""
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
        marker = self._rules.marker
        text = self._tail + data
        _, found, rest = text.partition(marker)
        if not found:
            self._tail = text[-len(marker) + 1 :] if len(marker) > 1 else b""
            return True
        self._phase, self._tail = Phase.BLANKS, b""
        said = rest.lstrip(_BLANKS)
        self._num_blanks = len(rest) - len(said)
        if not said:
            return True
        self._phase = Phase.GRAMMAR
        return matcher.accept_bytes(said)

    # ---- tokens that may come --------------------------------------------------------------------

    def fill(self, row: Row) -> bool:
        """Set the bits of the tokens that may come next and clear the others.

        Shapes: row [ceil(vocab_size / 32)] int32, contiguous.
        Mutates: row; not where nothing is limited, and then the answer is False.
        """
        return self.fill_all([self], row[None], [0])[0]

    @staticmethod
    def fill_all(guides: Sequence["TokenGuide"], rows: Rows, places: Sequence[int]) -> list[bool]:
        """What fill does, for some guides and the rows at as many places.

        Shapes: rows [n, ceil(vocab_size / 32)] int32, contiguous.
        Mutates: rows.
        """
        is_limited = []
        of_class: dict[type[Matcher], list[tuple[TokenGuide, Matcher, int]]] = {}
        for guide, place in zip(guides, places, strict=True):
            matcher = guide._deciding_matcher()
            if matcher is None:
                is_limited.append(guide._fill_otherwise(rows[place]))
            else:
                is_limited.append(True)
                of_class.setdefault(type(matcher), []).append((guide, matcher, place))
        for kind, entries in of_class.items():
            kind.fill_all([one[1] for one in entries], rows, [one[2] for one in entries])
            for guide, matcher, place in entries:
                guide._finish_row(matcher, rows[place])
        return is_limited

    def _deciding_matcher(self) -> Matcher | None:
        """The matcher if the grammar alone says what may come next."""
        is_forced = self._thinking is not None and self._thinking.forced
        decides = self._phase is Phase.GRAMMAR or self._phase is Phase.BLANKS
        return self._matcher if decides and not is_forced else None

    def _fill_otherwise(self, row: Row) -> bool:
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
        """Everything but the answer's end, and but tokens that end the marker with wrong text."""
        rules = self._rules
        row[:] = rules.free_row
        for known, tokens in rules.spanning.items():
            if known and not self._tail.endswith(rules.marker[:known]):
                continue
            for token_id, rest in tokens:
                if not matcher.fork().accept_bytes(rest):
                    row[token_id >> 5] &= ~_bit(token_id)

    def _finish_row(self, matcher: Matcher, row: Row) -> None:
        """Add what the grammar's library does not know to what it filled in."""
        rules = self._rules
        np.bitwise_and(row, rules.grammar_row, out=row)
        if matcher.is_complete():
            row |= rules.stop_row
        elif not np.count_nonzero(row):
            # Nothing may follow and nothing is complete: the library gave up (its limits), or the
            # vocabulary lacks what the grammar needs. The answer ends; who checks it will tell.
            log.error("a grammar leaves no token to choose from; the answer ends unfinished")
            row |= rules.stop_row
        if self._phase is Phase.BLANKS and self._num_blanks < _MAX_BLANKS:
            row |= rules.blank_row

    def _is_stuck(self, matcher: Matcher) -> bool:
        row = self._rules.stop_row.copy()
        matcher.fill(row)
        row &= self._rules.grammar_row
        return not row.any()

    def forced(self) -> list[int]:
        """Tokens that are the only way on, tokenised as the tokenizer would; often none."""
        if self._thinking is not None and self._thinking.is_open:
            return list(self._thinking.forced)
        if self._matcher is None or self._phase is not Phase.GRAMMAR:
            return []
        data = self._matcher.forced()
        tokens = tokens_of(self._rules.vocabulary, [*self._recent], data) if len(data) > 1 else []
        usable = self._rules.grammar_bits
        return tokens if all(_has(usable, token_id) for token_id in tokens) else []

    def fork(self) -> "TokenGuide":
        """A guide for another sequence that starts where this one stands."""
        matcher = self._matcher.fork() if self._matcher is not None else None
        thinking = self._thinking.fork() if self._thinking is not None else None
        twin = TokenGuide(self._rules, matcher, thinking)
        twin._phase, twin._tail = self._phase, self._tail
        twin._num_blanks, twin._recent = self._num_blanks, self._recent.copy()
        return twin


def tokens_of(vocabulary: Vocabulary, recent: list[int], data: bytes) -> list[int]:
    """The tokens as which the tokenizer would write these bytes behind the recent tokens.

    The last one is left out, for its end may move with what follows it, unless it is a marker of
    its own. Where the bytes would merge with what came before, there are none.
    """
    text = _decoded(data)
    before = _decoded(b"".join(vocabulary.tokens[one] for one in recent))
    if not text or (recent and not before):
        return []
    tokens = vocabulary.encode(before + text)
    if tokens[: len(recent)] != recent:
        return []
    tokens = tokens[len(recent) :]
    if tokens and tokens[-1] not in vocabulary.marker_ids:
        tokens.pop()
    spelled = b"".join(vocabulary.tokens[one] for one in tokens)
    return tokens if data.startswith(spelled) else []


def _decoded(data: bytes) -> str:
    """The text up to the first byte that is none yet."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _has(bits: bytes, token_id: int) -> bool:
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def _bit(token_id: int) -> int:
    """The token's bit in its word, as int32 has it."""
    bit = 1 << (token_id & 31)
    return bit - (1 << 32) if bit >> 31 else bit
