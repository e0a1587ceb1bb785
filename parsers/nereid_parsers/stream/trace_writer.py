"""Passes each piece of a message and its classification, such as "content", to a function."""

from __future__ import annotations

from collections.abc import Callable

# A function that is called for each piece of a message, in order. The arguments are the
# classification of the piece, such as "content", and its text.
Trace = Callable[[str, str], None]

# The classifications of text.
REASONING = "reasoning"
CONTENT = "content"
CALL = "call"
MARKUP = "markup"  # Text that no event contains, for example the marker `</think>`.


class TraceWriter:
    """Passes each piece of one message, and its classification, to a function.

    Example: for `Hi<call>{..}</call>`, the trace function receives `("content", "Hi")`,
    `("markup", "<call>")`, `("call", "{..}")` and `("markup", "</call>")`.
    """

    __slots__ = ("_call_text", "_trace")

    def __init__(self, trace: Trace) -> None:
        """Create a writer that passes the text to the function `trace`."""
        self._trace = trace
        self._call_text: list[str] = []  # The stored text of an open tool call.

    def write(self, classification: str, text: str) -> None:
        """Pass a piece of text and its classification to the trace function."""
        if text:
            self._trace(classification, text)

    def trace_call(self, text: str, *, may_be_reread: bool) -> None:
        """Pass a piece of a tool call to the trace function, or store the piece for later.

        Args:
            text: The piece.
            may_be_reread: Whether the parser may read the end of the tool call again, as other
                text. If so, the classification of the piece may change, so the piece is stored
                until `end_traced_call` is called.
        """
        if may_be_reread:
            self._call_text.append(text)
        else:
            self.write(CALL, text)

    def shorten_traced_call(self, num_chars: int) -> None:
        """Remove the last `num_chars` characters from the stored text of a tool call.

        Example: from `{"a": "x}</call>`, the last 7 characters `</call>` are removed. `num_chars`
        must be at least 1. If the stored text is shorter than `num_chars`, no text stays stored.
        """
        self._call_text = ["".join(self._call_text)[:-num_chars]]

    def end_traced_call(self) -> None:
        """Pass the stored text of the tool call to the trace function, and delete this text."""
        self.write(CALL, "".join(self._call_text))
        self._call_text = []
