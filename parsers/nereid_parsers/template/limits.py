"""What an untrusted template may spend, and how that is counted while it runs.

A template is a program. It runs in this thread, so it cannot be stopped from outside; instead every
loop turn, call, filter and output reports here, and no single operation may make something large.
"""

from __future__ import annotations

import re
import time
from typing import Any

from nereid_parsers.errors import TemplateError

MAX_SOURCE = 1_000_000  # characters of a template
MAX_STEPS = 400_000  # loop turns, calls and filters, of all renderings together
MAX_MADE = 16_000_000  # characters and list members made, of all renderings together
MAX_VALUE = 300_000  # characters of one string, or members of one list with all inside it
MAX_NUMBER = 10_000  # a number given to an operation that makes text of that length
MAX_BITS = 4096  # of an integer
MAX_SECONDS = (
    0.8  # of this thread's processor time: no template can wait, but a machine may be busy
)

_WEIGHT = 16  # of a member, beside its text; what weighing it costs
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")
_LONG_NUMBER = re.compile(r"\d{5,}")


class LimitError(TemplateError):
    """A template asked for more than an analysis grants; the message says of what."""


class Budget:
    """What is left to the renderings of one analysis. Used by one thread."""

    __slots__ = ("_deadline", "_made", "_steps", "literal_size")

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._steps = MAX_STEPS
        self._made = MAX_MADE
        self.literal_size = 0  # of the text that one pass through the running template may write
        self._deadline = time.thread_time() + seconds

    def step(self, literal_size: int = 0) -> None:
        """One loop turn or call, which may write so many characters of the template's own text."""
        self._steps -= 1
        if self._steps < 0:
            raise LimitError(f"the template takes more than {MAX_STEPS} steps; does it end?")
        if not self._steps % 64 and time.thread_time() > self._deadline:
            raise LimitError(f"the template takes more than {MAX_SECONDS} seconds; does it end?")
        self.make(literal_size)

    def make(self, size: int) -> None:
        """Something of this size was, or is about to be, made."""
        self._made -= size
        if self._made < 0:
            raise LimitError(f"the template makes more than {MAX_MADE} characters in all")

    def check(self, value: Any) -> Any:  # noqa: ANN401  # whatever a template may hold
        """Count a value that was made; the value again. Raises: LimitError if it is too large."""
        if isinstance(value, str | bytes):
            size = len(value)
        elif isinstance(value, list | tuple | dict | set):
            size = weight(value)
        elif isinstance(value, int):
            size = 0
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"the template makes a number of more than {MAX_BITS} bits")
        else:
            return value
        if size > MAX_VALUE:
            raise _too_large(size)
        self.make(size)
        return value

    def foresee(self, size: int) -> None:
        """Refuse an operation before it makes something too large."""
        if size > MAX_VALUE:
            raise _too_large(size)


def _too_large(size: int) -> LimitError:
    return LimitError(f"the template makes a value of size {size}; the limit is {MAX_VALUE}")


def weight(value: object, depth: int = 0) -> int:
    """How much text a value would be, roughly; a container that is met twice counts twice.

    Raises: LimitError as soon as the limit is passed, so that shared parts cannot blow it up.
    """
    if isinstance(value, str):
        return len(value) + _WEIGHT
    if isinstance(value, dict):
        parts: list[object] = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    else:
        return _WEIGHT
    if depth > 100:
        raise LimitError("the template nests lists more than 100 deep")
    total = _WEIGHT
    for part in parts:
        total += weight(part, depth + 1)
        if total > MAX_VALUE:
            raise _too_large(total)
    return total


def check_numbers(values: list[object]) -> None:
    """Refuse numbers, or number words in format strings, that ask for huge padding."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError(f"the template asks for {value} of something; limit {MAX_NUMBER}")


def check_format(text: object) -> None:
    """Refuse a format string that asks for huge padding: `%099999d`, `{:>99999}`."""
    if isinstance(text, str) and ("%" in text or "{" in text):
        found = _LONG_NUMBER.search(text)
        if found is not None:
            raise LimitError(f"the template pads to {found.group()[:12]}; limit {MAX_NUMBER}")
        if _NESTED_FIELD.search(text):
            raise LimitError("the template computes the width to which it pads")
