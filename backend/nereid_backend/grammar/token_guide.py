# SPDX-License-Identifier: Apache-2.0
r"""Determines which tokens a grammar and a thinking budget allow next in one sequence.

An answer with a grammar passes through up to four phases. Example: the marker (GrammarSpec.after)
is "</think>", the grammar is a JSON schema, and the answer is
`I see.</think>\n\n{"a": 1}<|im_end|>`.

    BEFORE_MARKER   `I see.</think>`: all tokens are allowed, except those that end the answer
    WHITE_SPACE     `\n\n`: white space after the marker
    GRAMMAR         `{"a": 1}`: the text must match the grammar. When the text is complete, the
                    answer may end
    ENDED           `<|im_end|>`: a stop token. If the request ignores stop tokens, only further
                    stop tokens may follow

A sequence with a thinking budget and no grammar has no phases. Its tokens are limited only while
the budget forces the end marker of the reasoning.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from nereid_backend.errors import EngineError, RequestError
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.guide_rules import WHITE_SPACE, GuideRules
from nereid_backend.grammar.thinking_budget import Thinking, last_bytes
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks, mask_of

log = logging.getLogger(__name__)

# If at least `_MAX_WHITE_SPACE` bytes of white space have followed a marker, no more white space is
# allowed. Without this limit, a model might generate only white space until max_tokens.
_MAX_WHITE_SPACE = 4
# If the grammar allows only one text next, this text is tokenised together with the `_NUM_RECENT`
# tokens before it. The reason is that the tokens of a text depend on the preceding text.
_NUM_RECENT = 4
# If the grammar allows only one text next, all tokens of this text except the last are added
# without sampling. A text of one byte has only one token, so no token would be added. Therefore,
# the text must have at least `_MIN_FORCED_BYTES` bytes.
_MIN_FORCED_BYTES = 2
# If a grammar has ambiguous rules, the check of one token can take longer with each token of the
# answer. A trial of the grammar tests only the first tokens, so it does not always find such a
# grammar. Therefore, all checks of an answer that take longer than `_SLOW_TOKEN_S` may take at most
# `_MAX_SLOW_S` together. Otherwise, the answer would delay the steps of all other requests. With
# usual grammars, a check takes less than a millisecond.
_SLOW_TOKEN_S = 0.02
_MAX_SLOW_S = 2.0


class Phase(Enum):
    """The phases of an answer with a grammar, as described in the module's docstring."""

    BEFORE_MARKER = auto()
    WHITE_SPACE = auto()
    GRAMMAR = auto()
    ENDED = auto()


