"""Converts the text of arguments to JSON text, and reads JSON text.

Example: if the schema of an argument allows an integer, the text `007` becomes the JSON text `7`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_FIRST_CHARS_OF_LITERALS = "[{(-+.0123456789'\""
_match_zero_padded_number = re.compile(r"([-]?)0+(\d+(?:\.\d+)?)").fullmatch
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_type_of(value: object) -> str:
    """Return the JSON type of a value that `json.loads` returned.

    Example: `json_type_of(None)` returns `"null"`.
    """
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def loads(text: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Parse JSON text. Strings may contain unescaped control characters.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("The JSON text has too many nested arrays or objects") from error


def escape_surrogates(text: str) -> str:
    r"""Write each half of a surrogate pair in `text` as a JSON escape sequence, such as `\ud83d`.

    No encoding can represent half of a surrogate pair, so that the text could not be sent.
    """
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def to_json_text(value: object) -> str:
    """Convert a value to JSON text. Raise ValueError for NaN and Infinity."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def to_json(text: str, types: frozenset[str] | None) -> str:
    """Convert an argument's text to JSON text. If possible, the result has one of the `types`.

    Text that is neither JSON nor a Python literal becomes a JSON string. Examples:

        text      types        result
        `12`      integer      `12`
        `12`      string       `"12"`
        `007`     integer      `7`, because JSON allows no leading zeros
        `True`    boolean      `true`, because Python literals are accepted
        `Paris`   not known    `"Paris"`

    `types` are the JSON types that the schema allows, or None if they are not known.
    """
    literal_text = text.strip()
    may_be_string = types is None or "string" in types
    if not may_be_string:  # If a string is allowed, "007" keeps its zeros.
        literal_text = without_leading_zeros(literal_text)
    literal = _parse_literal(literal_text)  # A JSON value or a Python literal, or None.
    if literal is None or _becomes_string(literal.json_type, types):
        return json.dumps(text, ensure_ascii=False)
    return literal.json_text


def without_leading_zeros(text: str) -> str:
    """Remove leading zeros, which JSON does not allow, from a number. Return other text unchanged.

    Examples: `"007"` gives `"7"`, `"-05.5"` gives `"-5.5"`, and `"0"` and `"0x1"` stay unchanged.
    """
    match = _match_zero_padded_number(text)
    return match.group(1) + match.group(2) if match else text


class _Literal(NamedTuple):
    """The JSON type of a value, such as "integer", and its JSON text, such as `12`."""

    json_type: str
    json_text: str


def _becomes_string(json_type: str, types: frozenset[str] | None) -> bool:
    r"""Return whether a value must be written as a JSON string, for example `12` as `"12"`.

    The model wrote the value between two tags, as in `<p=days>12</p>`. Examples:

        value    allowed types         result
        `"x"`    not known, or string  True, because models write strings between tags without
                                       quotes, so these quotes belong to the string: `"\"x\""`
        `"x"`    number                False
        `12`     not known, or number  False, because `12` already has an allowed type
        `12`     string                True
        `12`     array                 True, see `_may_be_ordinary_text`

    `json_type` is the JSON type of the value, for example "integer".
    """
    allows_string = types is None or "string" in types
    if json_type == "string":
        return allows_string
    if types is None or _fits(json_type, types):
        return False
    return allows_string or _may_be_ordinary_text(json_type, types)


def _fits(json_type: str, types: frozenset[str]) -> bool:
    """Return whether a value of the type `json_type` is valid. Each integer is also a number."""
    return json_type in types or (json_type == "integer" and "number" in types)


def _may_be_ordinary_text(json_type: str, types: frozenset[str]) -> bool:
    """Return whether a value of the type `json_type` may be ordinary text, which becomes a string.

    The allowed `types` contain neither `json_type` nor "string". Therefore, the argument is not
    valid in either case, and the more probable meaning of the value decides. Examples:

        value                  allowed types   result
        `null`, `[1]`, `{}`    integer         False, because ordinary text rarely has this form
        `1.5`                  integer         False, because the model probably meant a number
        `true`                 integer         True
        `1.5`, `12`, `true`    array           True, because the model did not write an array
    """
    if json_type in ("null", "array", "object"):
        return False
    is_meant_as_integer = json_type == "number" and "integer" in types
    return not is_meant_as_integer


def _parse_literal(text: str) -> _Literal | None:
    """Parse a JSON value or a Python literal. Return None if `text` is neither.

    Examples: `"True"` gives the type "boolean" and the text `true`. `"{'a': 1}"` gives the type
    "object" and the text `{"a": 1}`. `"Paris"` and `"NaN"` give None.
    """
    json_text = _JSON_WORDS.get(text, text)
    try:
        return _Literal(json_type_of(_loads_strictly(json_text)), json_text)
    except ValueError:
        return _parse_inexact_json(json_text) or _parse_python_literal(text)


def _loads_strictly(text: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Parse JSON text. Raise ValueError for NaN, Infinity and unescaped control characters."""

    def refuse(word: str) -> None:
        """Raise ValueError for `word`, such as NaN, which Python accepts but JSON does not."""
        raise ValueError(f"JSON does not allow {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("The JSON text has too many nested arrays or objects") from error


def _parse_inexact_json(text: str) -> _Literal | None:
    r"""Parse JSON text with unescaped control characters in strings, and escape these characters.

    Return None if the text has other errors. Example: `["a<line break>"]` gives `["a\n"]`.
    """
    try:
        value = loads(text)
        return _Literal(json_type_of(value), to_json_text(value))
    except ValueError:
        return None


def _parse_python_literal(text: str) -> _Literal | None:
    """Parse a Python literal, such as `{'a': 1}`. Return None if `text` is not a literal.

    Also return None if JSON cannot represent the value. Example: the set `{1}` gives None.
    """
    if not text or text[0] not in _FIRST_CHARS_OF_LITERALS:
        return None
    try:
        value = _evaluate_literal(text)
        json_text = to_json_text(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return _Literal(json_type_of(value), json_text)


def _evaluate_literal(text: str) -> object:
    """Return the value of a Python literal. Raise ValueError if `text` is not a literal."""
    # Python warns about invalid escape sequences. The model wrote the text, so the warnings are of
    # no use to the operator of the server.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.literal_eval(text)
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError("The text is not a Python literal") from error
