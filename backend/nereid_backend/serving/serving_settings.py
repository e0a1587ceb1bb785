# SPDX-License-Identifier: Apache-2.0
"""Settings of the Triton models: config.pbtxt parameters, overridden by NEREID_* variables."""

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

# Variables of the same prefix that the OpenAI frontend, the launcher or the pooling models read.
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
    """What the Triton models need besides the engine's own settings.

    Attributes:
        model: folder of the checkpoint; a relative path in config.pbtxt counts from the model
            repository, one in NEREID_MODEL from the working directory.
        reasoning_parser: name of the format in which the checkpoint writes reasoning; empty finds
            out from its chat template, "none" leaves reasoning in the content.
        tool_parser: the same for tool calls.
        parser_policy: "lenient" keeps text around calls and passes broken arguments on; "strict"
            takes only calls that follow the reasoning directly and repairs or drops broken
            arguments; empty is the format's own.
        responses_per_second: ceiling on the responses of all streams together. Each stream's
            tokens are merged until its turn comes; 0 chooses by the number of CPUs.
        heartbeat_ms: a request without responses sends an empty step this often, because only a
            step can find out that its client has gone.
        keepalive_ms: a stream that has said nothing for so long sends an empty response, by which
            the server's HTTP door finds out that its client has gone; 0 never does.
        stale_after_ms: a stream whose steps have not been consumed for so long is aborted, where
            the server drops a cancelled stream's steps without a word.
        max_streams: at most so many requests in the executor at once, waiting ones included.
        engine_start_timeout_s: loading a checkpoint may take this long.
        max_engine_restarts: engine processes that may die in a row, without one finished request
            between, before the executor gives up.
        engine_hang_timeout_s: an engine that is at one step for so long hangs and is killed; 0 is
            no limit.
        max_waiting_tokens: prompts that wait have at most so many tokens together; 0 is no limit.
        max_pending_tokens: a stream for which more tokens wait to be sent is ended.
        default_queue_timeout_s: how long a request that does not say so (queue_timeout) waits for
            its turn; 0 is no limit.
        default_timeout_s: the same for all of its time (timeout).
        engine: "scripted" is a test tool that writes what a script says in place of a model; see
            scripted_engine.py.
        script: path of that script.
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
            raise ConfigError(f'engine: must be "scripted" or left out, got "{self.engine}"')
        if self.parser_policy not in ("", "lenient", "strict"):
            raise ConfigError(
                f'parser_policy: must be lenient or strict, got "{self.parser_policy}"'
            )
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be at least 0, got {getattr(self, name)}")

    @property
    def engine_module(self) -> str:
        """What the engine's process runs."""
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
    """Settings of one Triton model from what its ``initialize`` is given.

    Args:
        args: the Python backend's arguments: "model_config" (JSON) and "model_repository" (the
            folder of this model).
        environ: environment variables; NEREID_X overrides the parameter x.

    Raises:
        ConfigError: an unknown name, a wrong value, or no model.
    """
    texts = parameters(args) | variables(PREFIX, environ, OTHER_NAMES)
    serving, engine = split_texts(texts, ServingSettings, EngineConfig)
    return from_texts(ServingSettings, serving), EngineConfig.from_settings(engine)


def parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The parameters of a model's config.pbtxt that are not empty, by name.

    Args:
        args: as for `read_settings`; a checkpoint's relative path counts from the repository.
    """
    found = json.loads(args["model_config"]).get("parameters", {})
    texts = {name: value.get("string_value", "").strip() for name, value in found.items()}
    texts = {name: text for name, text in texts.items() if text}
    if "model" in texts:
        repository = Path(args["model_repository"]).parent
        texts["model"] = str((repository / texts["model"]).resolve())
    return texts


def variables(
    prefix: str, environ: Mapping[str, str], others: Collection[str] = ()
) -> dict[str, str]:
    """The environment variables with a prefix that are not empty, by lower-case name without it.

    Args:
        prefix: of their names.
        environ: all variables.
        others: names that somebody else reads.
    """
    texts = {
        variable.removeprefix(prefix).lower(): text.strip()
        for variable, text in environ.items()
        if variable.startswith(prefix) and text.strip()
    }
    return {name: text for name, text in texts.items() if name not in others}
