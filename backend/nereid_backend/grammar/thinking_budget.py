# SPDX-License-Identifier: Apache-2.0
"""Finds the reasoning in an answer, and ends the reasoning when its token budget is used up."""

from enum import Enum, auto
from typing import Self

from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import EngineError, RequestError


def last_bytes(data: bytes, max_bytes: int) -> bytes:
    """Return the end of `data`, at most `max_bytes` bytes. Example: b"abc" and 2 give b"bc"."""
    return data[max(len(data) - max_bytes, 0) :]


class _State(Enum):
    """The position of the next token in an answer: before, in or after the answer's reasoning."""

    BEFORE = auto()
    """The answer so far is only white space, or the beginning of the start marker."""
    OPEN = auto()
    """The reasoning has started and has not ended."""
    CLOSED = auto()
    """The reasoning has ended, or the answer has no reasoning."""


class Thinking:
    """Finds the reasoning in the bytes of one answer and enforces the thinking budget.

    A marker may be one token, several tokens, or parts of tokens. Example with the markers
    "<think>" and "</think>" and a budget of 2: after the tokens "<think>", " I" and " see",
    `forced` contains the tokens of "</think>".

    Attributes:
        forced: the tokens that must come next, in order. The tuple is empty until the budget is
            used up, and again after the end marker.
        num_tokens: the number of reasoning tokens so far. Tokens that contain only a marker are not
            counted.
    """

    def __init__(self, spec: ThinkingSpec) -> None:
        """Create the state of the reasoning for an answer that has no tokens yet.

        Reasoning is the text between two markers, such as "<think>" and "</think>". The budget
        limits the number of its tokens.

        Args:
            spec: the markers and the budget.

        Raises:
            RequestError: if the specification has a budget but no tokens that end the reasoning.
        """
        _check_end_tokens(spec)
        self._spec = spec
        # The markers are stored as bytes, because a token can end in the middle of a character.
        # White space around a marker, such as the newline of "<think>\n", is not required.
        self._start_marker = spec.start.strip().encode()
        self._end_marker = spec.end.strip().encode()
        self._state = self._first_state()
        # The last bytes of the answer, which may be the beginning of the marker that comes next.
        self._tail = b""
        self.num_tokens = 0
        self.forced: tuple[int, ...] = ()
        # If the answer starts inside the reasoning, a budget of 0 is used up before the first
        # token.
        self._force_end_if_budget_used_up()

    def _first_state(self) -> _State:
        """Return the state of the reasoning before the first token of the answer."""
        if self._spec.is_open:
            return _State.OPEN
        # Without a start marker, the reasoning can never start.
        return _State.BEFORE if self._start_marker else _State.CLOSED

    @property
    def is_open(self) -> bool:
        """Whether the reasoning has started and its end marker is not complete yet."""
        return self._state is _State.OPEN or bool(self.forced)

    def feed(self, token_id: int, data: bytes) -> None:
        """Advance the state of the reasoning by the next token of the answer.

        The state is BEFORE the reasoning, OPEN (in the reasoning) or CLOSED (after the reasoning).
        If the budget is used up after this token, `forced` contains the tokens of the end marker,
        which must come next.

        Args:
            token_id: the token.
            data: the bytes of the token.

        Raises:
            EngineError: if the budget forces a different token.
        """
        if self.forced:
            self._feed_forced(token_id)
            return
        if self._state is _State.BEFORE:
            self._look_for_start(data)
        elif self._state is _State.OPEN:
            self._look_for_end(data)
        self._force_end_if_budget_used_up()

    def _feed_forced(self, token_id: int) -> None:
        """Accept a token of the end marker. Remove the token from the tuple `forced`.

        The budget is used up, so `forced` contains the tokens of the end marker that must come
        next. After the last of these tokens, the reasoning is closed.

        Raises:
            EngineError: if `token_id` is a different token.
        """
        expected_id = self.forced[0]
        if token_id != expected_id:
            raise EngineError(
                f"The thinking budget is used up, so the next token must be {expected_id}, but the "
                f"answer has token {token_id}."
            )
        self.forced = self.forced[1:]
        if not self.forced:
            self._state = _State.CLOSED

    def fork(self) -> Self:
        """Return an independent copy for another sequence."""
        copy = type(self)(self._spec)
        copy._state = self._state
        copy._tail = self._tail
        copy.num_tokens = self.num_tokens
        copy.forced = self.forced
        return copy

    def _look_for_start(self, data: bytes) -> None:
        """Process a token in the state BEFORE: check whether the answer begins with a start marker.

        `data` contains the bytes of the token, and `_tail` contains the earlier bytes of the
        answer. Examples for the start marker "<think>": after "<", the state is still BEFORE. After
        "<think> I", the state is OPEN. After "Hello", the state is CLOSED, because the answer has
        no reasoning.
        """
        beginning = (self._tail + data).lstrip()
        if beginning.startswith(self._start_marker):
            self._state = _State.OPEN
            self._tail = b""
            reasoning = beginning.removeprefix(self._start_marker)
            if reasoning.strip():  # A token that contains only the marker is not counted.
                self._look_for_end(reasoning)
        elif self._start_marker.startswith(beginning):
            self._tail = beginning  # Later tokens may complete the marker.
        else:
            self._state = _State.CLOSED
            self._tail = b""

    def _look_for_end(self, data: bytes) -> None:
        """Process a token in the state OPEN: close the reasoning if the end marker is complete.

        `data` contains the bytes of the token, and `_tail` contains the bytes before it. If the
        reasoning continues, count the token. Example for the end marker "</think>": if the tokens
        so far end with "</", the token "think>" closes the reasoning.
        """
        text = self._tail + data
        has_ended = self._end_marker != b"" and self._end_marker in text
        if has_ended:
            self._state = _State.CLOSED
            self._tail = b""
            return
        self.num_tokens += 1
        # The text does not contain the whole end marker, but it may end with the beginning of the
        # marker. This beginning is shorter than the marker, so the last len(marker) - 1 bytes
        # suffice.
        self._tail = last_bytes(text, max(0, len(self._end_marker) - 1))

    def _force_end_if_budget_used_up(self) -> None:
        """If unfinished reasoning has used up the budget, set `forced` to the end marker."""
        budget = self._spec.budget
        if self._state is _State.OPEN and budget is not None and self.num_tokens >= budget:
            self.forced = self._spec.end_token_ids


def _check_end_tokens(spec: ThinkingSpec) -> None:
    """Raise a RequestError if a specification has a budget but no tokens that end the reasoning."""
    if spec.budget is not None and not spec.end_token_ids:
        raise RequestError(
            "thinking: a budget requires end_token_ids, the tokens that end the reasoning, "
            "but the list is empty. Leave out the budget, or set end_token_ids."
        )
