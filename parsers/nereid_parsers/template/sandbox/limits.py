"""The limits for an untrusted template, and the checks that enforce the limits.

A template is a program that runs in the thread of the caller, so no other thread can stop the
template. Therefore every loop item, function call, filter and output is counted against a `Budget`.
The compilation of a template also checks the time of the budget. Operations that would make a very
large value, such as `'x' * 10**9`, are rejected before they run.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.errors import TemplateError

MAX_SOURCE = 1_000_000  # the largest number of characters of a template
# The maximum length, in characters, of the Python code that jinja2 may generate from a template.
# Compiling code of this length takes up to 0.5 seconds, and cannot be interrupted.
MAX_CODE = 1_000_000
MAX_NUMBER = 10_000  # the largest length or width that an operation may demand
MAX_BITS = 4096  # the largest number of bits of an integer
_MAX_DEPTH = 100  # the largest number of levels of nested lists

_ITEM_SIZE = 16  # `size_of` adds this size for each value.
_STEPS_PER_CLOCK = 64  # The clock is slow, so only every 64th step reads the clock.
_REQUEST_SECONDS = 5.0
# For each character of a request (see `size_of`), these numbers are added to ANALYSIS_LIMITS.
_STEPS_PER_CHARACTER = 8
_TOTAL_SIZE_PER_CHARACTER = 64
_VALUE_SIZE_PER_CHARACTER = 8
_TOJSON_LINES = 3000  # an estimate of the number of lines and separators that `tojson` writes
_POWER_WEIGHT = 200  # With this weight, powers of more than about 1500 bits are too large.
_DEFAULT_INDENT = 4  # the number of spaces that the filter `indent` adds by default
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")  # In `{:{}}`, an argument gives the width.
_LONG_NUMBER = re.compile(r"\d{5,}")
_MAX_SHOWN_DIGITS = 12  # An error message shows at most this number of digits.


class LimitError(TemplateError):
    """A template exceeded a limit. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a `Budget`. They apply to the sum of all renderings that use the budget.

    Attributes:
        steps: The number of loop items, calls and filters.
        total_size: The total size of all values that the template makes, see `size_of`.
        value_size: The number of characters of one string, or the size of one list.
        seconds: The processor time of this thread, including the time of the compilation. The time
            of other programs does not count.
    """

    steps: int = 400_000
    total_size: int = 16_000_000
    value_size: int = 300_000
    seconds: float = 0.8


ANALYSIS_LIMITS = Limits()


def limits_for_request(variables: Mapping[str, Any]) -> Limits:
    """Return the limits for rendering one request. The limits grow with the size of the request.

    A template needs more steps and makes longer texts if the request is longer. `tojson` lengthens
    a text more than other operations: one character can become six characters. The class `Limits`
    explains each limit.

    Args:
        variables: The variables of the template, which contain the messages of the request.
    """
    size = size_of(dict(variables), max_size=sys.maxsize)
    return Limits(
        steps=ANALYSIS_LIMITS.steps + _STEPS_PER_CHARACTER * size,
        total_size=ANALYSIS_LIMITS.total_size + _TOTAL_SIZE_PER_CHARACTER * size,
        value_size=ANALYSIS_LIMITS.value_size + _VALUE_SIZE_PER_CHARACTER * size,
        seconds=_REQUEST_SECONDS,
    )


class Budget:
    """The numbers of steps, characters and seconds that a template may still use.

    A budget may be used by only one thread. The time starts when the budget is created. Example:
    with `Budget(Limits(steps=1))`, the second call of `step` raises a LimitError.
    """

    __slots__ = ("_deadline_s", "_num_time_checks", "_size_left", "_steps_left", "limits")

    def __init__(self, limits: Limits = ANALYSIS_LIMITS) -> None:
        """Create a budget with the given limits, and start to measure the time."""
        self.limits = limits
        self._steps_left = limits.steps
        self._size_left = limits.total_size
        self._num_time_checks = 0
        self._deadline_s = time.thread_time() + limits.seconds

    def check_time(self) -> None:
        """Raise LimitError if the time limit is exceeded. Only every 64th call reads the clock."""
        self._num_time_checks += 1
        is_clock_read = self._num_time_checks % _STEPS_PER_CLOCK == 0
        if is_clock_read and time.thread_time() > self._deadline_s:
            raise LimitError(
                f"the template takes more than {self.limits.seconds} seconds; it is too long or "
                "contains an endless loop"
            )

    def step(self, literal_size: int = 0) -> None:
        """Count one step of a rendering: a loop item, a function call or a filter.

        The count stops a template that never ends, because no other thread can stop it.

        Args:
            literal_size: The number of characters of the template's own text that this step may
                write. One loop item, for example, can write all text inside the loop.

        Raises:
            LimitError: The template runs for too long, or makes too much text.
        """
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitError(
                f"the template takes more than {self.limits.steps} steps; it may contain an "
                "endless loop"
            )
        self.check_time()
        self.add_size(literal_size)

    def add_size(self, size: int) -> None:
        """Add `size` to the total size of all texts and lists that the template has made.

        Raises:
            LimitError: The total is larger than `Limits.total_size`.
        """
        self._size_left -= size
        if self._size_left < 0:
            raise LimitError(
                "all renderings of the template together have more than "
                f"{self.limits.total_size} characters"
            )

    def check(self, value: Any) -> Any:  # noqa: ANN401  # a template may make any value
        """Check a value that the template made, add its size to the total, and return the value.

        Numbers and other small values have no size.

        Raises:
            LimitError: The value is too large, or the template makes too much text.
        """
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise LimitError(f"the template computes an integer with more than {MAX_BITS} bits")
        if isinstance(value, str | bytes):
            size = len(value)
        elif isinstance(value, list | tuple | dict | set):
            size = size_of(value, max_size=self.limits.value_size)
        else:
            return value
        self.check_size(size)
        self.add_size(size)
        return value

    def check_size(self, size: int) -> None:
        """Raise LimitError if `size`, the size of a value, exceeds the limit for one value."""
        _check_size(size, self.limits.value_size)

    # ---- operations that are rejected before they run --------------------------------------------

    def check_operator(self, operator: str, left: Any, right: Any) -> None:  # noqa: ANN401
        """Raise LimitError if the result of `left operator right` would be too large.

        The check precedes the operation, because the operation cannot be interrupted. Examples of
        rejected operations: `'x' * 10**9`, `2 ** 10**9` and `'%099999d' % 1`.
        """
        if operator == "*":  # The number may be on either side: `'x' * 3` or `3 * 'x'`.
            self._check_repetition(left, right)
            self._check_repetition(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() * abs(right)  # an upper bound for the bits of the result
            self.check_size(num_bits * _POWER_WEIGHT)
        elif operator == "%":
            check_format(left)
            if isinstance(right, tuple):  # A number of the tuple may be a width, as in `%*d`.
                check_numbers(right)

    def check_method(self, owner: Any, name: str, args: tuple[Any, ...]) -> None:  # noqa: ANN401
        """Raise LimitError if the result of the method call `owner.name(*args)` would be too large.

        The owner is a string or a number. Example: `text.replace("", "x" * 1000)` inserts 1000
        characters before each character of `text`.
        """
        check_numbers(args)
        match name:
            case "format" | "format_map":
                check_format(owner)
            case "replace" if len(args) > 1:
                self._check_replace(owner, args[0], args[1])
            case "join" if args:
                self._check_join(args[0], owner)
            case "expandtabs" if args:
                self.check_size(len(owner) * max(int(args[0]), 1))

    def check_filter(
        self,
        name: str,
        value: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Raise LimitError if the result of the filter `name` on `value` would be too large.

        Example: for `text | indent(9999)`, `name` is "indent" and `args` is (9999,). Filters that
        cannot lengthen a value by much are not checked.
        """
        options = [*args, *kwargs.values()]
        check_numbers(options)
        match name:
            case "replace" if len(args) > 1:
                self._check_replace(str(value), args[0], args[1])
            case "join":
                self._check_join(value, args[0] if args else "")
            case "format":
                check_format(value)
            case "tojson":
                self._check_tojson(options)
            case "indent" if isinstance(value, str):
                width = args[0] if args else kwargs.get("width")
                self._check_indent(value, width or _DEFAULT_INDENT)

    def _check_tojson(self, options: list[Any]) -> None:
        """Raise LimitError if the filter `tojson` would repeat a very long option.

        Options such as the indentation and the separators are written once for each line.
        """
        options_size = sum(_text_size(option) for option in options)
        self.check_size(options_size * _TOJSON_LINES)

    def _check_indent(self, text: str, width: Any) -> None:  # noqa: ANN401
        """Raise LimitError if `text | indent(width)` would be too large.

        Args:
            text: The text.
            width: The text before each line, or the number of spaces before each line.
        """
        indent_size = len(width) if isinstance(width, str) else int(width)
        self.check_size(text.count("\n") * indent_size)

    def _check_repetition(self, sequence: object, times: object) -> None:
        """Raise LimitError if `sequence * times` would be too large."""
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            self.check_size(len(sequence) * max(times, 0))

    def _check_replace(self, text: str, old: Any, new: Any) -> None:  # noqa: ANN401
        """Raise LimitError if `text.replace(old, new)` could be too large.

        An empty `old` matches before each character and at the end of the text.
        """
        old_size = max(len(str(old)), 1)
        max_replacements = len(text) // old_size + 1
        self.check_size(len(text) + max_replacements * len(str(new)))

    def _check_join(self, items: Any, separator: Any) -> None:  # noqa: ANN401
        """Raise LimitError if `separator.join(items)` would be too large."""
        if isinstance(items, list | tuple | str | dict):
            self.check_size(len(items) * (len(str(separator)) + 1))
            size_of(items, self.limits.value_size)  # raises LimitError if the items are too large


