# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of the Triton models from config.pbtxt and the variables NEREID_*.

An environment variable overrides the parameter of the same name in config.pbtxt.
"""

import json
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nereid_backend.attention.cpu.instruction_sets import CPU_INSTRUCTIONS
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling_tensor_names import EMBEDDING, RERANK
from nereid_backend.settings_validation import (
    CheckpointPath,
    check_names,
    from_texts,
    setting_names,
    settings_class,
)

_NEREID = "NEREID_"
# In the settings `reasoning_parser` and `tool_parser`, the value `none` means that there is no
# parser.
NO_FORMAT = "none"
# This file contains the names of the OpenAI frontend's environment variables, without the prefix
# `NEREID_`. Each line contains one name. The names are in a file, because this package must not
# import the frontend. `make settings` writes the file.
_FRONTEND_VARIABLES = Path(__file__).with_name("frontend_variables.txt")


@settings_class
class ServingSettings:
    """The settings for serving a language model. The settings of its engine are in EngineConfig."""

    model: CheckpointPath
    """The folder of the checkpoint, as in EngineConfig."""

    reasoning_parser: str = ""
    """The name of the format of reasoning. By default, the format is derived from the chat
    template. `none` leaves reasoning in the content."""

    tool_parser: str = ""
    """The name of the format of tool calls. By default, the format is derived from the chat
    template. `none` leaves tool calls in the content."""

    chat_template: str = ""
    """The path of a Jinja file whose chat template replaces the checkpoint's one."""

    chat_template_kwargs: str = ""
    """A JSON object: the chat template's variables for requests that do not set them."""

    image_url_hosts: str = ""
    """The hosts from which images with `http` and `https` URLs are downloaded, separated by commas,
    such as `example.org,*.example.com`. `*` allows every host. Private addresses are always
    refused. By default, no image is downloaded."""

    image_url_timeout_s: PositiveFloat = 5.0
    """The longest time for downloading the images of a request."""

    image_folder: str = ""
    """The folder from which images with `file` URLs are read. By default, no file is read."""

    parser_policy: Literal["", "lenient", "strict"] = ""
    """`lenient` keeps text around tool calls and forwards invalid arguments. `strict` accepts tool
    calls only directly after the reasoning, and repairs or drops invalid arguments. By default,
    the format determines the policy."""

    responses_per_second: NonNegativeInt = 0
    """The largest number of responses per second, for all streams together. `0` means 160 for each
    CPU, but at most 4000."""

    heartbeat_ms: PositiveInt = 250
    """If a request has no new tokens, the executor checks at this interval whether the client is
    still connected."""

    keepalive_ms: NonNegativeInt = 0
    """If a stream has no new tokens, the server sends an empty response at this interval, so that
    Triton's HTTP endpoint detects a disconnected client. `0` means never."""

    stale_after_ms: PositiveInt = 5_000
    """The time after which a stream is aborted if the Triton server accepts no response of the
    stream."""

    max_streams: Annotated[int, Field(gt=0, le=2**20)] = 4096
    """The largest number of running and waiting sequences, at most 1048576."""

    engine_start_timeout_s: PositiveInt = 3600
    """The longest time for loading a checkpoint."""

    max_engine_restarts: NonNegativeInt = 3
    """The number of engine restarts without a finished request after which all requests are
    refused."""

    engine_hang_timeout_s: NonNegativeInt = 60
    """The longest time of one step. An engine process that exceeds this time is killed and
    restarted. `0` means no limit."""

    max_waiting_tokens: NonNegativeInt = 2**22
    """The largest number of prompt tokens of all waiting requests together. `0` means no limit."""

    max_pending_tokens: PositiveInt = 65_536
    """The largest number of generated tokens of one stream that wait to be sent. A stream that
    exceeds this number ends with an error."""

    default_queue_timeout_s: NonNegativeFloat = 0.0
    """The longest time in the queue for requests without the field `queue_timeout`. `0` means no
    limit."""

    default_timeout_s: NonNegativeFloat = 0.0
    """The longest total time of requests without the field `timeout`. `0` means no limit."""

    engine: Literal["", "scripted"] = ""
    """`scripted` replaces the model by a test program that writes scripted output. If this setting
    is not set, the real engine runs."""

    script: str = ""
    """The path of the script for the scripted engine."""

    @property
    def engine_module(self) -> str:
        """The name of the Python module that the engine process runs."""
        name = "scripted.scripted_engine" if self.engine == "scripted" else "engine_process"
        return f"nereid_backend.serving.executor.{name}"


