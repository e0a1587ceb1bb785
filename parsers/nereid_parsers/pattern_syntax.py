r"""The syntax of patterns: literal text with fields, for example `"<function={name}>\n"`.

The fields are:

    {name}      the name of the function
    {key}       the name of an argument
    {id}        the id of the tool call
    {number}    digits
    {string}    "true" if the value is a string, otherwise "false"
    {type}      the JSON type of the value
    {word}      any single word
    {rest}      any text before the next literal of the pattern

A field ends where the next literal begins. Literal braces are written `{{` and `}}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereid_parsers.errors import FormatError

FIELDS = frozenset({"name", "key", "id", "number", "string", "type", "word", "rest"})
# Matches a doubled brace, a field such as `{name}`, or a single brace, which is an error.
_FIELD_OR_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class PatternField:
    """A field of a pattern. `PatternField("name")` represents `{name}`."""

    field: str


def split_pattern(text: str) -> tuple[str | PatternField, ...]:
    """Split a pattern into literals and fields.

    Example: `split_pattern("<f={name}>{{}}")` returns `("<f=", PatternField("name"), ">{}")`.

    Raises:
        FormatError: A field is unknown, a brace is not closed, or no literal separates two fields.
    """
    parts: list[str | PatternField] = []
    literal_start = 0
    for match in _FIELD_OR_BRACES.finditer(text):
        _append_literal(parts, text[literal_start : match.start()])
        literal_start = match.end()
        if match.group() == "{{":
            _append_literal(parts, "{")
        elif match.group() == "}}":
            _append_literal(parts, "}")
        else:
            follows_field = bool(parts) and isinstance(parts[-1], PatternField)
            parts.append(_field(text, match, follows_field=follows_field))
    _append_literal(parts, text[literal_start:])
    return tuple(parts)


def first_literal(text: str) -> str:
    """Return the literal at the start of a pattern, without surrounding white space.

    Return "" if the pattern is empty or starts with a field. Example: the pattern
    `"<function={name}>"` gives `"<function="`.
    """
    first_part = next(iter(split_pattern(text)), "")
    return first_part.strip() if isinstance(first_part, str) else ""


def _field(text: str, match: re.Match[str], *, follows_field: bool) -> PatternField:
    """Convert the regex match of a field such as `{name}` to a `PatternField`.

    Example: a match of `{name}` gives `PatternField("name")`.

    Args:
        text: The whole pattern, for use in error messages.
        match: The match of `_FIELD_OR_BRACES`. Its first group is the name inside the braces.
        follows_field: Whether another field directly precedes this field. Only the field {rest} may
            directly follow another field.

    Raises:
        FormatError: The field is unknown, or follows another field without text between them.
    """
    name = match.group(1)
    if name not in FIELDS:
        fields = ", ".join(f"{{{field}}}" for field in sorted(FIELDS))
        raise FormatError(
            f"The pattern {text!r} contains {match.group()!r}, which is not a field. The "
            f"fields are {fields}. Write literal braces as {{{{ and }}}}."
        )
    if follows_field and name != "rest":
        raise FormatError(
            f"The pattern {text!r} has two fields without text between them, so the end "
            "of the first field is not defined. Insert text between the two fields."
        )
    return PatternField(name)


def _append_literal(parts: list[str | PatternField], text: str) -> None:
    """Append a literal to `parts`. If the last part is a literal too, join the two literals."""
    if not text:
        return
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    else:
        parts.append(text)


def check_pattern(place: str, text: str, *required: str) -> None:
    """Raise FormatError if `text` does not contain each required field exactly once.

    Args:
        place: The name of the attribute that declares the pattern, for example "Route.header".
        text: The pattern.
        required: The names of the fields that the pattern must contain.
    """
    fields = [part.field for part in split_pattern(text) if isinstance(part, PatternField)]
    for name in required:
        if fields.count(name) != 1:
            raise FormatError(f"{place} is {text!r}, but must contain {{{name}}} exactly once")


def check_markers(part: str, **markers: str) -> None:
    """Raise FormatError if one of the markers is empty or contains only white space.

    Args:
        part: The name of the class that declares the markers, for the error message.
        markers: The markers. The keys are the names of the attributes that declare them.
    """
    for name, marker in markers.items():
        if not marker.strip():
            raise FormatError(
                f"{part}.{name} is {marker!r}, but a marker must contain a visible character"
            )
