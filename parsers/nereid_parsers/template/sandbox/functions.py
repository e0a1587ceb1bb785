"""The functions and types that the sandbox adds to chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
from jinja2.utils import Namespace

# The maximum length, in characters, of an error message that a template passes to
# `raise_exception`.
_MAX_RAISED_MESSAGE = 500


class SafeNamespace(Namespace):
    """A Jinja namespace that rejects attributes whose names start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        """Set an attribute. Raise SecurityError if the name of the attribute starts with "_"."""
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a name in a namespace must not start with an underscore, but {name!r} does"
            )
        super().__setitem__(name, value)


def tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    *,
    default: Callable[[Any], Any] = list,
) -> str:
    """Return `value` as JSON text without HTML escapes. Example: `tojson(["<"])` returns `["<"]`.

    Templates use this function as the filter `tojson`. Unlike the filter `tojson` of transformers,
    this function accepts iterators, such as the result of the filter `map`. An iterator is written
    as a list, because some templates depend on it. The function `default` converts the iterator to
    a list. The other arguments are those of `json.dumps`.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=default,
    )


def raise_exception(message: object) -> NoReturn:
    """Raise an error with the given message. Templates call this function to reject a request."""
    raise jinja2.exceptions.TemplateError(str(message)[:_MAX_RAISED_MESSAGE])


class CountedItems:
    """A sequence that counts each item when a loop of a template reads the item.

    Unlike an iterator, the sequence has a length, which jinja2 needs for `loop.length`.
    """

    def __init__(self, items: Any, count: Callable[[Iterable[Any]], Iterator[Any]]) -> None:  # noqa: ANN401
        """Create a sequence of `items`.

        Args:
            items: A list or another collection with a length.
            count: A generator function that yields the items passed to it, and counts each item.
        """
        self._items = items
        self._count = count

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items, and count each item."""
        return self._count(self._items)
