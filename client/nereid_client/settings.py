"""The settings of the OpenAI frontend, which are read from `NEREID_*` variables and flags.

pydantic-settings is not used, because its classes read the environment whenever an object is
created, and because they can read only `os.environ` and no other mapping.
"""

import argparse
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    GetPydanticSchema,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

ClassT = TypeVar("ClassT")

# Matches a scheme, the separator :// and a host with an optional port. A browser sends the scheme
# and the host in lower case.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")

_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class SettingsError(ValueError):
    """Raised if a setting is wrong. The message names the setting, the value and the limit."""


@contextmanager
def _raise_settings_errors(labels: Mapping[str, str] | None = None) -> Iterator[None]:
    """If the `with` block raises pydantic's ValidationError, raise a SettingsError instead.

    The message describes only the first error.

    Example of a message: "--port: the value must be less than or equal to 65535, but it is
    '70000'."
    """
    labels = labels or {}
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        requirement = describe_requirement(first)
        # The message must not contain an API key, because messages are logged.
        value = "has another value" if name == "api_key" else f"is {first['input']!r}"
        raise SettingsError(f"{labels.get(name, name)}: {requirement}, but it {value}.") from None


_REQUIREMENTS = {
    "missing": "the key is missing",
    "extra_forbidden": "this key does not exist",
    "tuple_type": "the value must be a list",
    "model_type": "it must be a table",
}
"""Maps an error type of pydantic to words for a TOML file, where pydantic's message uses others."""


def describe_requirement(error: ErrorDetails) -> str:
    """Convert pydantic's error about the value of a setting to a clause with the requirement.

    Examples: "Input should be a valid integer, unable to parse string as an integer" returns "the
    value must be a valid integer". "String should have at least 1 character" returns "the value
    must have at least 1 character".
    """
    if error["type"] in _REQUIREMENTS:
        return _REQUIREMENTS[error["type"]]
    without_cause = re.sub("^Value error, |, unable to .*", "", error["msg"])
    return re.sub(r"^\w+ should ", "the value must ", without_cause)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def _settings_class(cls: type[ClassT]) -> type[ClassT]:
    """Make `cls` a frozen dataclass whose constructor raises a SettingsError for a wrong value.

    Without this decorator, the constructor would raise pydantic's ValidationError.
    """
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    settings_class: Any = dataclass(frozen=True, config=config)(cls)
    pydantic_init = settings_class.__init__

    @functools.wraps(pydantic_init)
    def init(self: object, **values: object) -> None:
        with _raise_settings_errors():
            pydantic_init(self, **values)

    settings_class.__init__ = init
    return settings_class  # type: ignore[no-any-return]


def _check_size(value: object) -> object:
    """Return `value`. Raise a ValueError if `value` is a string that is not a size in bytes.

    Examples: "64MiB" is returned, and "4,096" raises the error. Without this check, pydantic's
    ByteSize would read "4,096" as 4 bytes and ignore the rest.
    """
    if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)? ?([kmgt]?i?b)?", value.lower()):
        raise ValueError("Input should be a number of bytes, such as 65536 or 64MiB")
    return value


def check_key(value: object) -> object:
    """Return an API key. Raise ValueError if HTTP headers cannot contain the key.

    A key from a file often ends with a line end, which no client can send.
    """
    if isinstance(value, str) and not (value.isprintable() and value == value.strip()):
        raise ValueError(
            "Input should have no line end, no other control character, and no space at the "
            "beginning or the end"
        )
    return value


def _check_origins(value: str) -> str:
    """Return `value` unchanged. Raise ValueError if an origin in `value` is not valid.

    `value` contains origins, separated by commas. An origin is not valid if no browser can send the
    origin. Without this check, a text such as "https://example.org/" would allow no page. The text
    "*" is also accepted, and allows all pages.
    """
    for item in filter(None, map(str.strip, value.split(","))):
        if item not in ("*", "null") and not _ORIGIN.fullmatch(item):
            raise ValueError(
                "Input should contain origins such as https://example.org or "
                "http://127.0.0.1:8080, in lower case, without a path and without a * in an origin"
            )
    return value


