"""Check that the parser can read the names of functions and arguments in constrained output."""

from __future__ import annotations

import re

from nereid_parsers.errors import ConstraintError, shorten
from nereid_parsers.pattern_syntax import PatternField, split_pattern
from nereid_parsers.stream.bodies.python_calls import FUNCTION_NAME
from nereid_parsers.stream.pattern_matching import field_regex
from nereid_parsers.stream.values.python_strings import KEYWORD


def check_name_in_pattern(name: str, pattern: str, field: str) -> None:
    """Raise ConstraintError if the parser cannot read `name` in a header or in an opening tag.

    Example: in the header `<function={name}>`, the parser can read `get_weather`, but not `my tool`
    and `a>b`. `field` is "name" for the name of a function, and "key" for the name of an argument.
    """
    parts = split_pattern(pattern)
    for part, next_part in zip(parts, [*parts[1:], ""], strict=True):
        if part == PatternField(field):
            next_literal = next_part if isinstance(next_part, str) else ""
            _check(name, field_regex(field, next_literal), place=pattern)


def check_name_of_python_call(name: str) -> None:
    """Raise ConstraintError if the parser cannot read the name of a function in a Python call."""
    _check(name, re.compile(FUNCTION_NAME), place="f(a=1)")


def check_name_of_python_argument(name: str) -> None:
    """Raise ConstraintError if the parser cannot read the name of an argument in a Python call."""
    _check(name, re.compile(KEYWORD), place="f(a=1)")


def _check(name: str, regex: re.Pattern[str], place: str) -> None:
    """Raise ConstraintError unless `regex` matches the whole name.

    `place` is the form in which the model writes the name, for the error message.
    """
    if regex.fullmatch(name) is None:
        raise ConstraintError(
            f"tools: the name {shorten(name)} cannot be used in constrained output, because the "
            f"model writes tool calls in the form {place!r}, in which the end of this name cannot "
            "be found. Use letters, digits, '_' and '-' in the names of functions and arguments."
        )
