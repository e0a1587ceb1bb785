"""Repairs a JSON object that a model has written with errors, such as `{'a': True}`."""

from __future__ import annotations

import json
import logging

from nereid_parsers.stream.status import DONE
from nereid_parsers.stream.values.json_text import escape_surrogates, loads
from nereid_parsers.stream.values.python_literals import LiteralReader
from nereid_parsers.stream.values.python_strings import PYTHON

log = logging.getLogger(__name__)


def is_json_object(text: str) -> bool:
    """Return whether `text` is a valid JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def repair_json_object(text: str) -> str | None:
    r"""Repair a JSON object that is not valid. Return None if the text cannot be repaired.

    Three repairs are tried in this order, and the first that succeeds gives the result:

        text                    result         error in the text
        `{"a": "<line break>"}`  `{"a": "\n"}`   a control character in a string
        `{'a': True}`            `{"a": true}`   the syntax of Python
        `{"a": [1`               `{"a": [1]}`    the end is missing
    """
    if not text.lstrip().startswith("{"):
        return None
    for repair in (_escape_control_characters, _convert_python_literal, _complete_object):
        repaired = repair(text)
        if repaired is not None:
            return repaired
    return None


def _escape_control_characters(text: str) -> str | None:
    r"""Escape the control characters in JSON strings. Return None if `text` has other errors.

    Example: `{"a": "<line break>"}` gives `{"a": "\n"}`.
    """
    try:
        return escape_surrogates(json.dumps(loads(text), ensure_ascii=False))
    except ValueError:
        return None


def _convert_python_literal(text: str) -> str | None:
    """Convert a Python literal to JSON text. Return None if `text` is not a Python literal.

    Example: `{'a': True,}` gives `{"a": true}`.
    """
    reader = LiteralReader(PYTHON)
    end = reader.read(text, 0, is_final=True)
    is_complete = reader.status is DONE and not text[end:].strip()
    return reader.take_json() if is_complete else None


def _complete_object(text: str) -> str | None:
    """Complete a JSON object whose end is missing. Return None if `text` has other errors.

    Example: `{"a": [1` gives `{"a": [1]}`.
    """
    # Most messages need no repair, so partial_json_parser is imported only when this function is
    # called.
    from partial_json_parser import loads as loads_partial

    try:
        value = loads_partial(text)
    except Exception as error:  # noqa: BLE001  # the library has no base class for its exceptions
        log.debug("partial-json-parser: %s", error)
        return None
    if not isinstance(value, dict):
        return None
    return escape_surrogates(json.dumps(value, ensure_ascii=False))