def _check_host_names(value: str) -> str:
    """Return `value` unchanged. Raise ValueError if an item is neither a host name nor `*`.

    `value` contains host names, separated by commas. Example: "llm.example.com, gateway". Without
    this check, an item with a port or a path would allow no request.
    """
    for item in filter(None, map(str.strip, value.split(","))):
        if item != "*" and not _HOST_NAME.fullmatch(item):
            raise ValueError(
                "Input should contain host names such as llm.example.com, without a scheme, a port "
                "or a path, or * for all names"
            )
    return value


NumBytes = Annotated[
    int,
    GetPydanticSchema(
        lambda _, handler: handler(Annotated[ByteSize, BeforeValidator(_check_size)])
    ),
]
"""A number of bytes. Its text may have a unit, such as "64MiB"."""
_Bytes = Annotated[NumBytes, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]


@_settings_class
class Settings:
    """The settings of the frontend.

    Each setting has an environment variable and a flag of `python -m nereid_client`. For example,
    `grpc_url` has the variable `NEREID_GRPC_URL` and the flag `--grpc-url`. A flag takes precedence
    over a variable.
    """

    host: _Text = "127.0.0.1"
    """The address on which the frontend listens."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    """The port on which the frontend listens."""

    frontend_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of processes that run the frontend on its port."""

    grpc_url: _Text = "127.0.0.1:8001"
    """The address `host:port` of the Triton server's gRPC endpoint."""

    metrics_url: Annotated[str, Field(pattern="^(https?://.+)?$")] = ""
    """The URL of the Triton server's metrics, which the frontend's `/metrics` then contains too.
    `nereid serve` sets this variable."""

    metrics_names: Literal["nereid", "vllm"] = "nereid"
    """`vllm` publishes metrics that vLLM has, too, under vLLM's names."""

    ensemble: _Text = "llm"
    """The name of the language model in the model repository."""

    models_file: str = ""
    """The path of a TOML file that describes several models."""

    served_model_name: str = ""
    """The name of the language model in requests and responses. By default, the
    language model has the name of the checkpoint's folder."""

    allow_lora_updates: bool = False
    """Whether clients may load and unload LoRA adapters, and replace the weights of the model."""

    api_key: Annotated[str, BeforeValidator(check_key)] = Field(default="", repr=False)
    """The API key, which each request needs in the header `Authorization: Bearer KEY`, `x-api-key:
    KEY` or `api-key: KEY`."""

    api_key_file: str = ""
    """The path of a TOML file with the API keys, weights and limits of clients."""

    cors_origins: Annotated[str, AfterValidator(_check_origins)] = ""
    """The origins whose web pages may call the API, separated by commas. `*` allows all origins.
    By default, no origin may call the API."""

    allowed_hosts: Annotated[str, AfterValidator(_check_host_names)] = ""
    """The host names that requests may have in the header `Host`, separated by commas, if no API
    key is set. IP addresses, `localhost` and the machine's name are always allowed. Add the name
    that a reverse proxy passes on. `*` allows all names, and is the default if other machines can
    reach the frontend."""

    max_body_bytes: _Bytes = 64 * 1024 * 1024
    """The largest size of a request body. Larger bodies are rejected with the status 413."""

    max_total_body_bytes: _Bytes = 512 * 1024 * 1024
    """The largest size of the bodies of all running requests. Further requests are rejected with
    the status 429."""

    receive_timeout_s: NonNegativeInt = 60
    """The longest time for sending the headers of a request, and the longest time for sending the
    body. `0` means no limit."""

    max_prompts: PositiveInt = 128
    """The largest number of prompts in a request to `/v1/completions`."""

    max_concurrent_requests: PositiveInt = 1024
    """The largest number of requests that run at the same time. Further requests are rejected with
    the status 429."""

    request_timeout_s: NonNegativeInt = 0
    """The longest time from the arrival of a request to the end of its response, in seconds. `0`
    means no limit."""

    unread_timeout_s: NonNegativeInt = 120
    """If a client reads nothing of its response for this many seconds, its connection is closed.
    `0` means never."""

    max_stored_responses: NonNegativeInt = 1000
    """The largest number of stored responses of `/v1/responses`. The oldest responses of the client
    with the most responses are deleted first. `0` means that no response is stored."""

    max_stored_response_bytes: _Bytes = 256 * 1024 * 1024
    """The largest size of all stored responses and their conversations together."""

    stored_response_age_s: PositiveInt = 3600
    """The number of seconds after which a stored response is deleted."""

    batch_folder: str = ""
    """The folder for the files of the Batch API. Without a folder, the API is turned off. The
    default of `nereid serve` is `~/.local/state/nereid/batches-PORT`."""

    max_stored_files: NonNegativeInt = 1000
    """The largest number of files, and of batches. If there are too many batches, the oldest ended
    batch of the client with the most batches is deleted. `0` turns the API off."""

    max_stored_file_bytes: _Bytes = 4 * 1024**3
    """The largest size of all files together."""

    max_batch_requests: PositiveInt = 32
    """The largest number of batch requests that run at the same time. While other requests run, it
    is a quarter."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The log level: `debug`, `info`, `warning` or `error`."""

    log_format: Literal["text", "json"] = "text"
    """`json` writes each line of the log as a JSON object, and logs each answered request."""

    @property
    def model_name(self) -> str:
        """The name of the language model in requests and responses."""
        return self.served_model_name or self.ensemble

    @property
    def origins(self) -> list[str]:
        """The members of `cors_origins`."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]


VARIABLES = {name: f"NEREID_{name.upper()}" for name in Settings.__annotations__} | {
    "host": "NEREID_OPENAI_HOST",
    "port": "NEREID_OPENAI_PORT",
}
"""Maps the name of a setting to its environment variable."""

SCHEMA: dict[str, Any] = TypeAdapter(Settings).json_schema()["properties"]
"""Maps the name of a setting to its JSON schema, which has the description and the default."""


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from `NEREID_*` environment variables. Empty variables are ignored.

    Raises: SettingsError that names the variable.
    """
    return _from_texts(environment, {})


