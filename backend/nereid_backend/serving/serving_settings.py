# SPDX-License-Identifier: Apache-2.0
"""Reads the Triton models' settings from config.pbtxt and from the variables NEREID_*.

An environment variable overrides the parameter of the same name.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.serving.pooling_tensor_names import SETTING_NAMES as POOLING_NAMES
from nereid_backend.text_settings import from_texts, split_texts

PREFIX = "NEREID_"

# Settings of the OpenAI frontend, of the start command and of the pooling models. Their variables
# have the same prefix, but the language model's stubs do not read them.
OTHER_NAMES = POOLING_NAMES | frozenset(
    {
        "api_key",
        "cors_origins",
        "ensemble",
        "grpc_url",
        "log_level",
        "max_body_bytes",
        "max_concurrent_requests",
        "max_prompts",
        "max_stored_response_bytes",
        "max_stored_responses",
        "openai_host",
        "openai_port",
        "python",
        "request_timeout_s",
        "served_model_name",
        "stored_response_age_s",
        "unread_timeout_s",
    }
)


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The settings of the Triton models, in addition to the engine's settings.

    Attributes:
        model: the folder of the checkpoint. A relative path in config.pbtxt is relative to the
            model repository, and a relative path in NEREID_MODEL to the working directory.
        reasoning_parser: the name of the format in which the checkpoint writes reasoning. Empty
            means that the format is derived from the chat template. "none" leaves reasoning in the
            content.
        tool_parser: the name of the format in which the checkpoint writes tool calls. Empty means
            that the format is derived from the chat template. "none" leaves tool calls in the
            content.
        parser_policy: "lenient" keeps text around tool calls and passes invalid arguments on.
            "strict" accepts only tool calls that directly follow the reasoning, and repairs or
            drops invalid arguments. Empty means the format's own policy.
        responses_per_second: the largest number of responses that all streams together send in one
            second. Tokens of a stream are merged until its next response. 0 means that the value
            depends on the number of CPUs.
        heartbeat_ms: the interval at which a request without new tokens sends an empty step. The
            server reports only with a step that the client has disconnected.
        keepalive_ms: the time without output after which a stream sends an empty response, so that
            the server's HTTP endpoint notices a disconnected client. 0 means never.
        stale_after_ms: the time after which a stream is aborted if its steps are not consumed. Some
            server versions drop the steps of a cancelled stream without reporting it.
        max_streams: the largest number of sequences in the executor, including waiting ones.
        engine_start_timeout_s: the time limit for loading a checkpoint.
        max_engine_restarts: the number of restarts of the engine process without a finished request
            in between, after which the executor gives up.
        engine_hang_timeout_s: the time limit of one engine step. An engine that exceeds it is
            killed and restarted. 0 means no limit.
        max_waiting_tokens: the largest number of prompt tokens of all waiting requests together. 0
            means no limit.
        max_pending_tokens: the largest number of unsent tokens of one stream. A stream that exceeds
            it ends with an error.
        default_queue_timeout_s: the time limit for waiting in the queue, for requests without the
            field queue_timeout. 0 means no limit.
        default_timeout_s: the time limit of a whole request, for requests without the field
            timeout. 0 means no limit.
        engine: "scripted" replaces the model by a test tool that writes scripted output (see
            scripted_engine.py). Empty means the real engine.
        script: the path of the script for the scripted engine.
    """

    model: str
    reasoning_parser: str = ""
    tool_parser: str = ""
    parser_policy: str = ""
    responses_per_second: int = 0
    heartbeat_ms: int = 250
    keepalive_ms: int = 0
    stale_after_ms: int = 5_000
    max_streams: int = 4096
    engine_start_timeout_s: int = 3600
    max_engine_restarts: int = 3
    engine_hang_timeout_s: int = 60
    max_waiting_tokens: int = 2**22
    max_pending_tokens: int = 65_536
    default_queue_timeout_s: float = 0.0
    default_timeout_s: float = 0.0
    engine: str = ""
    script: str = ""

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise ConfigError(
                f'engine: the value must be "scripted" or empty, but it is "{self.engine}".'
            )
        if self.parser_policy not in ("", "lenient", "strict"):
            raise ConfigError(
                f"parser_policy: the value must be lenient or strict, but it is "
                f'"{self.parser_policy}".'
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: the value must be at least 1, but it is {value}.")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name}: the value must be at least 0, but it is {value}.")

    @property
    def engine_module(self) -> str:
        """The name of the Python module that the engine process runs."""
        return _ENGINES[self.engine]


_POSITIVE = (
    "heartbeat_ms",
    "stale_after_ms",
    "max_streams",
    "max_pending_tokens",
    "engine_start_timeout_s",
)
_NOT_NEGATIVE = (
    "responses_per_second",
    "max_engine_restarts",
    "keepalive_ms",
    "engine_hang_timeout_s",
    "max_waiting_tokens",
    "default_queue_timeout_s",
    "default_timeout_s",
)
_ENGINES = {
    "": "nereid_backend.serving.executor.engine_process",
    "scripted": "nereid_backend.serving.executor.scripted_engine",
}


def read_settings(
    args: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[ServingSettings, EngineConfig]:
    """Return the settings of one Triton model.

    Args:
        args: the arguments of the model's `initialize`. "model_config" is JSON text, and
            "model_repository" is the folder of this model.
        environ: the environment variables. NEREID_X overrides the parameter x.

    Raises:
        ConfigError: a name is unknown, a value is wrong, or `model` is missing.
    """
    texts = parameters(args) | variables(PREFIX, environ, OTHER_NAMES)
    serving, engine = split_texts(texts, ServingSettings, EngineConfig)
    return from_texts(ServingSettings, serving), EngineConfig.from_settings(engine)


def parameters(args: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a model's config.pbtxt by name, without empty ones.

    The path of the checkpoint is made absolute; a relative path is relative to the repository.

    Args:
        args: the arguments of the model's `initialize`, as for `read_settings`.
    """
    entries = json.loads(args["model_config"]).get("parameters", {})
    texts = {name: value.get("string_value", "").strip() for name, value in entries.items()}
    texts = {name: text for name, text in texts.items() if text}
    if "model" in texts:
        repository = Path(args["model_repository"]).parent
        texts["model"] = str((repository / texts["model"]).resolve())
    return texts


def variables(
    prefix: str, environ: Mapping[str, str], others: Collection[str] = ()
) -> dict[str, str]:
    """Return the settings in the environment variables that begin with `prefix`.

    Empty variables are skipped. Example: with the prefix "NEREID_", the variable
    `NEREID_MAX_NUM_SEQS=8` returns `{"max_num_seqs": "8"}`.

    Args:
        prefix: the prefix of the variables' names.
        environ: all environment variables.
        others: settings that another program reads. They are skipped.
    """
    texts = {
        variable.removeprefix(prefix).lower(): text.strip()
        for variable, text in environ.items()
        if variable.startswith(prefix) and text.strip()
    }
    return {name: text for name, text in texts.items() if name not in others}
