# SPDX-License-Identifier: Apache-2.0
"""Reads configurations from text, because environment variables and config.pbtxt contain text.

A configuration is a frozen dataclass. Its fields define the known names and their types.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from nereid_backend.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")

_BOOLEAN_TEXTS = {"true": True, "1": True, "false": False, "0": False}


def from_texts(kind: type[ConfigT], texts: Mapping[str, str]) -> ConfigT:
    """Return a configuration of the dataclass `kind`, built from text values.

    Example: `from_texts(EngineConfig, {"model": "/m", "max_num_seqs": "8"})` returns
    `EngineConfig(model="/m", max_num_seqs=8)`.

    Args:
        kind: the dataclass of the configuration.
        texts: text values by field name, in lower case and without the prefix NEREID_. An empty
            text means the field's default.

    Raises:
        ConfigError: a name is unknown, a value is wrong, or a setting without a default is missing.
    """
    known = {field.name: field for field in fields(kind)}
    check_known(texts, known)
    values = {
        name: _convert(name, str(known[name].type), text.strip())
        for name, text in texts.items()
        if text.strip()
    }
    required = [name for name, field in known.items() if field.default is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: this setting has no default, so it must be set.")
    return kind(**values)


def split_texts(
    texts: Mapping[str, str], first: type[Any], second: type[Any], *, prefix: str = ""
) -> tuple[dict[str, str], dict[str, str]]:
    """Split text values into those for the dataclass `first` and those for `second`.

    A name that both dataclasses have is in both results.

    Args:
        texts: text values by field name.
        first: the dataclass of the first configuration.
        second: the dataclass of the second configuration.
        prefix: the text that precedes names in error messages.

    Raises:
        ConfigError: neither dataclass has a field of that name.
    """
    first_names = {field.name for field in fields(first)}
    second_names = {field.name for field in fields(second)}
    check_known(texts, first_names | second_names, prefix=prefix)
    first_texts = {name: text for name, text in texts.items() if name in first_names}
    second_texts = {name: text for name, text in texts.items() if name in second_names}
    return first_texts, second_texts


def check_known(names: Iterable[str], known: Iterable[str], *, prefix: str = "") -> None:
    """Raise a ConfigError for the first of `names` that is not in `known`.

    The message suggests the most similar known name and lists all known names. `prefix` precedes
    each name in the message.
    """
    choices = sorted(prefix + name for name in known)
    for name in names:
        if prefix + name not in choices:
            similar = difflib.get_close_matches(prefix + name, choices, n=1)
            hint = f' Did you mean "{similar[0]}"?' if similar else ""
            raise ConfigError(
                f'The setting "{prefix}{name}" is not known.{hint} The known settings are: '
                f"{', '.join(choices)}."
            )


def _convert(name: str, annotation: str, text: str) -> Any:  # noqa: ANN401 - one of the field types
    """Convert the text of the setting `name` to the type in its field's annotation.

    Examples: `_convert("block_size", "int", "16")` returns 16. A type that includes str, such as
    "int | str | None", returns the text itself.

    Raises:
        ConfigError: the text is not a value of that type.
    """
    readers: dict[str, tuple[Callable[[str], object], str]] = {
        "bool": (_read_boolean, "true or false"),
        "int": (int, "an integer"),
        "float": (float, "a finite number"),
    }
    kind = next((k for k in readers if k in annotation and "str" not in annotation), None)
    if kind is None:
        return text
    read, expected = readers[kind]
    problem = ConfigError(f'{name}: the value must be {expected}, but it is "{text}".')
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise problem from None
    if isinstance(value, float) and not math.isfinite(value):
        raise problem
    return value


def _read_boolean(text: str) -> bool:
    return _BOOLEAN_TEXTS[text.lower()]