def _check_size(size: int, max_size: int) -> None:
    """Raise LimitError if `size`, the size of a value, is larger than `max_size`."""
    if size > max_size:
        raise LimitError(f"the template makes a value of size {size}, but the limit is {max_size}")


def size_of(value: object, max_size: int, depth: int = 0) -> int:
    """Return the approximate number of characters that a value of a template would have as text.

    A string counts as its length plus 16, and a list counts as the sum of its members plus 16. If a
    value contains the same list twice, this list counts twice, because a template would also write
    the list twice.

    >>> size_of("abc", max_size=100), size_of(["abc", "abc"], max_size=100)
    (19, 54)

    Args:
        value: The value.
        max_size: The largest size that is allowed.
        depth: The number of lists that contain the value.

    Raises:
        LimitError: The size is larger than `max_size`, or the lists are nested too deeply. The
            error is raised as soon as the limit is exceeded, because lists that contain each other
            several times could be enormous.
    """
    if isinstance(value, str):
        return len(value) + _ITEM_SIZE
    members: list[object]
    if isinstance(value, dict):
        members = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        members = list(value)
    else:  # a number, for example
        return _ITEM_SIZE
    if depth > _MAX_DEPTH:
        raise LimitError(f"the template nests lists more than {_MAX_DEPTH} levels deep")
    total = _ITEM_SIZE
    for member in members:
        total += size_of(member, max_size, depth + 1)
        _check_size(total, max_size)
    return total


