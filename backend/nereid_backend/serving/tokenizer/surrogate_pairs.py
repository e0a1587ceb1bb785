# SPDX-License-Identifier: Apache-2.0
r"""Finds and refuses JSON texts that contain half of a surrogate pair.

In JSON, an escaped character whose code is greater than 65,535 is a surrogate pair: two escape
sequences. Example: an emoji is "\ud83d\ude00". Half of a pair, such as "\ud800", is not a valid
character, and cannot be encoded in UTF-8.
"""

import json
import re

from nereid_backend.errors import RequestError

# Matches the beginning of an escape sequence such as \ud83d.
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def refuse_surrogates(field: str, text: str, value: object) -> None:
    """Raise a RequestError if the JSON value `value` contains half of a surrogate pair.

    Args:
        field: the name of the tensor or field, for the error message.
        text: the JSON text of `value`.
        value: the parsed text.

    Raises:
        RequestError: the value contains half of a surrogate pair.
        RecursionError: the value is nested too deeply.
    """
    if has_surrogates(text, value):
        raise RequestError(
            f"{field}: a text contains half of a surrogate pair, which is not a valid character."
        )


def has_surrogates(text: str, value: object) -> bool:
    """Return whether the JSON value `value` contains half of a surrogate pair.

    The arguments are those of `refuse_surrogates`.

    Raises:
        RecursionError: the value is nested too deeply.
    """
    if not _ESCAPED_SURROGATE.search(text):
        return False  # This search is faster than the encoding below.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