def settings_from_flags(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings from the command line and the environment. Flags take precedence.

    Raises:
        SettingsError: a value is wrong.
        SystemExit: a flag is unknown, or --help is given.
    """
    # The help page of the parser shows the current value of each setting.
    parser = _flag_parser(current=settings_from_environment(environment))
    flags = vars(parser.parse_args(argv))
    given_flags = {name: text for name, text in flags.items() if text is not None}
    return _from_texts(environment, given_flags)


def _flag_parser(current: Settings) -> argparse.ArgumentParser:
    """Return a parser with one flag for each setting."""
    parser = argparse.ArgumentParser(
        prog="python -m nereid_client",
        description="Run the OpenAI-compatible frontend for a Triton server that already runs. "
        "`nereid serve` starts both. The environment variable of each flag is in brackets.",
        allow_abbrev=False,
    )
    for name, setting in SCHEMA.items():
        value = getattr(current, name)
        is_secret = name == "api_key"
        value_sentence = "" if is_secret else f" The current value is {value!r}."
        parser.add_argument(
            _flag(name),
            metavar="N" if isinstance(value, int) else "TEXT",
            help=f"{setting['description']}{value_sentence} [{VARIABLES[name]}]",
        )
    return parser


def _from_texts(environment: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Convert the texts of environment variables and flags to settings.

    A flag takes precedence over a variable. The default of served_model_name is the last part of
    the checkpoint's path.
    """
    # The path of the checkpoint is a setting of the backend, so the frontend has no flag for it.
    checkpoint = PurePath(environment.get("NEREID_MODEL", ""))
    texts = {name: environment.get(variable, "") for name, variable in VARIABLES.items()}
    texts["served_model_name"] = texts["served_model_name"] or checkpoint.name
    texts = {name: text for name, text in texts.items() if text}
    texts.update(flags)
    # If a flag sets the value, an error message names the flag. Otherwise, the error message names
    # the environment variable.
    labels = VARIABLES | {name: _flag(name) for name in flags}
    with _raise_settings_errors(labels):
        return TypeAdapter(Settings).validate_strings(texts)


def _flag(name: str) -> str:
    """Return the name of a setting's flag, such as "--grpc-url" for "grpc_url"."""
    return "--" + name.replace("_", "-")
