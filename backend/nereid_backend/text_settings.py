# SPDX-License-Identifier: Apache-2.0
"""Settings from text, as environment variables and config.pbtxt parameters bring them.

A config is a frozen dataclass; its fields say which names there are and how their text is read.
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


def from_texts(kind: type[ConfigT], texts: Mapping[str, str]) -> ConfigT:
    """Make a config of text.

    Args:
        kind: its class.
        texts: lower-case field names (no NEREID_ prefix) to text. Empty text is the default.

    Raises:
        ConfigError: an unknown name (the nearest known one is suggested), a wrong value, or a
            setting without a default is missing.
    """
    known = {field.name: field for field in fields(kind)}
    check_known(texts, known)
    values = {
        name: _read(name, str(known[name].type), text.strip())
        for name, text in texts.items()
        if text.strip()
    }
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: must be set; it has no default")
    return kind(**values)


def split_texts(
    texts: Mapping[str, str], first: type[Any], second: type[Any], *, prefix: str = ""
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of two configs that are set side by side; a name that both have is in both.

    Args:
        texts: by field name.
        first: the class of the one.
        second: the class of the other.
        prefix: stands before names in errors.

    Raises:
        ConfigError: neither knows a name.
    """
    names = [{field.name for field in fields(kind)} for kind in (first, second)]
    check_known(texts, names[0] | names[1], prefix=prefix)
    ours, theirs = ({n: t for n, t in texts.items() if n in known} for known in names)
    return ours, theirs


def check_known(names: Iterable[str], known: Iterable[str], *, prefix: str = "") -> None:
    """Refuse names that nothing knows, and suggest the nearest known one.

    Raises:
        ConfigError: there is one.
    """
    choices = sorted(prefix + name for name in known)
    for name in names:
        if prefix + name not in choices:
            near = difflib.get_close_matches(prefix + name, choices, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ConfigError(
                f'unknown setting "{prefix}{name}"{hint} (known: {", ".join(choices)})'
            )


def _read(name: str, annotation: str, text: str) -> Any:  # noqa: ANN401 - one of the field types
    """A setting's value from text, by the annotation of its field.

    Raises:
        ConfigError: the text is not of that type.
    """
    readers: dict[str, tuple[Callable[[str], object], str]] = {
        "bool": (_read_flag, "true or false"),
        "int": (int, "an integer"),
        "float": (float, "a number"),
    }
    # kv_cache_memory is "int | str | None": text is one of its own types.
    kind = next((k for k in readers if k in annotation and "str" not in annotation), None)
    if kind is None:
        return text
    read, expected = readers[kind]
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise ConfigError(f'{name}: must be {expected}, got "{text}"') from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f'{name}: must be {expected}, got "{text}"')
    return value


def _read_flag(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