def check_numbers(values: Iterable[object]) -> None:
    """Raise LimitError if one of the values is a number with an absolute value above MAX_NUMBER.

    The values are the arguments of an operation, which may use such a number as the length of a
    text. Example: `'%*d' % (99999, 1)` would write 99999 characters.
    """
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError(
                f"the template passes the number {value} to an operation. Such a number may be at "
                f"most {MAX_NUMBER}, because the operation may use it as the length of a text."
            )


def check_format(text: object) -> None:
    """Raise LimitError if a format string could write a very long text.

    A format string is rejected if it contains a number with five or more digits (`%099999d`,
    `{:>99999}`), or if an argument gives the width (`{:>{}}`). Any value may be passed, but only a
    string with `%` or `{` is a format string.
    """
    if not isinstance(text, str):
        return
    has_format_field = "%" in text or "{" in text
    if not has_format_field:
        return
    number = _LONG_NUMBER.search(text)
    if number is not None:
        shown_number = number.group()[:_MAX_SHOWN_DIGITS]
        raise LimitError(
            f"a format string of the template has the width {shown_number}, "
            f"but the limit is {MAX_NUMBER}"
        )
    if _NESTED_FIELD.search(text):
        raise LimitError(
            "a format string of the template gets its width from an argument, which is not allowed"
        )


def _text_size(value: object) -> int:
    """Return the number of characters in `value`, an option of the filter `tojson`."""
    if isinstance(value, list | tuple):
        return sum(_text_size(part) for part in value)
    return len(value) if isinstance(value, str) else 0
