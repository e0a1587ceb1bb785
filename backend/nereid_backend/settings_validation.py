# SPDX-License-Identifier: Apache-2.0
"""Provides the decorator for settings classes, and the types of settings.

A settings class declares each setting once, as a field with a type, a default and a docstring:

    @settings_class
    class EngineConfig:
        max_num_seqs: PositiveInt = 256
        '''The largest number of sequences that run at the same time.'''

pydantic validates the values. The environment variable NEREID_MAX_NUM_SEQS, the parameter
max_num_seqs of config.pbtxt, the row in docs/reference/settings.md and the help text of the flag
--max-num-seqs are derived from the field.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.errors import ConfigError

SettingsT = TypeVar("SettingsT")

_CONFIG = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)

# The settings are sent to the engine process as msgpack, whose largest integers have 64 bits.
_LARGEST_INTEGER = 2**64 - 1

# Phrases in pydantic's error messages, and the simpler phrases that replace them.
_PHRASES = {
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def settings_class(cls: type[SettingsT]) -> type[SettingsT]:
    """Turn a class into a frozen dataclass, so that pydantic validates the values of its fields.

    A wrong value raises a ConfigError. A text is not converted to another type: max_num_seqs="8" is
    wrong. Only the field type of sizes in bytes accepts texts, such as kv_cache_memory="2GiB". Use
    this function as a class decorator.
    """
    validated: Any = dataclass(frozen=True, slots=True, config=_CONFIG)(cls)
    pydantic_init = validated.__init__

    # The new __init__ converts pydantic's ValidationError to a ConfigError.
    @functools.wraps(pydantic_init)
    def init(self: object, *args: object, **values: object) -> None:
        with _config_errors(validated):
            pydantic_init(self, *args, **values)

    validated.__init__ = init
    return validated  # type: ignore[no-any-return]


# ---- the types of settings

# A validator raises a ValueError for a wrong value. The text of the ValueError completes the
# sentence "the value must be ...".


def _check_checkpoint(path: str) -> str:
    """Return the folder of a checkpoint. For a GGUF file, this is a folder in the cache."""
    if not path:
        raise ValueError("the path of a checkpoint")
    return checkpoint_folder(path)


def _check_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return name


def _check_size(value: object) -> object:
    """Raise a ValueError if `value` is neither a number of bytes nor a text such as "2GiB".

    Without this check, pydantic's ByteSize would accept "4,096" as 4 bytes.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    pattern = r"\s*\d+(\.\d+)?\s*([kmgt]?i?b)?\s*"
    is_size_text = isinstance(value, str) and re.fullmatch(pattern, value.lower()) is not None
    if not is_number and not is_size_text:
        raise ValueError("a number of bytes, such as 65536 or 64MiB")
    return value


def _parse_adapters(value: object) -> dict[Any, Any]:
    """Return the adapters in a setting, as a dict that maps the name of each adapter to its folder.

    Example: the text "a=/x,b=/y" returns {"a": "/x", "b": "/y"}. A value that is already a dict is
    returned unchanged.

    Raises:
        ValueError: the value is neither such a text nor a dict, or a name or a folder is empty. The
            message continues the sentence "the value must be ...".
    """
    adapters = _split_adapters(value) if isinstance(value, str) else value
    if not isinstance(adapters, dict) or not all(adapters.keys()) or not all(adapters.values()):
        raise ValueError("pairs such as name=/path, separated by commas")
    return adapters


