"""The limits for an untrusted template, and the budget that counts its operations.

A template is a program that runs in the thread of the caller, so no other thread can stop the
template. Therefore every loop item, function call, filter and output is counted against a `Budget`.
The compilation of a template also checks the time of the budget. The module `operations` rejects
operations that would make a very large value.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.errors import TemplateError

MAX_SOURCE = 1_000_000  # the largest number of characters of a template
# The maximum length, in characters, of the Python code that jinja2 may generate from a template.
# Compiling code of this length takes up to 0.5 seconds, and cannot be interrupted.
MAX_CODE = 1_000_000
MAX_BITS = 4096  # the largest number of bits of an integer
# The largest number of levels of nested lists. A field of a request may have 256 levels. The lists
# and objects around the field, such as the list of all messages, add some levels.
_MAX_DEPTH = 300

_ITEM_SIZE = 16  # the size that `size_of` adds for each value
_CHECKS_PER_CLOCK_READ = 64  # Reading the clock is slow, so only every 64th time check reads it.
_REQUEST_SECONDS = 5.0
# For each character of a request, these numbers are added to the limits in ANALYSIS_LIMITS.
_STEPS_PER_CHARACTER = 8
_TOTAL_SIZE_PER_CHARACTER = 64
# At least 6 are necessary, because the filter `tojson` may convert one character to an escape of
# six characters, such as `\u00e9`.
_VALUE_SIZE_PER_CHARACTER = 8


class LimitError(TemplateError):
    """A template exceeded a limit. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on the steps, sizes and seconds that one `Budget` allows.

    Attributes:
        steps: The largest number of loop items, function calls and filters. All renderings that use
            the budget are counted together.
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

    If a request is longer, a template needs more steps and makes longer texts. The time limit does
    not grow, because a rendering must not block the server, however long the request is.

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
    """The steps, characters and seconds that the renderings of a template may still use.

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

        The size is also added to the total size of all values. The size of a string is its length.
        A number has no size, but its number of bits is limited.

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


def _check_size(size: int, max_size: int) -> None:
    """Raise LimitError if the size of a value is larger than `max_size`."""
    if size > max_size:
        raise LimitError(f"the template makes a value of size {size}, but the limit is {max_size}")


def size_of(value: object, max_size: int) -> int:
    """Estimate the number of characters of the text that a template would write for `value`.

    The size of a string is its length plus 16. The size of a list is the sum of the sizes of its
    members plus 16, and the keys and values of a dict are its members. A list that occurs twice in
    the value counts twice, because a template would write this list twice.

    >>> size_of("abc", max_size=100), size_of(["abc", "abc"], max_size=100)
    (19, 54)

    Args:
        value: The value.
        max_size: The largest size of a list or a dict. Adding the members of a larger list could
            take long, so the error is raised as soon as their sum exceeds `max_size`. The size of a
            single string is not limited, because it is known at once.

    Raises:
        LimitError: A list or a dict is larger than `max_size`, or the lists are nested too deeply.
    """
    return _size_of(value, max_size, depth=0)


def _size_of(value: object, max_size: int, depth: int) -> int:
    """Return the size of `value`, as described in `size_of`.

    `depth` is the number of lists and dicts that contain the value. It is limited, because Python
    limits the depth of recursive calls.

    Raises:
        LimitError: A list or a dict is larger than `max_size`, or `depth` is too large.
    """
    if isinstance(value, str):
        return len(value) + _ITEM_SIZE
    if not isinstance(value, dict | list | tuple | set):  # a number, for example
        return _ITEM_SIZE
    if depth > _MAX_DEPTH:
        raise LimitError(f"a value of the template has more than {_MAX_DEPTH} nested lists")
    members = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    total = _ITEM_SIZE
    for member in members:
        total += _size_of(member, max_size, depth + 1)
        _check_size(total, max_size)
    return total
