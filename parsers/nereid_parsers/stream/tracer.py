"""Passes each piece of a message, together with its classification, to a trace function."""

from __future__ import annotations

from collections.abc import Callable

# A function that is called for each piece of a message, in order. The arguments are the
# classification of the piece, such as "content", and its text. Example: for
# `Hi<call>{..}</call>`, the function receives `("content", "Hi")`, `("markup", "<call>")`,
# `("call", "{..}")` and `("markup", "</call>")`.
Trace = Callable[[str, str], None]

_CALL = "call"  # The classification of the text of a tool call.


class Tracer:
    """Passes the pieces of a message, in order, to a trace function.

    Attributes:
        function: The trace function, or None if no function receives the pieces.
    """

    __slots__ = ("_call_parts", "_may_reread_calls", "function")

    def __init__(self, *, may_reread_calls: bool) -> None:
        """Create a tracer without a trace function.

        `may_reread_calls` is true if the parser may read the end of a tool call again, as other
        text. The text of a tool call is then stored until the tool call ends.
        """
        self.function: Trace | None = None
        self._may_reread_calls = may_reread_calls
        self._call_parts: list[str] = []  # The stored text of the open tool call.

    def add_call_text(self, text: str) -> None:
        """Pass a piece of a tool call to the trace function, or store the piece."""
        if self.function is None:
            return
        if self._may_reread_calls:
            self._call_parts.append(text)
        elif text:
            self.function(_CALL, text)

    def shorten_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters from the stored text of a tool call.

        Example: from `{"a": "x}</call>`, the last 7 characters `</call>` are removed. `num_chars`
        must be at least 1. If the stored text is shorter than `num_chars`, no text stays stored.
        """
        self._call_parts = ["".join(self._call_parts)[:-num_chars]]

    def end_call(self) -> None:
        """Pass the stored text of the tool call to the trace function, and delete this text."""
        text = "".join(self._call_parts)
        self._call_parts = []
        if self.function is not None and text:
            self.function(_CALL, text)
