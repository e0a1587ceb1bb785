"""The functions and types that the sandbox adds to chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
from jinja2.utils import Namespace

# The maximum length, in characters, of the error message when a template raises an error.
_MAX_RAISED_MESSAGE = 500


class SafeNamespace(Namespace):
    """A Jinja namespace that rejects attributes whose names start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        """Set an attribute. Raise SecurityError if its name starts with an underscore."""
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
) -> str:
    """Return `value` as JSON text without HTML escapes. Example: `tojson(["<"])` returns `["<"]`.

    This function is the filter `tojson` of a template. It has the same arguments as in
    transformers. Unlike transformers, it also accepts the iterators that filters such as `map`
    return, and writes the iterators as lists. Other template engines also do so, and some templates
    depend on this behaviour.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,
    )


def raise_exception(message: object) -> NoReturn:
    """Raise an error with the given message, because the template called `raise_exception`."""
    raise jinja2.exceptions.TemplateError(str(message)[:_MAX_RAISED_MESSAGE])


class CountedItems:
    """A sequence whose items are counted when a loop reads them.

    The sequence has a length, because the loop variable `loop.last` needs the length.
    """

    def __init__(self, items: Any, count: Callable[[Iterable[Any]], Iterator[Any]]) -> None:  # noqa: ANN401
        """Wrap `items`. The function `count` yields the items, and counts each of them."""
        self._items = items
        self._count = count

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items, and count each item."""
        return self._count(self._items)
