"""Settings of the OpenAI frontend: one frozen object, from `NEREID_*` variables and flags."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any


class SettingsError(ValueError):
    """A setting has a value that can't be used; the message names it, its value and the remedy."""


@dataclass(frozen=True)
class Settings:
    """How the frontend listens, which ensemble it speaks to, and what it refuses.

    Each field is read from the environment variable in its metadata, and each is a flag of
    `python -m nereid_client`: `grpc_url` is `NEREID_GRPC_URL` and `--grpc-url`. Flags win.
    """

    host: str = field(
        default="127.0.0.1", metadata={"env": "NEREID_OPENAI_HOST", "help": "address to listen on"}
    )
    port: int = field(
        default=9000, metadata={"env": "NEREID_OPENAI_PORT", "help": "port to listen on"}
    )
    grpc_url: str = field(
        default="127.0.0.1:8001",
        metadata={"env": "NEREID_GRPC_URL", "help": "host:port of the Triton server's gRPC door"},
    )
    ensemble: str = field(
        default="llm",
        metadata={"env": "NEREID_ENSEMBLE", "help": "the language model's name in the repository"},
    )
    served_model_name: str = field(
        default="",
        metadata={
            "env": "NEREID_SERVED_MODEL_NAME",
            "help": "`model` of requests and replies (default: NEREID_MODEL's folder name, else "
            "the ensemble's name)",
        },
    )
    api_key: str = field(
        default="",
        repr=False,
        metadata={
            "env": "NEREID_API_KEY",
            "help": "requests then need `Authorization: Bearer KEY`",
        },
    )
    cors_origins: str = field(
        default="",
        metadata={
            "env": "NEREID_CORS_ORIGINS",
            "help": "origins, separated by commas, whose web pages may call this API; * for any",
        },
    )
    max_body_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={"env": "NEREID_MAX_BODY_BYTES", "help": "larger request bodies get a 413"},
    )
    max_prompts: int = field(
        default=128,
        metadata={"env": "NEREID_MAX_PROMPTS", "help": "prompts in one completion request"},
    )
    max_concurrent_requests: int = field(
        default=1024,
        metadata={
            "env": "NEREID_MAX_CONCURRENT_REQUESTS",
            "help": "requests in work at a time; one more gets a 429 at once",
        },
    )
    request_timeout_s: int = field(
        default=0,
        metadata={
            "env": "NEREID_REQUEST_TIMEOUT_S",
            "help": "seconds that a request may take, its answer included; 0: no limit",
        },
    )
    unread_timeout_s: int = field(
        default=120,
        metadata={
            "env": "NEREID_UNREAD_TIMEOUT_S",
            "help": "seconds after which a client that reads nothing of its answer is given up; "
            "0: never",
        },
    )
    max_stored_responses: int = field(
        default=1000,
        metadata={
            "env": "NEREID_MAX_STORED_RESPONSES",
            "help": "answers of /v1/responses that can be asked for again; the oldest go first; 0: "
            "none",
        },
    )
    max_stored_response_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata={
            "env": "NEREID_MAX_STORED_RESPONSE_BYTES",
            "help": "bytes of all of them, with what they were asked and the conversations before",
        },
    )
    stored_response_age_s: int = field(
        default=3600,
        metadata={
            "env": "NEREID_STORED_RESPONSE_AGE_S",
            "help": "seconds after which a stored answer is forgotten",
        },
    )
    log_level: str = field(
        default="info",
        metadata={"env": "NEREID_LOG_LEVEL", "help": "debug, info, warning or error"},
    )

    def __post_init__(self) -> None:
        """Refuse values that could only fail later."""
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port: must be between 0 and 65535, got {self.port}")
        least = {"max_body_bytes": 1, "max_prompts": 1, "max_concurrent_requests": 1}
        least |= {"request_timeout_s": 0, "unread_timeout_s": 0, "max_stored_responses": 0}
        least |= {"max_stored_response_bytes": 1, "stored_response_age_s": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise SettingsError(f"{name}: must be at least {limit}, got {getattr(self, name)}")
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(f"log_level: must be one of {LOG_LEVELS}, got {self.log_level!r}")
        for name in ("ensemble", "grpc_url", "host"):
            if not getattr(self, name):
                raise SettingsError(f"{name}: must not be empty")

    @property
    def model_name(self) -> str:
        """The name that requests must give as `model`."""
        return self.served_model_name or self.ensemble

    @property
    def origins(self) -> list[str]:
        """`cors_origins`, taken apart."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]


LOG_LEVELS = ("debug", "info", "warning", "error")


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `NEREID_*` variables; an empty variable counts as unset.

    Raises: SettingsError naming the variable.
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
    """Settings from the command line over those from the environment.

    Raises: SettingsError; an unknown flag ends the program as argparse does.
    """
    base = settings_from_environment(environment)
    parser = argparse.ArgumentParser(
        prog="python -m nereid_client",
        description="The OpenAI-compatible frontend, in front of a Triton server that runs.",
        allow_abbrev=False,
    )
    for setting in fields(Settings):
        secret = not setting.repr
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            default=None,
            metavar="N" if setting.type is int else "TEXT",
            help=f"{setting.metadata['help']} [{setting.metadata['env']}]"
            + ("" if secret else f" (now: {getattr(base, setting.name)!r})"),
        )
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    values = {setting.name: getattr(base, setting.name) for setting in fields(Settings)}
    for setting in fields(Settings):
        if setting.name in given:
            flag = "--" + setting.name.replace("_", "-")
            values[setting.name] = _parse(flag, given[setting.name], setting.type)
    return Settings(**values)


def _parse(name: str, text: str, kind: Any) -> str | int:  # noqa: ANN401 - a field's type
    if kind is not int:
        return text
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name}: must be a whole number, got {text!r}") from None
