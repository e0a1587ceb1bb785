# SPDX-License-Identifier: Apache-2.0
"""Finds the reasoning in an answer, and ends the reasoning when its token budget is used up."""

from enum import Enum, auto
from typing import Self

from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import EngineError, RequestError


class _State(Enum):
    """The position of the next token in an answer: before, in or after the answer's reasoning."""

    BEFORE = auto()  # so far only white space or the beginning of the start marker
    OPEN = auto()  # the reasoning has started and has not ended
    CLOSED = auto()  # the reasoning has ended, or the answer has no reasoning


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
        """Set the state at the start of an answer.

        Args:
            spec: the markers and the budget.

        Raises:
            RequestError: if the specification has a budget but no tokens that end the reasoning.
        """
        self._spec = spec
        self._start = spec.start.strip().encode()
        self._end = spec.end.strip().encode()
        if spec.budget is not None and not spec.end_token_ids:
            raise RequestError(
                "thinking: a budget requires end_token_ids, the tokens that end the reasoning, "
                "but the list is empty. Leave out the budget, or set end_token_ids."
            )
        # The last bytes of the answer. They are stored because they may be the beginning of a
        # marker.
        self._text = b""
        self.num_tokens = 0
        self.forced: tuple[int, ...] = ()
        if spec.is_open:
            self._state = _State.OPEN
        else:
            self._state = _State.BEFORE if self._start else _State.CLOSED
        self._end_if_used_up()

    @property
    def is_open(self) -> bool:
        """Whether the reasoning has started and its end marker is not complete yet."""
        return self._state is _State.OPEN or bool(self.forced)

    def feed(self, token_id: int, data: bytes) -> None:
        """Advance by one token.

        Args:
            token_id: the token.
            data: the bytes of the token.

        Raises:
            EngineError: if the budget forces a different token.
        """
        if self.forced:
            if token_id != self.forced[0]:
                raise EngineError(
                    f"The thinking budget is used up, so the next token must be {self.forced[0]}, "
                    f"but the answer has token {token_id}."
                )
            self.forced = self.forced[1:]
            if not self.forced:
                self._state = _State.CLOSED
        elif self._state is _State.BEFORE:
            self._find_start(data)
        elif self._state is _State.OPEN:
            self._find_end(data)

    def fork(self) -> Self:
        """Return an independent copy for another sequence."""
        copy = type(self)(self._spec)
        copy._state = self._state
        copy._text = self._text
        copy.num_tokens = self.num_tokens
        copy.forced = self.forced
        return copy

    def _find_start(self, data: bytes) -> None:
        """Append `data` to the last bytes of the answer, and look for the start marker."""
        self._text = (self._text + data).lstrip()
        if self._text.startswith(self._start):
            rest = self._text[len(self._start) :]
            self._state = _State.OPEN
            self._text = b""
            if rest.strip():
                self._find_end(rest)
            self._end_if_used_up()
        elif not self._start.startswith(self._text):
            self._state = _State.CLOSED
            self._text = b""

    def _find_end(self, data: bytes) -> None:
        """Append `data` to the last bytes of the answer, and look for the end marker.

        `data` is the bytes of one token. If the reasoning continues, count the token.
        """
        self._text += data
        if self._end and self._end in self._text:
            self._state = _State.CLOSED
            self._text = b""
            return
        # Keep only the last bytes, which can be the beginning of an end marker.
        num_kept = max(len(self._end) - 1, 0)
        self._text = self._text[-num_kept:] if num_kept else b""
        self.num_tokens += 1
        self._end_if_used_up()

    def _end_if_used_up(self) -> None:
        """Force the end marker if the reasoning is open and the budget is used up."""
        budget = self._spec.budget
        if self._state is _State.OPEN and budget is not None and self.num_tokens >= budget:
            self.forced = self._spec.end_token_ids
