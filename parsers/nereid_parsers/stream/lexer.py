"""Markers in a stream of text: finding them, and what may still become one."""

from __future__ import annotations

import re
from collections.abc import Iterable


def partial(marker: str) -> str:
    """A regex for any proper, non-empty start of `marker` at the very end of the text."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return f"{re.escape(marker[0])}{pattern}\\Z"


class Lexer:
    """Finds the first of some markers, reading each character a bounded number of times.

    Where one marker starts with another, the longer is preferred, and awaited while it may come.
    """

    __slots__ = ("_full", "_markers", "_stream")

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = frozenset(marker for marker in markers if marker)
        longest_first = sorted(self._markers, key=lambda marker: (-len(marker), marker))
        full: list[str] = []
        stream: list[str] = []
        for marker in longest_first:
            full.append(re.escape(marker))
            stream += [
                partial(longer)
                for longer in longest_first
                if longer != marker and longer.startswith(marker)
            ]
            stream.append(re.escape(marker))
        stream += [partial(marker) for marker in longest_first if len(marker) > 1]
        first = "".join(re.escape(char) for char in sorted({m[0] for m in longest_first}))
        # The look-ahead makes the common case, no marker in sight, one character class per step.
        self._stream = re.compile(f"(?=[{first}])(?:{'|'.join(stream)})").search if first else None
        self._full = re.compile(f"(?=[{first}])(?:{'|'.join(full)})").search if first else None

    def find(self, text: str, at: int, final: bool) -> tuple[int, str]:
        """Where the text from `at` stops being plain, and the marker there.

        The marker is "" where the text ends, or ends in what may become a marker. With `final`
        nothing more comes, so nothing is awaited.
        """
        search = self._full if final else self._stream
        match = search(text, at) if search is not None else None
        if match is None:
            return len(text), ""
        found = match.group()
        return match.start(), found if final or self._is_settled(found, match.end(), text) else ""

    def _is_settled(self, found: str, end: int, text: str) -> bool:
        if found not in self._markers:
            return False
        if end < len(text):
            return True
        return not any(m != found and m.startswith(found) for m in self._markers)
