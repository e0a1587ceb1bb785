"""Convert the values of a report for a JSON document."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def as_data(value: Any) -> Any:  # noqa: ANN401  # any value of a report
    """Convert a value of a report into dicts, lists and plain values, for a JSON document.

    A dataclass becomes a dict of its attributes. The dict also contains the name of the class, as
    the value of the key `part`. Example: `Wrapper("<a>", "</a>")` gives
    `{"part": "Wrapper", "open": "<a>", "close": "</a>"}`.
    """
    is_dataclass_object = is_dataclass(value) and not isinstance(value, type)
    if is_dataclass_object:
        members = {member.name: as_data(getattr(value, member.name)) for member in fields(value)}
        return {"part": type(value).__name__, **members}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_data(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