@settings_class
class PoolingServing:
    """The settings of the models `embedding` and `rerank`. PoolingConfig has the other settings."""

    served_model_name: str = ""
    """The name of the model in the HTTP API. By default, the model has the name of
    the checkpoint's folder."""

    max_requests: PositiveInt = 4096
    """The largest number of requests in the model at the same time. Further requests are
    refused."""

    start_timeout_s: PositiveInt = 3600
    """The longest time for loading a checkpoint."""

    hang_timeout_s: NonNegativeInt = 60
    """The longest time of one step. A worker process that exceeds this time is killed and
    restarted. `0` means no limit."""

    max_restarts: NonNegativeInt = 3
    """The number of consecutive restarts of the worker process after which the server rejects all
    requests to the model."""


# If the setting `model` is `none`, the Triton model has no checkpoint and rejects all requests.
_NO_MODEL = "none"
_LANGUAGE_MODEL_NAMES = setting_names(ServingSettings, EngineConfig)
_POOLING_NAMES = setting_names(PoolingServing, PoolingConfig)


def read_settings(
    args: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[ServingSettings, EngineConfig]:
    """Return the settings for serving the language model, and the settings of its engine.

    The settings are the parameters in config.pbtxt. An environment variable overrides the
    parameter of the same name.

    Args:
        args: the arguments of the model's `initialize`. "model_config" is JSON text, and
            "model_repository" is the folder of this model.
        environ: the environment variables. NEREID_X overrides the parameter x.

    Raises:
        ConfigError: a name is unknown, a value is wrong, or `model` is missing.
    """
    parameters = _parameters(args)
    check_names(parameters, _LANGUAGE_MODEL_NAMES)
    _check_variable_names(environ)
    texts = parameters | _variables(_NEREID, environ)
    _check_ascii(texts, _LANGUAGE_MODEL_NAMES)
    # `texts` contains the settings of several classes, and the variables of other models, such as
    # NEREID_EMBEDDING_DTYPE. `from_texts` ignores the names that do not belong to the given class.
    return from_texts(ServingSettings, texts), from_texts(EngineConfig, texts)


def read_pooling_settings(
    kind: str, args: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> tuple[PoolingServing, PoolingConfig | None]:
    """Return the settings for serving a pooling model, and the settings of its worker process.

    The settings of the worker process are None if no checkpoint is served.

    Args:
        kind: "embedding" or "rerank".
        args: the arguments of the model's `initialize`, as for `read_settings`.
        environ: the environment variables. NEREID_EMBEDDING_X overrides the parameter x of the
            embedding model. An empty variable counts as missing.

    Raises:
        ConfigError: a name is unknown or a value is wrong. The message begins with the setting's
            name, such as "embedding_dtype".
    """
    prefix = f"{kind}_"
    texts = _read_pooling_texts(prefix, args, environ)
    serving = from_texts(PoolingServing, texts, prefix=prefix)
    if "model" not in texts:
        return serving, None
    return serving, from_texts(PoolingConfig, texts, prefix=prefix)


def _read_pooling_texts(
    prefix: str, args: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings of a pooling model, as a dict that maps names to unconverted texts.

    The setting `model` is left out if no checkpoint is served. `prefix` is "embedding_" or
    "rerank_". `read_pooling_settings` describes the other arguments.
    """
    parameters = _parameters(args)
    # config.pbtxt contains a default checkpoint, which need not be installed.
    if "model" in parameters and not Path(parameters["model"]).is_dir():
        del parameters["model"]
    check_names(parameters, _POOLING_NAMES, prefix=prefix)
    _check_variable_names(environ)
    texts = parameters | _variables(f"{_NEREID}{prefix}".upper(), environ)
    _check_ascii(texts, _POOLING_NAMES, prefix=prefix)
    if texts.get("model", "").lower() == _NO_MODEL:
        del texts["model"]
    return texts


def check_single_instance(args: Mapping[str, str]) -> None:
    """Raise a ConfigError if the config.pbtxt of a Triton model asks for several instances.

    Several instances of the executor or of a pooling model would each load the checkpoint, and a
    request to abort or to change something would reach only one of them. Several instances of the
    postprocessor would mix up the order of the steps of a stream.

    Args:
        args: the arguments of the model's `initialize`.
    """
    groups = json.loads(args["model_config"]).get("instance_group", [])
    # A group has `count` instances on each of its GPUs, or `count` instances on the CPU.
    count = sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups)
    if count > 1:
        raise ConfigError(
            f"instance_group: the model {args.get('model_name', '')} must have one instance, but "
            f"its config.pbtxt asks for {count}. Use: "
            "instance_group [ { count: 1 kind: KIND_CPU } ]"
        )


def _check_ascii(texts: Mapping[str, str], names: Collection[str], prefix: str = "") -> None:
    """Raise a ConfigError if the value of a setting contains a character outside ASCII.

    In a Python model of the Triton server, Python's encoding of file names is ASCII, whatever the
    locale is. Such a model therefore cannot open a folder whose name contains "é".

    Args:
        texts: the settings. The settings whose names are not in `names` are ignored.
        names: the names of the settings of a model.
        prefix: the prefix of the names in the error message, such as "embedding_".
    """
    for name in names:
        text = texts.get(name, "")
        if not text.isascii():
            # In a Python model of the Triton server, a character outside ASCII in an environment
            # variable is read as surrogates, which cannot be printed. Restore the character.
            shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            raise ConfigError(
                f"{prefix}{name}: the value {shown} contains a character outside ASCII, which the "
                "Python models of the Triton server cannot read. If the value is a path, create a "
                f"link with another name, for example: ln -s {shlex.quote(shown)} /tmp/checkpoint"
            )


def _parameters(args: Mapping[str, str]) -> dict[str, str]:
    """Return the nonempty parameters of a model's config.pbtxt, by name.

    The path of the checkpoint (`model`) becomes absolute. A relative path is relative to the model
    repository. Example: {"model": {"string_value": "../demo/chat"}} returns {"model":
    "/srv/demo/chat"} if the repository is /srv/model_repository.
    """
    parameters = json.loads(args["model_config"]).get("parameters", {})
    texts = {name: value.get("string_value", "").strip() for name, value in parameters.items()}
    nonempty = {name: text for name, text in texts.items() if text}
    if "model" in nonempty:
        # In Triton server's arguments, "model_repository" is the folder of this model. The parent
        # folder is the whole repository.
        repository = Path(args["model_repository"]).parent
        nonempty["model"] = str((repository / nonempty["model"]).resolve())
    return nonempty


def _variables(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nonempty environment variables whose names begin with `prefix`.

    The keys of the result are the names without the prefix, in lower case. Example: with the prefix
    "NEREID_EMBEDDING_", the variable `NEREID_EMBEDDING_DTYPE=float32` gives `{"dtype": "float32"}`.
    """
    return {
        variable.removeprefix(prefix).lower(): text.strip()
        for variable, text in environ.items()
        if variable.startswith(prefix) and text.strip()
    }


def _check_variable_names(environ: Mapping[str, str]) -> None:
    """Raise a ConfigError if the setting of an environment variable NEREID_* does not exist.

    A setting belongs to a model or to the frontend. The variables of all models are checked,
    whichever model starts. Otherwise, a misspelled name such as NEREID_EMBEDING_DTYPE would be
    ignored silently.
    """
    names = [
        variable.removeprefix(_NEREID)
        for variable, text in environ.items()
        if variable.startswith(_NEREID) and text.strip()
    ]
    check_names(names, _variable_names(), prefix=_NEREID)


def _variable_names() -> list[str]:
    """Return the names of all environment variables of Nereid, without the prefix NEREID_."""
    pooling = [f"{kind}_{name}" for kind in (EMBEDDING, RERANK) for name in _POOLING_NAMES]
    backend = [name.upper() for name in [*_LANGUAGE_MODEL_NAMES, *pooling]]
    frontend = _FRONTEND_VARIABLES.read_text(encoding="utf-8").split()
    return [*backend, *frontend, CPU_INSTRUCTIONS.removeprefix(_NEREID)]
