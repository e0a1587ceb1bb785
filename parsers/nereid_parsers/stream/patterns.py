"""Patterns of literals and fields, matched against text that may still grow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from nereid_parsers.format import Slot, pattern

NEED = -1
FAIL = -2
MAX_HEAD = 2048  # characters; what is longer is no head, whatever it looks like

_FIRST_PART = re.compile(r"<\|[^<>|]+\|>|<[^<>\s]+>")
_MARKER_LIKE = re.compile(r"\A\s*[<\[◁]\S{2}|<[^<>\s]{2,}>")
_BLANK = re.compile(r"\s*").match
_TOKENS = re.compile(r"\s+|(?<=>)(?=<)")
_PARTS = re.compile(r"\s+|(?<=>)(?=<)|(?<=```)(?=<)")
_NAME = r"""\s<>{}\[\]()"'`|=,;"""
_CLASSES = {
    "name": f"[^{_NAME}",
    "key": r"""[^<>"'\r\n""",
    "id": f"[^{_NAME}",
    "number": r"[^\D",
    "string": r"[^\W",
    "type": r"[^\W",
    "word": r"[^\s<>",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Steps: a literal (text, None, ""), blanks ("", None, "") or a field ("", match, name)."""

    steps: tuple[tuple[str, re.Pattern[str] | None, str], ...]

    def match(self, text: str, at: int, final: bool, fields: dict[str, str]) -> int:
        """The end of the match from `at`, or NEED (more text may fit), or FAIL. Fills `fields`."""
        size = len(text)
        for literal, field, name in self.steps:
            if field is not None:
                found = field.match(text, at)
                end = found.end() if found else at
                if end == size and not final:
                    return NEED if size - at < MAX_HEAD else FAIL
                if end == at and name != "rest":
                    return FAIL
                if name == "name" and fields.get(name, text[at:end]) != text[at:end]:
                    return FAIL  # a name that stands twice is the same
                fields[name] = text[at:end]
                at = end
            elif literal:
                if not text.startswith(literal, at):
                    missing = not final and literal.startswith(text[at:])
                    return NEED if missing else FAIL
                at += len(literal)
            else:
                at = skip_blanks(text, at)
        return at


def skip_blanks(text: str, at: int) -> int:
    """The first position from `at` on that is no white space."""
    found = _BLANK(text, at)
    return found.end() if found else at


@lru_cache(maxsize=4096)
def compiled(source: str) -> Pattern:
    """Compile a pattern. White space in it, and between `>` and `<`, stands for any blanks."""
    parts = pattern(source)
    steps: list[tuple[str, re.Pattern[str] | None, str]] = []
    for index, part in enumerate(parts):
        if isinstance(part, Slot):
            follower = parts[index + 1] if index + 1 < len(parts) else ""
            literal = follower if isinstance(follower, str) else ""
            steps.append(("", _field(part.field, literal), part.field))
            continue
        words = _TOKENS.split(part)
        for number, word in enumerate(words):
            if number:
                steps.append(("", None, ""))
            if word:
                steps.append((word, None, ""))
    return Pattern(tuple(steps))


def _field(name: str, follower: str) -> re.Pattern[str]:
    if name == "rest":
        return re.compile(f"(?:(?!{re.escape(follower.strip())}).)*" if follower.strip() else ".*")
    stop = re.escape(follower[:1]) if follower[:1].strip() else ""
    return re.compile(f"{_CLASSES[name]}{stop}]+")


def tokens(marker: str) -> tuple[str, ...]:
    r"""The parts of a compound marker: `"</function>\n</tool_call>"` has two."""
    return tuple(part for part in _PARTS.split(marker.strip()) if part)


def is_compound_start(marker: str, text: str) -> bool:
    """Whether a marker starts with this text, in which its first part is whole, and goes on."""
    first = _FIRST_PART.match(marker)
    return first is not None and first.end() <= len(text) < len(marker)


def looks_like_markup(text: str) -> bool:
    """Whether text begins as markers do, or holds one: what prose hardly does."""
    return _MARKER_LIKE.search(text) is not None
