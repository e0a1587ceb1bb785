"""Matches patterns of literals and fields against a text that may still grow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from nereid_parsers.pattern_syntax import Slot, pattern

# Results of functions that otherwise return the position after a match:
NEED_MORE = -1  # The text ends too early to decide. More text could complete the match.
NO_MATCH = -2  # The text does not match, whatever follows.

# The longest head of a call, in characters. Longer text is not a head.
MAX_HEAD_CHARS = 2048

_FIRST_TAG = re.compile(r"<\|[^<>|]+\|>|<[^<>\s]+>")
_MARKUP = re.compile(r"\A\s*[<\[◁]\S{2}|<[^<>\s]{2,}>")
_BLANKS = re.compile(r"\s*").match
# White space, and the places between two tags where white space may occur.
_BLANKS_OR_TAG_GAP = re.compile(r"\s+|(?<=>)(?=<)")
_MARKER_GAP = re.compile(r"\s+|(?<=>)(?=<)|(?<=```)(?=<)")
_NO_NAME_CHARS = r"""\s<>{}\[\]()"'`|=,;"""
# The start of the character class for each field. `_field_regex` adds the end of the class.
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
    """A field of a compiled pattern: its name, and the regex of its text."""

    name: str
    regex: re.Pattern[str]

    def match(self, text: str, pos: int, is_final: bool, fields: dict[str, str]) -> int:
        """Match the field at `pos`, store its text in `fields`, and return the end of the match.

        Example: the field `name` matches `sum` in `"sum>"`. In `"sum"`, it returns NEED_MORE,
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
            return NO_MATCH  # A name that occurs twice must be the same both times.
        fields[self.name] = value
        return end


class BlanksStep:
    """White space of any length in a compiled pattern."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. A step is a literal, white space or a field."""

    steps: tuple[str | BlanksStep | FieldStep, ...]

    def match(self, text: str, pos: int, is_final: bool, fields: dict[str, str]) -> int:
        """Match the pattern at `pos` and return the end of the match, NEED_MORE or NO_MATCH.

        Example: the pattern `<f={name}>` matches `"<f=sum>{"` with the end 7 and stores
        `{"name": "sum"}`. It returns NEED_MORE for `"<f=su"`.

        Args:
            text: The text.
            pos: The position of the match.
            is_final: Whether no more text follows.
            fields: The dict in which the values of the fields are stored.
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
    """Return the first position from `pos` on that is not white space."""
    match = _BLANKS(text, pos)
    return match.end() if match else pos


@lru_cache(maxsize=4096)
def compile_pattern(source: str) -> Pattern:
    r"""Compile a pattern. Its white space, and each gap between `>` and `<`, match any white space.

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
    """Return the regex for a field, which ends where the next literal of the pattern begins.

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
    """Return whether `text` is a prefix of `marker` that contains the whole first tag.

    Example: `<|message|><|con` is such a prefix of `<|message|><|content|>`, `<|mess` is not. The
    caller has checked that `text` is a prefix of `marker`.
    """
    first_tag = _FIRST_TAG.match(marker)
    return first_tag is not None and first_tag.end() <= len(text) < len(marker)


def looks_like_markup(text: str) -> bool:
    r"""Return whether `text` starts like a marker or contains a tag, as prose rarely does.

    Examples: `"<tool_call>\n{"` and `"[TOOL_CALLS]"` look like markup, `"a < b"` does not.
    """
    return _MARKUP.search(text) is not None
