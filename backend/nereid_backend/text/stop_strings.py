# SPDX-License-Identifier: Apache-2.0
"""Finds stop strings in text that arrives piece by piece.

Text that may be the beginning of a stop string is kept back, so that clients never receive a part
of a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The result of `StopStrings.feed` for one piece of text.

    Attributes:
        text: the text that may be sent to the client.
        stop: the stop string that ended the answer; None if the answer continues.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    The answer ends at the stop string that is completed first. If the same character completes
    several stop strings, the answer ends at the longest of these stop strings. Example with the
    stop string "END": `feed("one E")` returns the text "one ". Then `feed("ND two")` returns the
    text "" and the stop string "END".
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """Create an object that has not received any text yet.

        Args:
            stops: the stop strings, none of them empty.
            include_in_output: whether the returned text includes the stop string.
        """
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = max(map(len, stops), default=0)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Process the next part of an answer, and return the text that may be sent to the client.

        The end of the text is kept back (in `_held`) if it may be the beginning of a stop string.
        Example with the stop string "###": "one #" returns "one ". Then "## two" returns "" and the
        stop string. Do not call this method again after a stop string was found.
        """
        if not self._stops:
            return StopMatch(text)
        unsent_text = self._held + text
        match = self._find(unsent_text)
        if match is not None:
            start, stop = match
            self._held = ""
            end = start + len(stop) if self._include else start
            return StopMatch(unsent_text[:end], stop)
        num_sendable = len(unsent_text) - self._held_length(unsent_text)
        self._held = unsent_text[num_sendable:]
        return StopMatch(unsent_text[:num_sendable])

    def finish(self) -> str:
        """Return the text that was kept back as the possible beginning of a stop string."""
        text = self._held
        self._held = ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the position of the first stop string in `text`, and the stop string.

        The first stop string is the stop string that ends first. If several stop strings end at the
        same character, it is the longest of them. Return None if `text` contains no stop string.
        Example: with the stop string "END", the text "one END" gives (4, "END").
        """
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        # If several matches end at the same position, `min` returns the first of them. This match
        # is the longest, because `_stops` begins with the longest stop strings.
        return min(matches, key=_end_of_match, default=None)

    def _held_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string.

        Example: for the stop string "END", the text "the E" gives 1 and the text "the" gives 0.
        """
        max_length = min(len(text), self._longest - 1)
        for length in range(max_length, 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


def _end_of_match(match: tuple[int, str]) -> int:
    """Return the position at which a stop string ends in a text.

    `match` contains the position at which the stop string starts, and the stop string.
    """
    start, stop = match
    return start + len(stop)
