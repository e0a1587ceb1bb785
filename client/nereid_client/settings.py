"""The settings of the OpenAI frontend, from `NEREID_*` environment variables and flags."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any


class SettingsError(ValueError):
    """A setting has a wrong value. The message names the setting, the value and the limit."""


@dataclass(frozen=True)
class Settings:
    """The settings of the frontend.

    Each field has an environment variable, which its metadata names, and a flag of
    `python -m nereid_client`. For example, `grpc_url` has the variable `NEREID_GRPC_URL` and the
    flag `--grpc-url`. A flag takes precedence over a variable.
    """

    host: str = field(
        default="127.0.0.1",
        metadata={"env": "NEREID_OPENAI_HOST", "help": "The address to listen on."},
    )
    port: int = field(
        default=9000, metadata={"env": "NEREID_OPENAI_PORT", "help": "The port to listen on."}
    )
    grpc_url: str = field(
        default="127.0.0.1:8001",
        metadata={
            "env": "NEREID_GRPC_URL",
            "help": "The host:port of the Triton server's gRPC endpoint.",
        },
    )
    ensemble: str = field(
        default="llm",
        metadata={
            "env": "NEREID_ENSEMBLE",
            "help": "The name of the ensemble in the model repository.",
        },
    )
    served_model_name: str = field(
        default="",
        metadata={
            "env": "NEREID_SERVED_MODEL_NAME",
            "help": "The name of the language model in requests and responses. The default is the "
            "folder name of NEREID_MODEL, else the name of the ensemble.",
        },
    )
    api_key: str = field(
        default="",
        repr=False,
        metadata={
            "env": "NEREID_API_KEY",
            "help": "The API key. If it is set, requests need the header "
            "`Authorization: Bearer KEY`.",
        },
    )
    cors_origins: str = field(
        default="",
        metadata={
            "env": "NEREID_CORS_ORIGINS",
            "help": "The origins whose web pages may call the API, separated by commas. * allows "
            "all origins.",
        },
    )
    max_body_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "env": "NEREID_MAX_BODY_BYTES",
            "help": "The maximum size of a request body, in bytes. Larger bodies are rejected "
            "with a 413.",
        },
    )
    max_prompts: int = field(
        default=128,
        metadata={
            "env": "NEREID_MAX_PROMPTS",
            "help": "The maximum number of prompts in a request to /v1/completions.",
        },
    )
    max_concurrent_requests: int = field(
        default=1024,
        metadata={
            "env": "NEREID_MAX_CONCURRENT_REQUESTS",
            "help": "The maximum number of requests that run at the same time. Further requests "
            "are rejected with a 429.",
        },
    )
    request_timeout_s: int = field(
        default=0,
        metadata={
            "env": "NEREID_REQUEST_TIMEOUT_S",
            "help": "The maximum duration of a request, from its arrival to the end of its "
            "response, in seconds. 0 means no limit.",
        },
    )
    unread_timeout_s: int = field(
        default=120,
        metadata={
            "env": "NEREID_UNREAD_TIMEOUT_S",
            "help": "The connection of a client that reads nothing of its response for this many "
            "seconds is closed. 0 means never.",
        },
    )
    max_stored_responses: int = field(
        default=1000,
        metadata={
            "env": "NEREID_MAX_STORED_RESPONSES",
            "help": "The maximum number of stored responses of /v1/responses. The oldest ones are "
            "deleted first. 0 turns the store off.",
        },
    )
    max_stored_response_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata={
            "env": "NEREID_MAX_STORED_RESPONSE_BYTES",
            "help": "The maximum size of all stored responses and their conversations, in bytes.",
        },
    )
    stored_response_age_s: int = field(
        default=3600,
        metadata={
            "env": "NEREID_STORED_RESPONSE_AGE_S",
            "help": "The number of seconds after which a stored response is deleted.",
        },
    )
    log_level: str = field(
        default="info",
        metadata={
            "env": "NEREID_LOG_LEVEL",
            "help": "The log level: debug, info, warning or error.",
        },
    )

    def __post_init__(self) -> None:
        """Check all values.

        Raises: SettingsError.
        """
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port must be from 0 to 65535, but it is {self.port}")
        least = {"max_body_bytes": 1, "max_prompts": 1, "max_concurrent_requests": 1}
        least |= {"request_timeout_s": 0, "unread_timeout_s": 0, "max_stored_responses": 0}
        least |= {"max_stored_response_bytes": 1, "stored_response_age_s": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise SettingsError(
                    f"{name} must be at least {limit}, but it is {getattr(self, name)}"
                )
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(
                f"log_level must be one of {', '.join(LOG_LEVELS)}, but it is {self.log_level!r}"
            )
        for name in ("ensemble", "grpc_url", "host"):
            if not getattr(self, name):
                raise SettingsError(f"{name} must not be empty")

    @property
    def model_name(self) -> str:
        """The name of the language model in requests and responses."""
        return self.served_model_name or self.ensemble

    @property
    def origins(self) -> list[str]:
        """The members of `cors_origins`."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]


LOG_LEVELS = ("debug", "info", "warning", "error")


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from `NEREID_*` environment variables. Empty variables are ignored.

    Raises: SettingsError that names the variable.
    """
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        variable = setting.metadata["env"]
        text = environment.get(variable, "")
        if text:
            values[setting.name] = _parse(variable, text, setting.type)
    if not values.get("served_model_name"):
        values["served_model_name"] = PurePath(environment.get("NEREID_MODEL", "")).name
    return Settings(**values)


def settings_from_flags(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings from the command line and the environment. Flags take precedence.

    Raises:
        SettingsError: a value is wrong.
        SystemExit: a flag is unknown, or --help is given.
    """
    base = settings_from_environment(environment)
    parser = argparse.ArgumentParser(
        prog="python -m nereid_client",
        description="Run the OpenAI-compatible frontend for a Triton server that already runs. "
        "`nereid serve` starts both. The environment variable of each flag is in brackets.",
        allow_abbrev=False,
    )
    for setting in fields(Settings):
        secret = not setting.repr
        parser.add_argument(
            _flag(setting.name),
            default=None,
            metavar="N" if setting.type is int else "TEXT",
            help=setting.metadata["help"]
            + ("" if secret else f" The current value is {getattr(base, setting.name)!r}.")
            + f" [{setting.metadata['env']}]",
        )
    arguments = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        text = arguments[setting.name]
        if text is None:
            values[setting.name] = getattr(base, setting.name)
        else:
            values[setting.name] = _parse(_flag(setting.name), text, setting.type)
    return Settings(**values)


def _flag(name: str) -> str:
    """Return the flag of a setting, such as "--grpc-url" for "grpc_url"."""
    return "--" + name.replace("_", "-")


def _parse(name: str, text: str, kind: Any) -> str | int:  # noqa: ANN401 - a field's type
    if kind is not int:
        return text
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name} must be an integer, but it is {text!r}") from None