class TokenGuide:
    """Determines the allowed next tokens of one sequence from a grammar and a thinking budget."""

    def __init__(
        self, rules: GuideRules, matcher: Matcher | None, thinking: Thinking | None = None
    ) -> None:
        """Create an object that restricts the next tokens of an answer. The answer is still empty.

        Args:
            rules: the token masks and other constant data of the request.
            matcher: tracks the position of the answer in the grammar, and is at its start; None if
                the request has no grammar.
            thinking: counts the tokens of the reasoning; None if the request has no thinking
                budget.
        """
        self._rules = rules
        self._matcher = matcher
        self._thinking = thinking
        # The phase is used only if the request has a grammar.
        self._phase = Phase.BEFORE_MARKER if rules.marker else Phase.GRAMMAR
        # The last bytes of the answer in the phase BEFORE_MARKER. They may be the beginning of the
        # marker, after which the grammar applies.
        self._tail = b""
        # The number of bytes of white space that follow the marker; used in the phase WHITE_SPACE.
        # Without a limit on this number, the model could generate white space forever.
        self._num_white_space_after_marker = 0
        # The last tokens of the answer. `forced` needs these tokens to tokenise the text that must
        # follow, because the tokens of a text depend on the preceding text.
        self._recent_ids: deque[int] = deque(maxlen=_NUM_RECENT)
        # The total CPU time of the slow checks in seconds. A check is slow if it takes more than
        # `_SLOW_TOKEN_S` for each token.
        self._slow_s = 0.0

    # ---- tokens of the answer --------------------------------------------------------------------

    def accept(self, token_ids: list[int]) -> None:
        """Update the states of the grammar and the thinking budget with the answer's next tokens.

        Raises:
            EngineError: if a token is not allowed. The guide has then advanced by all tokens before
                this token.
            RequestError: if the slow checks of the answer's tokens took too much time.
        """
        started = time.thread_time()
        self._accept_all(token_ids)
        self._check_time(time.thread_time() - started, len(token_ids))

    def _check_time(self, seconds: float, num_tokens: int) -> None:
        """Raise a RequestError if the slow checks of the answer's tokens took too much time.

        The tokens of a step are checked together. This check is slow if its tokens take more than
        `_SLOW_TOKEN_S` on average. `seconds` is the CPU time of the last check, and `num_tokens` is
        the number of its tokens.
        """
        is_slow = seconds > _SLOW_TOKEN_S * num_tokens
        if not is_slow:
            return
        self._slow_s += seconds
        if self._slow_s > _MAX_SLOW_S:
            raise RequestError(
                "grammar: checking the tokens of the answer takes too long: the tokens that took "
                f"more than {_SLOW_TOKEN_S:g} s each took {self._slow_s:.1f} s together, but the "
                f"limit is {_MAX_SLOW_S:g} s. Use a grammar without ambiguous rules, such as "
                "`a ::= a a`."
            )

    def _accept_all(self, token_ids: list[int]) -> None:
        """Update the states with the answer's next tokens.

        If a token is not allowed, raise an EngineError, as documented for `accept`.
        """
        matcher = self._matcher
        if matcher is None or self._thinking is not None:
            for token_id in token_ids:
                self._accept_token(token_id)
            return
        # The tokens that a grammar may allow. They include no stop tokens, so none of them begins
        # the phase ENDED.
        grammar_bits = self._rules.grammar_bits
        for token_id in token_ids:
            if self._phase is Phase.GRAMMAR and _has_bit(grammar_bits, token_id):
                # This is the usual case. `_accept_token` would only do what the next two lines do,
                # but would take twice the time.
                self._raise_if_forbidden(token_id, matcher.accept(token_id))
                self._recent_ids.append(token_id)
            else:
                self._accept_token(token_id)

    def _accept_token(self, token_id: int) -> None:
        """Accept one token: update the matcher, the thinking budget and the recent tokens.

        Raises:
            EngineError: if the token is not in the vocabulary, or the grammar does not allow it.
        """
        rules = self._rules
        if not 0 <= token_id < rules.vocabulary.size:
            raise EngineError(
                f"Token {token_id} is not in the vocabulary of {rules.vocabulary.size} tokens."
            )
        data = rules.vocabulary.tokens[token_id]
        if self._matcher is not None:
            is_allowed = self._advance(self._matcher, token_id, data)
            self._raise_if_forbidden(token_id, is_allowed)
        # Stop tokens are not part of the text in which the thinking budget looks for markers.
        if self._thinking is not None and token_id not in rules.stop_ids:
            self._thinking.feed(token_id, data)
        self._recent_ids.append(token_id)

    def _raise_if_forbidden(self, token_id: int, is_allowed: bool) -> None:
        """Raise an EngineError if the grammar does not allow a token (`is_allowed` is False)."""
        if not is_allowed:
            text = self._rules.vocabulary.tokens[token_id]
            raise EngineError(
                f"Token {token_id} ({text!r}) is not allowed by the request's grammar at this "
                "position."
            )

    def _advance(self, matcher: Matcher, token_id: int, data: bytes) -> bool:
        """Advance the phase and the matcher by one token. Return whether the token is allowed.

        An answer passes through the phases BEFORE_MARKER (until a marker such as "</think>"),
        WHITE_SPACE (directly after the marker), GRAMMAR and ENDED (after a stop token). Example: in
        the phase WHITE_SPACE, a newline token does not change the phase, and the token `{` begins
        the phase GRAMMAR.

        Args:
            matcher: tracks the position of the answer in the grammar.
            token_id: the token.
            data: the bytes of the token.
        """
        if token_id in self._rules.stop_ids:
            return self._end_answer(matcher)  # allowed only if the grammar may end here
        match self._phase:
            case Phase.BEFORE_MARKER:
                return self._advance_before_marker(matcher, data)
            case Phase.WHITE_SPACE:
                return self._advance_after_marker(matcher, token_id, data)
            case Phase.GRAMMAR:
                if not _has_bit(self._rules.grammar_bits, token_id):
                    return False
                return matcher.accept(token_id)
            case Phase.ENDED:
                return False

    def _advance_after_marker(self, matcher: Matcher, token_id: int, data: bytes) -> bool:
        """Process a token in the phase WHITE_SPACE, and return whether the token is allowed.

        A token of white space may follow the marker. Any other token begins the phase GRAMMAR.
        """
        is_white_space = bool(data) and not data.strip(WHITE_SPACE)
        if is_white_space and self._allows_white_space_after_marker():
            self._num_white_space_after_marker += len(data)
            return True
        self._phase = Phase.GRAMMAR
        return self._advance(matcher, token_id, data)

    def _end_answer(self, matcher: Matcher) -> bool:
        """Begin the phase ENDED if the answer may end here. Return whether the answer may end."""
        if not self._may_end(matcher):
            return False
        self._phase = Phase.ENDED
        return True

    def _allows_white_space_after_marker(self) -> bool:
        """Return whether another token of white space may follow the marker.

        The answer must be in the phase WHITE_SPACE, and the white space after the marker must have
        less than `_MAX_WHITE_SPACE` bytes so far.
        """
        is_after_marker = self._phase is Phase.WHITE_SPACE
        return is_after_marker and self._num_white_space_after_marker < _MAX_WHITE_SPACE

    def _may_end(self, matcher: Matcher) -> bool:
        """Return whether the answer may end here.

        The answer may end if it is complete, or if the grammar allows no further token.
        """
        if self._phase is Phase.BEFORE_MARKER:
            return False
        return self._phase is Phase.ENDED or matcher.is_complete() or self._is_stuck(matcher)

    def _advance_before_marker(self, matcher: Matcher, data: bytes) -> bool:
        """Process a token in the phase BEFORE_MARKER, and return whether the token is allowed.

        The marker is the text after which the grammar applies, such as "</think>". `data` is the
        bytes of the token, and `matcher` tracks the position in the grammar. A token that contains
        text after the marker is allowed only if this text matches the start of the grammar. White
        space between the marker and the text is ignored. All other tokens are allowed. Examples for
        the marker "</think>" if the answer so far ends with "</th":

            token    new phase       allowed
            "s"      BEFORE_MARKER   yes
            "ink> "  WHITE_SPACE     yes
            "ink>{"  GRAMMAR         if the grammar can begin with "{"
        """
        marker = self._rules.marker
        text = self._tail + data
        _before_marker, found_marker, after_marker = text.partition(marker)
        if not found_marker:
            # Keep the last bytes, because they may be the beginning of the marker. The text does
            # not contain the whole marker, so at most len(marker) - 1 bytes are needed.
            self._tail = last_bytes(text, len(marker) - 1)
            return True
        self._tail = b""
        grammar_text = after_marker.lstrip(WHITE_SPACE)
        # Count the white space after the marker, because its amount is limited. Without a limit,
        # the model could generate white space forever.
        self._num_white_space_after_marker = len(after_marker) - len(grammar_text)
        if not grammar_text:
            self._phase = Phase.WHITE_SPACE
            return True
        self._phase = Phase.GRAMMAR
        return matcher.accept_bytes(grammar_text)

    # ---- tokens that may follow ------------------------------------------------------------------

    def fill(self, row: TokenMask) -> bool:
        """Write the mask of the possible next tokens into `row`.

        Args:
            row: the mask, [ceil(vocab_size / 32)] int32, contiguous.

        Returns:
            Whether any token is forbidden. If not, the row is unchanged.

        Mutates: row.
        """
        return self.fill_all([self], row[None], [0])[0]

    @classmethod
    def fill_all(
        cls, guides: Sequence["TokenGuide"], rows: TokenMasks, row_indices: Sequence[int]
    ) -> list[bool]:
        """For each guide, write a token mask: the tokens that the guide allows next.

        Args:
            guides: the guides.
            rows: the masks of the batch, [n, ceil(vocab_size / 32)] int32, contiguous.
            row_indices: for each guide, the index of its row in `rows`.

        Returns:
            For each guide, whether any token is forbidden. If not, its row is unchanged.

        Mutates: rows.
        """
        are_limited = []
        # Maps each class of matchers (one for each grammar library) to the rows that this library
        # fills. One call for many matchers takes less time than one call for each matcher.
        by_class: dict[type[Matcher], list[_GuideRow]] = {}
        for guide, row_index in zip(guides, row_indices, strict=True):
            matcher = guide._deciding_matcher()
            if matcher is None:
                are_limited.append(guide._fill_outside_grammar(rows[row_index]))
            else:
                are_limited.append(True)
                by_class.setdefault(type(matcher), []).append(_GuideRow(guide, matcher, row_index))
        for guide_rows in by_class.values():
            _fill_with_library(guide_rows, rows)
        return are_limited

    def _deciding_matcher(self) -> Matcher | None:
        """Return the matcher if the grammar alone decides about the next token, otherwise None.

        Return None if there is no grammar, before the marker, after a stop token, and while the
        thinking budget forces tokens.
        """
        if self._thinking is not None and self._thinking.forced:
            return None
        if self._phase is Phase.GRAMMAR or self._phase is Phase.WHITE_SPACE:
            return self._matcher
        return None

    def _fill_outside_grammar(self, row: TokenMask) -> bool:
        """Write the token mask for a position to which the grammar does not apply.

        The grammar does not apply if the thinking budget forces the next token, if the request has
        no grammar, if the answer has ended, or if the marker before the grammar is not complete.

        Return whether any token is forbidden. If not, the row is unchanged.

        Mutates: row.
        """
        if self._thinking is not None and self._thinking.forced:
            forced_id = self._thinking.forced[0]
            row[:] = mask_of([forced_id], self._rules.vocabulary.size)
            return True
        if self._matcher is None:
            return False  # Every token is allowed.
        if self._phase is Phase.ENDED:
            row[:] = self._rules.stop_mask
            return True
        self._fill_before_marker(self._matcher, row)
        return True

    def _fill_before_marker(self, matcher: Matcher, row: TokenMask) -> None:
        """Write the mask for the phase BEFORE_MARKER. Stop tokens are forbidden.

        The marker is the text after which the grammar applies, such as "</think>". A token that
        contains text after the marker is allowed only if the grammar allows this text. All other
        tokens are allowed. Example: the token `>{` is forbidden after "</think" if the grammar
        cannot begin with `{`.

        Mutates: row.
        """
        row[:] = self._rules.free_mask
        # After the text `marker_start`, each token in `tokens` completes the marker and adds text.
        # Example: the marker is "</think>", `marker_start` is "</th", and a token is "ink>{".
        for marker_start, tokens in self._rules.spanning.items():
            if not self._tail.endswith(marker_start):
                continue
            for token in tokens:
                # A copy of the matcher tests the token, so that the matcher does not advance.
                is_allowed = matcher.fork().accept_bytes(token.text_after)
                if not is_allowed:
                    _clear_bit(row, token.token_id)

    def _complete_mask(self, matcher: Matcher, row: TokenMask) -> None:
        """Apply the remaining rules to the mask that the grammar library has written into `row`.

        The library does not know these rules, which are applied in this order:

        - Special tokens that the grammar does not contain are forbidden.
        - Stop tokens are allowed if the answer may end. If no token is allowed although the answer
          is not complete, they are allowed, too, and an error is logged.
        - White space is allowed if it may still follow the marker (the text before the grammar).

        Mutates: row.
        """
        rules = self._rules
        np.bitwise_and(row, rules.grammar_mask, out=row)
        if matcher.is_complete():
            row |= rules.stop_mask
        elif not np.count_nonzero(row):
            # The grammar allows no token, so the answer ends here. Either the library has reached
            # one of its limits, or no token of the vocabulary has the bytes that must come next. If
            # the request has a strict schema, the postprocessor reports an error.
            log.error(
                "A grammar allows no token although the answer is not complete. The answer ends "
                "here."
            )
            row |= rules.stop_mask
        if self._allows_white_space_after_marker():
            row |= rules.white_space_mask

    def _is_stuck(self, matcher: Matcher) -> bool:
        """Return whether the grammar allows no token at all."""
        row = self._rules.stop_mask.copy()
        matcher.fill(row)
        row &= self._rules.grammar_mask
        return not row.any()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, or [] if several tokens are possible.

        The engine appends these tokens without sampling. While the reasoning is open, only the
        thinking budget can force tokens. Afterwards, tokens are forced if the grammar allows only
        one text next: the result is the tokens that the tokenizer would choose for this text,
        without the last token, which may merge with the text that follows. Example: if the grammar
        allows only `"name": ` here, the result is the tokens of `"name":`.
        """
        if self._thinking is not None and self._thinking.is_open:
            return list(self._thinking.forced)
        if self._matcher is None or self._phase is not Phase.GRAMMAR:
            return []
        forced_bytes = self._matcher.forced()
        if len(forced_bytes) < _MIN_FORCED_BYTES:
            return []
        # The tokens of a text depend on the preceding text, so pass the recent tokens, too.
        token_ids = self._rules.vocabulary.encode_forced(list(self._recent_ids), forced_bytes)
        are_allowed = all(_has_bit(self._rules.grammar_bits, token_id) for token_id in token_ids)
        return token_ids if are_allowed else []

    def fork(self) -> "TokenGuide":
        """Return an independent copy for another sequence."""
        matcher = self._matcher.fork() if self._matcher is not None else None
        thinking = self._thinking.fork() if self._thinking is not None else None
        copy = TokenGuide(self._rules, matcher, thinking)
        copy._phase = self._phase
        copy._tail = self._tail
        copy._num_white_space_after_marker = self._num_white_space_after_marker
        copy._recent_ids = self._recent_ids.copy()
        copy._slow_s = self._slow_s
        return copy


class _GuideRow(NamedTuple):
    """A `TokenGuide`, the `Matcher` of its grammar, and the index of its token mask in a batch."""

    guide: TokenGuide
    matcher: Matcher
    row_index: int


def _fill_with_library(guide_rows: list[_GuideRow], rows: TokenMasks) -> None:
    """Fill the token masks of several guides, whose matchers belong to one grammar library.

    The mask of a guide is the row of `rows` with the guide's `row_index`.

    Mutates: rows.
    """
    matchers = [guide_row.matcher for guide_row in guide_rows]
    row_indices = [guide_row.row_index for guide_row in guide_rows]
    matchers[0].fill_all(matchers, rows, row_indices)
    for guide, matcher, row_index in guide_rows:
        guide._complete_mask(matcher, rows[row_index])


def _has_bit(bits: bytes, token_id: int) -> bool:
    """Return whether the bit of a token is set in a mask. Return False for ids outside the mask.

    Example: the bit of the token 10 is bit 2 of byte 1.
    """
    byte_index = token_id >> 3
    return 0 <= byte_index < len(bits) and bool(bits[byte_index] >> (token_id & 7) & 1)


def _clear_bit(row: TokenMask, token_id: int) -> None:
    """Forbid a token in a mask. Example: with words of 32 bits, token 33 has bit 1 of word 1.

    Mutates: row.
    """
    bit = np.uint32(1 << (token_id & 31))
    row.view(np.uint32)[token_id >> 5] &= ~bit
