"""Stores the received text, and the position at which the unread text starts."""

from __future__ import annotations


class TextBuffer:
    """The text that is being read.

    Example: after `append("<a>Hi")`, `take(3)` returns `"<a>"`, and `unread()` returns `"Hi"`.
    After `push_back("x")`, `unread()` returns `"xHi"`.

    Attributes:
        text: The text that has arrived. It may begin with text that has already been read.
        pos: The position in `text` of the first character that has not been read.
        is_final: Whether no more text follows.
    """

    __slots__ = ("is_final", "pos", "text")

    def __init__(self) -> None:
        """Create an empty buffer."""
        self.text = ""
        self.pos = 0
        self.is_final = False

    def append(self, text: str) -> None:
        """Add newly received text, and discard the text that has already been read."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def push_back(self, text: str) -> None:
        """Insert `text` before the unread text. The reader then reads `text` first."""
        self.text = text + self.unread()
        self.pos = 0

    def has_unread(self) -> bool:
        """Return whether the buffer contains unread text."""
        return self.pos < len(self.text)

    def unread(self) -> str:
        """Return the unread text. The text stays unread."""
        return self.text[self.pos :]

    def take_until(self, end: int) -> str:
        """Return the unread text up to the position `end`, and mark the returned text as read."""
        piece = self.text[self.pos : end]
        self.pos = end
        return piece

    def take(self, size: int) -> str:
        """Return the next `size` characters, and mark them as read."""
        return self.take_until(self.pos + size)

    def take_unread(self) -> str:
        """Return all text that has not been read, and mark it as read."""
        return self.take_until(len(self.text))

    def starts_with(self, text: str) -> bool:
        """Return whether the unread text starts with `text`."""
        return self.text.startswith(text, self.pos)

    def is_prefix_of(self, text: str) -> bool:
        """Return whether `text` starts with the unread text of the buffer.

        Example: the unread text `<th` is a prefix of `<think>`, and `<th> x` is not.
        """
        return text.startswith(self.unread())
