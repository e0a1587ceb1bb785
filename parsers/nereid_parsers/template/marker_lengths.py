"""Limits the length of the markers that a checkpoint declares or that its template writes."""

from __future__ import annotations

from dataclasses import asdict

from nereid_parsers.format import Format
from nereid_parsers.template.sandbox.limits import LimitError

_MAX_MARKER = 1000  # the largest number of characters of a marker, such as `<think>`
_SHOWN_CHARS = 60  # the number of characters of a longer marker that the error message shows


def check_marker_lengths(fmt: Format) -> None:
    """Raise LimitError if a marker of `fmt`, such as `<think>`, is too long.

    The parser compiles the markers to regular expressions, which takes very long for a long text.
    The texts that open the model's turn (`Format.turn`) are not compiled, so they may be longer.
    """
    _check_lengths((asdict(fmt.layout), fmt.ends))


def _check_lengths(value: object) -> None:
    """Raise LimitError if `value` is a text that is too long, or contains such a text.

    >>> _check_lengths({"open": "<think>", "also_open": ("<a>",)})
    """
    if isinstance(value, str) and len(value) > _MAX_MARKER:
        raise LimitError(
            f"a marker has {len(value)} characters, but the limit is {_MAX_MARKER}: "
            f"{value[:_SHOWN_CHARS]!r}"
        )
    if isinstance(value, dict | list | tuple):
        for member in value.values() if isinstance(value, dict) else value:
            _check_lengths(member)
