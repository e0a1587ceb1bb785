# SPDX-License-Identifier: Apache-2.0
"""Stop strings in streamed text: nothing of one reaches the client, not even its first half."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a piece of text came to.

    Attributes:
        text: may be given out.
        stop: the string that ended the answer, None while it goes on.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Looks for stop strings in text that comes in pieces, in time linear in the text.

    Args:
        stops: non-empty strings; the one that is complete first wins, the longest among those that
            are complete at the same character.
        include_in_output: leave the string that was found in the text.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = max(map(len, stops), default=0)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Take the next piece; once a stop was found, nothing more must be fed."""
        if not self._stops:
            return StopMatch(text)
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopMatch(text[: start + len(stop) if self._include else start], stop)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back as the possible start of a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        return min(
            ((start, stop) for start, stop in found if start >= 0),
            key=lambda hit: (hit[0] + len(hit[1]), hit[0]),
            default=None,
        )

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