def _split_adapters(text: str) -> dict[str, str]:
    """Split a text such as "a=/x,b=/y". Raise a ValueError if two pairs have the same name."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    adapters = {name.strip(): folder.strip() for name, _, folder in pairs}
    if len(adapters) < len(pairs):
        raise ValueError("pairs with different names, such as name=/path,other=/path")
    return adapters


def _parse_switch(value: object) -> object:
    """Convert a value to True, False or "auto".

    Example: "1", "on" and "true" become True.
    """
    if isinstance(value, bool) or value == "auto":
        return value
    try:
        return TypeAdapter(bool).validate_strings(value)
    except ValidationError:
        raise ValueError("true, false or auto") from None


AutoSwitch = Annotated[bool | Literal["auto"], PlainValidator(_parse_switch)]
CheckpointPath = Annotated[str, AfterValidator(_check_checkpoint)]
LoraAdapters = Annotated[dict[str, str], BeforeValidator(_parse_adapters)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, AfterValidator(_check_device)]
GpuShare = Annotated[float, Field(gt=0, le=1)]
# A mistyped number of threads or processes, such as 50000, could stop the whole machine. The limits
# are above the numbers of CPUs and GPUs of today's machines.
NumThreads = Annotated[int, Field(gt=0, le=1024)]
NumProcesses = Annotated[int, Field(gt=0, le=256)]
SIZE_IN_BYTES = GetPydanticSchema(
    lambda _, handler: handler(Annotated[ByteSize, BeforeValidator(_check_size)])
)
"""Annotates a setting as a size in bytes: an integer, or text such as "2GiB"."""


# ---- the conversion of text


def from_texts(kind: type[SettingsT], texts: Mapping[str, str], *, prefix: str = "") -> SettingsT:
    """Create an object of a settings class from text values, such as environment variables.

    Example: `from_texts(EngineConfig, {"model": "/m", "max_num_seqs": "8"})` returns
    `EngineConfig(model="/m", max_num_seqs=8)`.

    Args:
        kind: the settings class.
        texts: maps the name of a setting to a text value. An empty text means the default. Names
            that are not settings of `kind` are ignored, because several classes share one mapping.
        prefix: the text that precedes the setting's name in an error message: "" or "embedding_".

    Raises:
        ConfigError: a value is wrong, or a setting without a default is missing.
    """
    stripped = {name: texts[name].strip() for name in setting_names(kind) if name in texts}
    not_empty = {name: text for name, text in stripped.items() if text}
    with _config_errors(kind, prefix):
        settings = TypeAdapter(kind).validate_strings(not_empty)
    _check_integers(settings, prefix)
    return settings


def _check_integers(settings: object, prefix: str) -> None:
    """Raise a ConfigError if a setting is an integer that is too large to send to another process.

    In the message, `prefix` precedes the name of the setting.
    """
    for name in setting_names(type(settings)):
        value = getattr(settings, name)
        if isinstance(value, int) and value > _LARGEST_INTEGER:
            raise ConfigError(
                f"{prefix}{name}: the value must be at most {_LARGEST_INTEGER}, but it is {value}."
            )


def setting_names(*kinds: type) -> list[str]:
    """Return the names of all settings in one or several settings classes."""
    return list(dict.fromkeys(field.name for kind in kinds for field in fields(kind)))


def check_names(names: Iterable[str], known: Sequence[str], *, prefix: str = "") -> None:
    """Raise a ConfigError if `names` contains a name that is not the name of a known setting.

    `known` contains the names of all known settings.

    In the message, `prefix` precedes each name.
    """
    for name in names:
        if name not in known:
            raise _unknown_name_error(name, known, prefix)


def _unknown_name_error(name: str, known: Sequence[str], prefix: str = "") -> ConfigError:
    """Return the error for an unknown setting. The message suggests the most similar known name."""
    similar = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {prefix}{similar[0]}?" if similar else ""
    return ConfigError(
        f"{prefix}{name}: this setting does not exist.{hint} The page "
        "docs/reference/settings.md lists all settings."
    )


@contextmanager
def _config_errors(kind: type, prefix: str = "") -> Iterator[None]:
    """In a `with` block, convert each ValidationError of pydantic to a ConfigError.

    Example of a message: "max_num_seqs: the value must be greater than 0, but it is 0."
    """
    known_names = setting_names(kind)
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]  # Report only the first problem.
        name = _setting_name(problem, known_names)
        if problem["type"] == "unexpected_keyword_argument":
            raise _unknown_name_error(name, known_names) from None
        raise ConfigError(f"{prefix}{name}: {_describe_problem(problem)}") from None


def _setting_name(problem: ErrorDetails, known_names: Sequence[str]) -> str:
    """Return the name of the setting with a problem. `known_names` are the names of all settings.

    The location of a problem begins with this name. If the value is a positional argument, the
    location begins with the index of the setting instead.
    """
    name_or_index = problem["loc"][0]
    return known_names[name_or_index] if isinstance(name_or_index, int) else name_or_index


def _describe_problem(problem: ErrorDetails) -> str:
    """Return the part of an error message that describes a wrong value of a setting.

    Example: pydantic's message "Input should be a valid integer, unable to parse string as an
    integer" becomes "the value must be an integer, but it is 'many'." The message of each check in
    a settings class, such as "a power of 2", also continues the sentence "the value must be".
    """
    if problem["type"] == "missing":
        return "this setting has no default, so it must be set."
    # Remove everything from pydantic's message except a phrase such as "a valid integer".
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    expected = message.partition(", unable to ")[0]
    # Replace phrases of pydantic by simpler ones. Example: "a valid integer" becomes "an integer".
    for pydantic_phrase, phrase in _PHRASES.items():
        expected = expected.replace(pydantic_phrase, phrase)
    return f"the value must be {expected}, but it is {problem['input']!r}."
