"""Describe a `Format` as lines of text for the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any


def part_lines(part: Any, indent: str = "") -> Iterator[str]:  # noqa: ANN401  # any dataclass
    """Yield lines of text that describe a `Format` or one of its parts, such as `Reasoning`.

    A part is a dataclass, and its attributes may contain inner parts. Attributes with default
    values are omitted.

    >>> from nereid_parsers.format import Reasoning, Sections
    >>> for line in part_lines(Sections(reasoning=Reasoning("<think>", "</think>"))): print(line)
    Sections
      reasoning:
        Reasoning
          open: '<think>'
          close: '</think>'

    `indent` is the white space before each line.
    """
    yield f"{indent}{type(part).__name__}"
    for declared in fields(part):
        value = getattr(part, declared.name)
        if value == _default_of(declared):
            continue
        inner_parts = _inner_parts(value)
        if inner_parts:
            yield f"{indent}  {declared.name}:"
            for inner_part in inner_parts:
                yield from part_lines(inner_part, indent + "    ")
        else:
            shown_value = value.value if isinstance(value, Enum) else value
            yield f"{indent}  {declared.name}: {shown_value!r}"


def _inner_parts(value: object) -> tuple[object, ...]:
    """Return the dataclass instances in `value`. Return () if `value` contains no such instance.

    `value` is the value of an attribute. A part is an instance of a dataclass. The value may be one
    part, a tuple of parts, or a value without parts, such as a string.
    """
    values = value if isinstance(value, tuple) else (value,)
    contains_dataclasses = bool(values) and is_dataclass(values[0])
    return values if contains_dataclasses else ()


def _default_of(declared: Field[Any]) -> object:
    """Return the default value of the dataclass field `declared`, or MISSING if there is none."""
    if declared.default is MISSING and declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default
