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

_ITEM_SIZE = 16  # the size that `size_of` adds for each value
_CHECKS_PER_CLOCK_READ = 64  # Reading the clock is slow, so only every 64th time check reads it.
_REQUEST_SECONDS = 5.0
# For each character of a request, these numbers are added to the limits in ANALYSIS_LIMITS.
_STEPS_PER_CHARACTER = 8
_TOTAL_SIZE_PER_CHARACTER = 64
_VALUE_SIZE_PER_CHARACTER = 8
_TOJSON_LINES = 3000  # an estimate of the number of lines and separators that `tojson` writes
# Each bit of a power counts as 200 characters. So an analysis, in which a value may have 300_000
# characters, rejects powers of more than 1500 bits.
_CHARACTERS_PER_BIT_OF_POWER = 200
_DEFAULT_INDENT = 4  # the number of spaces that the filter `indent` adds by default
# Matches a field of a format string whose width is given by an argument, as in `{:{}}`.
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")
_LONG_NUMBER = re.compile(r"\d{5,}")
_MAX_SHOWN_DIGITS = 12  # the largest number of digits in an error message


class LimitError(TemplateError):
    """A template exceeded a limit. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for all renderings of a template that use one `Budget`.

    Attributes:
        steps: The largest number of loop items, function calls and filters in all renderings.
        total_size: The largest total size of all values that the renderings make, see `size_of`.
        value_size: The largest number of characters of one string, or the largest size of one list.
        seconds: The longest processor time of the thread. This time includes the compilation of the
            template, but not the time of other threads and programs.
    """

    steps: int = 400_000
    total_size: int = 16_000_000
    value_size: int = 300_000
    seconds: float = 0.8


ANALYSIS_LIMITS = Limits()


