"""Parses the JSON object in the body of a request, and explains each kind of syntax error."""

import json
import math
import sys
from typing import Any, NoReturn

from nereid_client.errors import ApiError

NESTED_TOO_DEEPLY = (
    "The JSON of the request body is nested too deeply. Send a body with less nesting."
)
_FIRST_INEXACT_FLOAT = 2**53
_JSON_TYPES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse a request body, and return its JSON object. The parsing blocks the event loop.

    A field with a whole number has the type int, even if the JSON text has a decimal point. Numbers
    inside lists and objects are not changed.

    Example: the body b'{"max_tokens": 5.0}' returns {"max_tokens": 5}.

    Raises: ApiError 400 that describes the problem and, for a syntax error, its line and column.
    """
    body = _parse_json(raw)
    if not isinstance(body, dict):
        raise ApiError(
            400, f"The request body must be a JSON object, but it is {_JSON_TYPES[type(body)]}"
        )
    return {name: _without_decimal_point(value) for name, value in body.items()}


def _without_decimal_point(value: object) -> object:
    """Convert a float such as 5.0 to an int. Return all other values unchanged.

    Some languages and libraries, such as Gson for Java, have only one type for the numbers of a
    JSON text, and write 5 as 5.0. Floats from 2**53 are not converted, because they are not exact.
    """
    if type(value) is float and value.is_integer() and abs(value) < _FIRST_INEXACT_FLOAT:
        return int(value)
    return value


def _parse_json(raw: bytes) -> object:
    """Parse a request body as JSON, and return the value, which can have any type.

    Raises: ApiError 400 that describes why the body is not valid.
    """
    try:
        return json.loads(raw, parse_constant=_reject_constant, parse_float=_finite_float)
    except RecursionError:
        problem = NESTED_TOO_DEEPLY
    except ValueError as error:
        problem = _describe_json_error(error, raw)
    raise ApiError(400, problem)


def _describe_json_error(error: ValueError, raw: bytes) -> str:
    """Return the error message for a request body that is not valid JSON.

    Example: for the body b'{"a": }', the result is "The request body is not valid JSON at line 1,
    column 7: Expecting value".

    Args:
        error: the error that `json.loads` has raised for the body.
        raw: the body.
    """
    if isinstance(error, UnicodeDecodeError):
        return (
            "The request body must be JSON in UTF-8, but it is not valid UTF-8 at byte "
            f"{error.start}"
        )
    if isinstance(error, json.JSONDecodeError):
        if not raw.strip():
            return "The request body must be a JSON object, but it is empty"
        place = f"line {error.lineno}, column {error.colno}"
        return f"The request body is not valid JSON at {place}: {error.msg}"
    # All other errors are about a number. Python itself raises the error about an integer with
    # thousands of digits. The message of this error names a Python function, so it is replaced.
    # A `parse_int` hook could raise a better error, but it would slow down lists of token ids.
    is_about_long_integer = "digits" in str(error)
    if is_about_long_integer:
        limit = sys.get_int_max_str_digits()
        return f"The request body has an invalid number: an integer has more than {limit} digits"
    return f"The request body has an invalid number: {error}"


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's parser accepts although they are not valid JSON."""
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    """Convert the text of a JSON number to a float. Raise ValueError if the number is too large.

    Example: Python would convert "1e999" to infinity, so this number is too large.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number
