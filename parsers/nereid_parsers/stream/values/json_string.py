"""Reads one JSON string that arrives in pieces, and decodes the string."""

from __future__ import annotations

from nereid_parsers.stream.status import DONE
from nereid_parsers.stream.values.argument_types import escape_surrogates, loads
from nereid_parsers.stream.values.json_scanner import JsonScanner


class JsonStringReader:
    r"""Reads one JSON string in pieces. The first piece starts with the opening quote.

    Example: after `read` of the pieces `"a\n` and `b", 1`, `is_complete` is True, and `value`
    returns `a`, a line break and `b`.
    """

    __slots__ = ("_pieces", "_scanner")

    def __init__(self) -> None:
        """Create a reader for one string."""
        self._scanner = JsonScanner()
        self._pieces: list[str] = []

    def read(self, text: str, pos: int) -> int:
        """Read the next piece of the string. Return the position after the piece."""
        end = self._scanner.scan(text, pos)
        self._pieces.append(text[pos:end])
        return end

    @property
    def is_complete(self) -> bool:
        """Whether the closing quote has been read."""
        return self._scanner.status is DONE

    def value(self) -> str:
        """Return the decoded text of the complete string.

        If the string is not valid JSON, for example because its quotes are single quotes, return
        the text between the quotes unchanged. Half of a surrogate pair stays an escape sequence.
        """
        quoted_text = "".join(self._pieces)
        try:
            value: str = loads(quoted_text)
        except ValueError:
            return quoted_text[1:-1]
        return escape_surrogates(value)
