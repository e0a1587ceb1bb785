"""Parses the JSON object in the body of a request, and explains each kind of syntax error."""

import json
import math
import sys
from typing import Any, NoReturn

from nereid_client.errors import ApiError

NESTED_TOO_DEEPLY = (
    "The JSON of the request body is nested too deeply. Send a body with less nesting."
)
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

    Raises: ApiError 400 that describes the problem and, for a syntax error, its line and column.
    """
    body = _parse(raw)
    if not isinstance(body, dict):
        raise ApiError(
            400, f"The request body must be a JSON object, but it is {_JSON_TYPES[type(body)]}"
        )
    return body


def _parse(raw: bytes) -> object:
    """Parse the JSON value in a body."""
    try:
        return json.loads(raw, parse_constant=_reject_constant, parse_float=_finite_float)
    except json.JSONDecodeError as error:
        if not raw.strip():
            raise ApiError(400, "The request body must be a JSON object, but it is empty") from None
        place = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"The request body is not valid JSON at {place}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ApiError(
            400,
            "The request body must be JSON in UTF-8, but it is not valid UTF-8 at byte "
            f"{error.start}",
        ) from None
    except RecursionError:
        raise ApiError(400, NESTED_TOO_DEEPLY) from None
    except ValueError as error:
        # The number is NaN, infinite, too large for a float, or an integer with thousands of
        # digits. Python's message about such an integer names a Python function.
        reason = str(error)
        if "digits" in reason:
            reason = f"an integer has more than {sys.get_int_max_str_digits()} digits"
        raise ApiError(400, f"The request body has an invalid number: {reason}") from None


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
