# SPDX-License-Identifier: Apache-2.0
"""Where an answer's reasoning begins and ends, and the budget after which it is made to end."""

from enum import Enum, auto
from typing import Self

from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import EngineError, RequestError


class _State(Enum):
    BEFORE = auto()  # only blanks so far, or a part of the opening marker
    OPEN = auto()
    CLOSED = auto()


class Thinking:
    """Follows one answer's bytes. Markers may be one token, several, or parts of tokens.

    Attributes:
        forced: what must come next, token by token: the end marker, once the budget is used up.
        num_tokens: tokens of reasoning so far; neither marker's tokens are counted where they are
            tokens of their own.

    Raises:
        RequestError: a budget without tokens that could end the reasoning.
    """

    def __init__(self, spec: ThinkingSpec) -> None:
        self._spec = spec
        self._start = spec.start.strip().encode()
        self._end = spec.end.strip().encode()
        if spec.budget is not None and not spec.end_token_ids:
            raise RequestError(
                "thinking: a budget needs end_token_ids, the tokens that end the reasoning"
            )
        self._text = b""
        self.num_tokens = 0
        self.forced: tuple[int, ...] = ()
        if spec.is_open:
            self._state = _State.OPEN
        else:
            self._state = _State.BEFORE if self._start else _State.CLOSED
        self._spend()

    @property
    def is_open(self) -> bool:
        """Whether the next token is reasoning, or may be part of the marker that opens it."""
        return self._state is _State.OPEN or bool(self.forced)

    @property
    def is_decided(self) -> bool:
        """Whether the answer can no longer begin to reason."""
        return self._state is not _State.BEFORE

    def feed(self, token_id: int, data: bytes) -> None:
        """Take in a token and its bytes.

        Raises:
            EngineError: another token is forced here.
        """
        if self.forced:
            if token_id != self.forced[0]:
                raise EngineError(
                    f"token {token_id} where the thinking budget forces {self.forced[0]}"
                )
            self.forced = self.forced[1:]
            if not self.forced:
                self._state = _State.CLOSED
        elif self._state is _State.BEFORE:
            self._begin(data)
        elif self._state is _State.OPEN:
            self._continue(data)

    def fork(self) -> Self:
        """The same, for another sequence."""
        twin = type(self)(self._spec)
        twin._state, twin._text = self._state, self._text
        twin.num_tokens, twin.forced = self.num_tokens, self.forced
        return twin

    def _begin(self, data: bytes) -> None:
        self._text = (self._text + data).lstrip()
        if self._text.startswith(self._start):
            self._state, rest = _State.OPEN, self._text[len(self._start) :]
            self._text = b""
            if rest.strip():
                self._continue(rest)
            self._spend()
        elif not self._start.startswith(self._text):
            self._state, self._text = _State.CLOSED, b""

    def _continue(self, data: bytes) -> None:
        self._text += data
        if self._end and self._end in self._text:
            self._state, self._text = _State.CLOSED, b""
            return
        keep = max(len(self._end) - 1, 0)
        self._text = self._text[-keep:] if keep else b""
        self.num_tokens += 1
        self._spend()

    def _spend(self) -> None:
        budget = self._spec.budget
        if self._state is _State.OPEN and budget is not None and self.num_tokens >= budget:
            self.forced = self._spec.end_token_ids
