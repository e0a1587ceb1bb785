r"""The few regular expressions of response templates, read as literals and fields.

`\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>` is blanks, a literal, blanks, a literal, a field
and a literal. What is more than that is refused, because a format must also be able to write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from nereid_parsers.errors import FormatError

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d+(?:,\d*)?\}\??")
_MAX_ALTERNATIVES = 16


@dataclass(frozen=True, slots=True)
class Blank:
    r"""`\s*` and its like."""


@dataclass(frozen=True, slots=True)
class Field:
    """A named group, or "" for a class of characters without a name."""

    name: str


Piece = str | Blank | Field
Pieces = tuple[Piece, ...]


def alternatives(regex: str) -> list[Pieces]:
    """Every way to match, as pieces.

    Raises: FormatError for what is neither literal, blank, field, option nor alternative.
    """
    reader = _Reader(regex)
    found = reader.choice()
    if reader.at != len(regex):
        raise FormatError(f"regex {regex!r}: cannot be read as markers from {reader.at} on")
    return [_joined(pieces) for pieces in found]


def _joined(pieces: Pieces) -> Pieces:
    """Pieces with neighbouring literals in one."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    return tuple(found)


class _Reader:
    def __init__(self, regex: str) -> None:
        self.regex = regex
        self.at = 0

    def choice(self) -> list[Pieces]:
        found = self._sequence()
        while self.at < len(self.regex) and self.regex[self.at] == "|":
            self.at += 1
            found += self._sequence()
        return found

    def _sequence(self) -> list[Pieces]:
        found: list[Pieces] = [()]
        while self.at < len(self.regex) and self.regex[self.at] not in "|)":
            item = self._item()
            found = [one + other for one, other in product(found, item)]
            if len(found) > _MAX_ALTERNATIVES:
                raise FormatError(f"regex {self.regex!r}: too many alternatives")
        return found

    def _item(self) -> list[Pieces]:
        char = self.regex[self.at]
        if char == "(":
            item: list[Pieces] = self._group()
        elif char == "[":
            item = [(self._class(),)]
        elif char == "\\":
            item = [(self._escape(),)]
        elif char == ".":
            self.at += 1
            item = [(Field(""),)]
        elif char in "^$":
            self.at += 1
            return [()]
        else:
            self.at += 1
            item = [(char,)]
        return self._quantified(item)

    def _quantified(self, item: list[Pieces]) -> list[Pieces]:
        match = _QUANTIFIER.match(self.regex, self.at)
        if match is None:
            return item
        self.at = match.end()
        if all(piece == Blank() or isinstance(piece, Field) for one in item for piece in one):
            return item
        if match.group()[0] == "?":
            return [*item, ()]
        raise FormatError(f"regex {self.regex!r}: {match.group()} repeats a literal")

    def _group(self) -> list[Pieces]:
        named = re.compile(r"\(\?P<(\w+)>").match(self.regex, self.at)
        if named is not None:
            self.at = self._matching_end()
            return [(Field(named.group(1)),)]
        lead = re.compile(r"\((?:\?:)?").match(self.regex, self.at)
        assert lead is not None
        if self.regex.startswith("(?", self.at) and lead.group() != "(?:":
            raise FormatError(f"regex {self.regex!r}: looks ahead or behind")
        self.at = lead.end()
        found = self.choice()
        if self.at >= len(self.regex):
            raise FormatError(f"regex {self.regex!r}: a group is not closed")
        self.at += 1
        return found

    def _matching_end(self) -> int:
        depth, at = 0, self.at
        while at < len(self.regex):
            char = self.regex[at]
            if char == "\\":
                at += 1
            elif char == "[":
                at = self.regex.find("]", at + 2)
                if at < 0:
                    break
            elif char in "()":
                depth += 1 if char == "(" else -1
                if not depth:
                    return at + 1
            at += 1
        raise FormatError(f"regex {self.regex!r}: a group is not closed")

    def _class(self) -> Piece:
        end = self.regex.find("]", self.at + 2)
        if end < 0:
            raise FormatError(f"regex {self.regex!r}: a class is not closed")
        inside = self.regex[self.at + 1 : end]
        self.at = end + 1
        return Blank() if re.fullmatch(r"(?:\\[sntr]| )+", inside) else Field("")

    def _escape(self) -> Piece:
        char = self.regex[self.at + 1 : self.at + 2]
        self.at += 2
        if char == "s":
            return Blank()
        if char in ("w", "d", "S"):
            return Field("")
        if char in ("Z", "b", "A", "z"):
            return ""
        return _ESCAPES.get(char, char)
