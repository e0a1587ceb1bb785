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
# Matches a doubled brace, a field such as `{name}`, text without braces, or a single brace.
_TOKENS = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+|[{}]")
_LITERAL_BRACES = {"{{": "{", "}}": "}"}


@dataclass(frozen=True, slots=True)
class PatternField:
    """A field of a pattern. `PatternField("name")` represents `{name}`."""

    field: str


def split_pattern(text: str) -> tuple[str | PatternField, ...]:
    """Split a pattern, such as `<f={name}>`, into fields (`{name}`) and the text around the fields.

    In this text, `{{` and `}}` become `{` and `}`. Example: `split_pattern("<f={name}>{{}}")`
    returns `("<f=", PatternField("name"), ">{}")`.

    Raises:
        FormatError: A field is unknown, a brace is not closed, or no literal separates two fields.
    """
    parts: list[str | PatternField] = []
    for token in _TOKENS.findall(text):  # Tokens of the example: `<f=`, `{name}`, `>`, `{{`, `}}`.
        if token in _LITERAL_BRACES:
            _append_literal(parts, _LITERAL_BRACES[token])  # `{{` means `{`.
        elif token.startswith(("{", "}")):
            _append_field(parts, token, text)  # Raises FormatError for a single brace: `a}b`.
        else:
            _append_literal(parts, token)
    return tuple(parts)


def _append_literal(parts: list[str | PatternField], literal: str) -> None:
    """Append text to the parts of a pattern. Adjacent texts are joined to one part.

    Example: if the last of `parts` is `<f>`, the literal `{` changes this part to `<f>{`.
    """
    last_part = parts[-1] if parts else None
    if isinstance(last_part, str):
        parts[-1] = last_part + literal
    else:
        parts.append(literal)


def _append_field(parts: list[str | PatternField], token: str, pattern: str) -> None:
    """Append a field, such as `{name}`, to the parts of a pattern.

    `token` is the text of the field. `pattern` is the whole pattern, for the error message.

    Raises:
        FormatError: The field is unknown, or it follows directly after another field.
    """
    field = _field(token, pattern)
    follows_field = bool(parts) and isinstance(parts[-1], PatternField)
    # Two fields need text between them, because this text shows where the first field ends. The
    # field {rest} is the exception. It starts at the first character that the field before {rest}
    # cannot contain.
    if follows_field and field != PatternField("rest"):
        raise FormatError(
            f"The pattern {pattern!r} has two fields without text between them, so the end "
            "of the first field is not defined. Insert text between the two fields."
        )
    parts.append(field)


def escape_braces(text: str) -> str:
    """Double each brace in `text`, because single braces enclose the fields of a pattern: `{name}`.

    >>> escape_braces("f{x}")
    'f{{x}}'
    """
    return text.replace("{", "{{").replace("}", "}}")


def first_literal(text: str) -> str:
    """Return the text before the first field of a pattern, for example `<f=` for `<f={name}>`.

    White space around the text is omitted. Return "" if the pattern is empty or starts with a
    field. If the pattern has no field, the text is the whole pattern. Example: the pattern
    `"<function={name}>"` gives `"<function="`.
    """
    first_part = next(iter(split_pattern(text)), "")
    return first_part.strip() if isinstance(first_part, str) else ""


def _field(token: str, pattern: str) -> PatternField:
    """Convert the text of a field to a `PatternField`. Example: `{name}` gives the field "name".

    Raises:
        FormatError: The field is unknown, or `token` is a single brace, as in the pattern `a}b`.
    """
    name = token.strip("{}")
    if name not in FIELDS:
        fields = ", ".join(f"{{{field}}}" for field in sorted(FIELDS))
        raise FormatError(
            f"The pattern {pattern!r} contains {token!r}, which is not a field. The "
            f"fields are {fields}. Write literal braces as {{{{ and }}}}."
        )
    return PatternField(name)


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
