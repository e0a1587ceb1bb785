"""Limits the length of the markers that a checkpoint declares or that its template writes."""

from __future__ import annotations

from collections.abc import Iterator
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
    for marker in _texts_in([asdict(fmt.layout), fmt.ends]):
        if len(marker) > _MAX_MARKER:
            raise LimitError(
                f"a marker has {len(marker)} characters, but the limit is {_MAX_MARKER}: "
                f"{marker[:_SHOWN_CHARS]!r}"
            )


def _texts_in(value: object) -> Iterator[str]:
    """Yield all strings in nested dicts, lists and tuples. The keys of the dicts are omitted.

    >>> list(_texts_in({"open": "<think>", "also_open": ("<a>", "<b>"), "is_shown": True}))
    ['<think>', '<a>', '<b>']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts_in(member)