def limits_for_request(variables: Mapping[str, Any]) -> Limits:
    """Return the limits for rendering one request. The limits grow with the size of the request.

    If a request is longer, a template needs more steps and makes longer texts. The limit for one
    value grows by 8 characters for each character of the request, because the filter `tojson` can
    convert one character to an escape of six characters.

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
    """The numbers of steps, characters and seconds that the renderings of a template may still use.

    The time is measured from the creation of the budget, in the thread that creates the budget. No
    other thread may use the budget. Example: with `Budget(Limits(steps=1))`, the second call of
    `step` raises a LimitError.
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
        reads_clock = self._num_time_checks % _CHECKS_PER_CLOCK_READ == 0
        if reads_clock and time.thread_time() > self._deadline_s:
            raise LimitError(
                f"the template takes more than {self.limits.seconds} seconds; it is too long or "
                "contains an endless loop"
            )

    def step(self, literal_size: int = 0) -> None:
        """Count one step of a rendering: a loop item, a function call or a filter.

        The number of steps is limited, because a template can contain an endless loop, and no other
        thread can stop this loop.

        Args:
            literal_size: The largest number of characters of literal text that this step can write.
                Literal text is text of the template itself, such as "Hi" in `Hi {{ name }}`.

        Raises:
            LimitError: The steps exceed the limit on their number, on the time or on the total
                size.
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
        """Add `size` to the total size of the texts and lists that all renderings have made.

        Raises:
            LimitError: The total size is larger than `Limits.total_size`.
        """
        self._size_left -= size
        if self._size_left < 0:
            raise LimitError(
                "all renderings of the template together have more than "
                f"{self.limits.total_size} characters"
            )

    def check(self, value: Any) -> Any:  # noqa: ANN401  # a template may make any value
        """Check the size of a value that the template has made, and return the value unchanged.

        The size is also added to the total size of all values. A number has no size, but its number
        of bits is limited.

        Raises:
            LimitError: The value is larger than the limit for one value, or the total size of all
                values exceeds its limit.
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
        """Raise LimitError if the size of a value exceeds the limit for one value."""
        _check_size(size, self.limits.value_size)

    # ---- operations that are rejected before they run --------------------------------------------

    def check_operator(self, operator: str, left: Any, right: Any) -> None:  # noqa: ANN401
        """Raise LimitError if the result of `left operator right` would be too large.

        The template has not yet run the operation, because a running operation cannot be stopped.
        Examples of rejected operations: `'x' * 10**9`, `2 ** 10**9` and `'%099999d' % 1`.
        """
        if operator == "*":  # The string may be on either side: `'x' * 3` or `3 * 'x'`.
            self._check_repetition(left, right)
            self._check_repetition(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_power(left, right)
        elif operator == "%":  # The left side may be a format string, as in `'%5d' % 1`.
            check_format(left)
            if isinstance(right, tuple):  # A number of the tuple may be a width, as in `%*d`.
                check_numbers(right)

    def check_method(self, owner: Any, name: str, args: tuple[Any, ...]) -> None:  # noqa: ANN401
        """Raise LimitError if the result of the method call `owner.name(*args)` would be too large.

        Example: in `text.replace("", "x" * 1000)`, which inserts 1000 characters before each
        character, `owner` is the value of `text`, and `name` is "replace".

        Args:
            owner: A string or a number.
            name: The name of the method. A method that has no case below lengthens a text only a
                little, unless an argument is a large number.
            args: The arguments of the method.
        """
        check_numbers(args)  # An argument may be a length, as in `text.center(10**9)`.
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
        """Raise LimitError if the result of a filter would be too large.

        A filter is a function that a template applies to a value. Example: in `text | indent(9)`,
        `name` is "indent", `value` is the value of `text`, and `args` is (9,).

        Args:
            name: The name of the filter. A filter that has no case below lengthens a value only a
                little, unless an option is a large number.
            value: The value before the `|`.
            args: The positional options of the filter.
            kwargs: The keyword options of the filter.
        """
        options = [*args, *kwargs.values()]
        check_numbers(options)  # An option may be a length, as in `text | center(10**9)`.
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
        """Raise LimitError if the options of the filter `tojson` are too long.

        Options such as `indent` and `separators` are written once for each line of the JSON text,
        so a long option makes a very long text.
        """
        options_size = sum(_num_characters(option) for option in options)
        self.check_size(options_size * _TOJSON_LINES)

    def _check_indent(self, text: str, width: Any) -> None:  # noqa: ANN401
        """Raise LimitError if the filter `indent` would add too many characters to `text`.

        Args:
            text: The text whose lines are indented.
            width: The text that the filter writes before each line, or the number of spaces.
        """
        indent_size = len(width) if isinstance(width, str) else int(width)
        self.check_size(text.count("\n") * indent_size)

    def _check_repetition(self, sequence: object, times: object) -> None:
        """Raise LimitError if the product `sequence * times` would be too large.

        Example: `"ab" * 3` is a text of 6 characters. The product of two numbers is not checked.
        """
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            self.check_size(len(sequence) * max(times, 0))

    def _check_power(self, base: int, exponent: int) -> None:
        """Raise LimitError if the number `base ** exponent` would have too many bits.

        Each bit counts as 200 characters, because computing a large power takes long.
        """
        max_bits = base.bit_length() * abs(exponent)
        self.check_size(max_bits * _CHARACTERS_PER_BIT_OF_POWER)

    def _check_replace(self, text: str, old: Any, new: Any) -> None:  # noqa: ANN401
        """Raise LimitError if `text.replace(old, new)` could be too large.

        The check assumes the worst case: `text` consists only of repetitions of `old`. Example: the
        text "aaa" contains "a" at most 3 times. It contains the empty text 4 times: before each
        character, and at the end.
        """
        old_size = max(len(str(old)), 1)
        max_replacements = len(text) // old_size + 1
        self.check_size(len(text) + max_replacements * len(str(new)))

    def _check_join(self, items: Any, separator: Any) -> None:  # noqa: ANN401
        """Raise LimitError if `separator.join(items)` would be too large.

        The total size of the separators is checked first, and then the total size of the items.
        """
        if isinstance(items, list | tuple | str | dict):
            self.check_size(len(items) * (len(str(separator)) + 1))
            size_of(items, self.limits.value_size)  # raises LimitError if the items are too large


def _check_size(size: int, max_size: int) -> None:
    """Raise LimitError if the size of a value is larger than `max_size`."""
    if size > max_size:
        raise LimitError(f"the template makes a value of size {size}, but the limit is {max_size}")


def size_of(value: object, max_size: int, depth: int = 0) -> int:
    """Return the approximate number of characters of a value, if a template writes it as text.

    The size of a string is its length plus 16. The size of a list is the sum of the sizes of its
    members plus 16. A list that occurs twice in the value counts twice, because a template would
    write this list twice.

    >>> size_of("abc", max_size=100), size_of(["abc", "abc"], max_size=100)
    (19, 54)

    Args:
        value: The value.
        max_size: The largest allowed size. The error is raised as soon as the sum of the members
            exceeds this size, because adding all members of a list may take long.
        depth: The number of lists that contain the value. Only the recursive calls pass it.

    Raises:
        LimitError: The size is larger than `max_size`, or the lists are nested too deeply.
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
    """Raise LimitError if one of the arguments of an operation is a very large number.

    The operation may use the number as the length of a text. Example: `'%*d' % (99999, 1)` would
    write 99999 characters. The largest allowed absolute value is MAX_NUMBER.
    """
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError(
                f"the template passes the number {value} to an operation. Such a number may be at "
                f"most {MAX_NUMBER}, because the operation may use it as the length of a text."
            )


def check_format(text: object) -> None:
    """Raise LimitError if a format string could write a very long text.

    There are two such cases. The format string contains a number with five or more digits, as in
    `%099999d` and `{:>99999}`, or an argument determines the width, as in `{:>{}}`. A value that is
    not a string, or contains neither `%` nor `{`, is no format string and is accepted.
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


def _num_characters(option: object) -> int:
    """Return the number of characters of all strings in an option of the filter `tojson`.

    >>> _num_characters((", ", ": ")), _num_characters(4)
    (4, 0)
    """
    if isinstance(option, list | tuple):
        return sum(_num_characters(part) for part in option)
    return len(option) if isinstance(option, str) else 0
