"""Matches patterns of literals and fields against text that arrives in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from nereid_parsers.pattern_syntax import Slot, pattern

# These constants replace the position after a match if there is no match yet.
NEED_MORE = -1  # More text could complete the match.
NO_MATCH = -2  # No further text could complete the match.

# The maximum length of a tool call's head, in characters. Longer text is not a head.
MAX_HEAD_CHARS = 2048

_FIRST_TAG = re.compile(r"<\|[^<>|]+\|>|<[^<>\s]+>")
_MARKUP = re.compile(r"\A\s*[<\[◁]\S{2}|<[^<>\s]{2,}>")
_BLANKS = re.compile(r"\s*").match
# White space, and the places between two tags where white space may occur.
_BLANKS_OR_TAG_GAP = re.compile(r"\s+|(?<=>)(?=<)")
_MARKER_GAP = re.compile(r"\s+|(?<=>)(?=<)|(?<=```)(?=<)")
_NO_NAME_CHARS = r"""\s<>{}\[\]()"'`|=,;"""
# The regex character class of each field, without its end. `_field_regex` adds the end.
_FIELD_CLASSES = {
    "name": f"[^{_NO_NAME_CHARS}",
    "key": r"""[^<>"'\r\n""",
    "id": f"[^{_NO_NAME_CHARS}",
    "number": r"[^\D",
    "string": r"[^\W",
    "type": r"[^\W",
    "word": r"[^\s<>",
}


@dataclass(frozen=True, slots=True)
class FieldStep:
    """One field of a compiled pattern: its name, and the regex that matches its text."""

    name: str
    regex: re.Pattern[str]

    def match(self, text: str, pos: int, is_final: bool, fields: dict[str, str]) -> int:
        """Match the field at `pos`, store its text in `fields`, and return the end of the match.

        Example: in `"sum>"`, the field `name` matches `sum`. In `"sum"`, the result is NEED_MORE,
        because the name may continue.
        """
        match = self.regex.match(text, pos)
        end = match.end() if match else pos
        if end == len(text) and not is_final:
            return NEED_MORE if end - pos < MAX_HEAD_CHARS else NO_MATCH
        if end == pos and self.name != "rest":
            return NO_MATCH
        value = text[pos:end]
        if self.name == "name" and fields.get(self.name, value) != value:
            return NO_MATCH  # All occurrences of the name must be equal.
        fields[self.name] = value
        return end


class BlanksStep:
    """The part of a compiled pattern that matches white space of any length."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. Each step is a literal, white space or a field."""

    steps: tuple[str | BlanksStep | FieldStep, ...]

    def match(self, text: str, pos: int, is_final: bool, fields: dict[str, str]) -> int:
        """Match the pattern at `pos`. Return the end of the match, NEED_MORE or NO_MATCH.

        Example: for the pattern `<f={name}>` and the text `"<f=sum>{"`, the result is 7, and
        `{"name": "sum"}` is stored. For the text `"<f=su"`, the result is NEED_MORE.

        Args:
            text: The text.
            pos: The position at which the pattern must start.
            is_final: Whether no more text follows.
            fields: The dict in which the texts of the fields are stored.
        """
        for step in self.steps:
            if isinstance(step, BlanksStep):
                pos = skip_blanks(text, pos)
            elif isinstance(step, FieldStep):
                pos = step.match(text, pos, is_final, fields)
                if pos < 0:
                    return pos
            elif text.startswith(step, pos):
                pos += len(step)
            else:
                is_prefix = not is_final and step.startswith(text[pos:])
                return NEED_MORE if is_prefix else NO_MATCH
        return pos


def skip_blanks(text: str, pos: int) -> int:
    """Return the position of the first character at or after `pos` that is not white space.

    Example: `skip_blanks("a  b", 1)` returns 3.
    """
    match = _BLANKS(text, pos)
    return match.end() if match else pos


@lru_cache(maxsize=4096)
def compile_pattern(source: str) -> Pattern:
    r"""Compile a pattern.

    White space in the pattern, and each gap between `>` and `<`, match white space of any length.
    Example: `"<call>\n<f={name}>"` becomes the literal `<call>`, white space, the literal `<f=`,
    the field `name` and the literal `>`.
    """
    parts = pattern(source)
    steps: list[str | BlanksStep | FieldStep] = []
    for index, part in enumerate(parts):
        if isinstance(part, Slot):
            next_part = parts[index + 1] if index + 1 < len(parts) else ""
            next_literal = next_part if isinstance(next_part, str) else ""
            steps.append(FieldStep(part.field, _field_regex(part.field, next_literal)))
            continue
        for number, word in enumerate(_BLANKS_OR_TAG_GAP.split(part)):
            if number:
                steps.append(BlanksStep())
            if word:
                steps.append(word)
    return Pattern(tuple(steps))


def _field_regex(name: str, next_literal: str) -> re.Pattern[str]:
    """Return the regex of a field. The match ends before the next literal of the pattern.

    Example: in the pattern `{name}<sep>`, the regex of the name excludes `<`.
    """
    if name == "rest":
        stop = re.escape(next_literal.strip())
        return re.compile(f"(?:(?!{stop}).)*" if stop else ".*")
    stop_char = re.escape(next_literal[:1]) if next_literal[:1].strip() else ""
    return re.compile(f"{_FIELD_CLASSES[name]}{stop_char}]+")


def marker_parts(marker: str) -> tuple[str, ...]:
    r"""Split a marker into its parts.

    Example: `"</function>\n</tool_call>"` gives `("</function>", "</tool_call>")`.
    """
    return tuple(part for part in _MARKER_GAP.split(marker.strip()) if part)


def is_compound_start(marker: str, text: str) -> bool:
    """Return whether `text`, a prefix of `marker`, contains the whole first tag of `marker`.

    Example: for the marker `<|message|><|content|>`, the result is True for `<|message|><|con` and
    False for `<|mess`. The caller must check that `text` is a prefix of `marker`.
    """
    first_tag = _FIRST_TAG.match(marker)
    return first_tag is not None and first_tag.end() <= len(text) < len(marker)


def looks_like_markup(text: str) -> bool:
    r"""Return whether `text` starts like a marker or contains a tag. Ordinary prose rarely does.

    Examples: `"<tool_call>\n{"` and `"[TOOL_CALLS]"` look like markup, `"a < b"` does not.
    """
    return _MARKUP.search(text) is not None
