# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a pooling model from config.pbtxt and from environment variables.

The variables NEREID_EMBEDDING_* or NEREID_RERANK_* override the parameters of config.pbtxt.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.errors import ConfigError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.serving_settings import PREFIX, parameters, variables
from nereid_backend.text_settings import from_texts, split_texts

NOT_SERVED = "none"


@dataclass(frozen=True, slots=True)
class PoolingServing:
    """The settings of the Triton model, in addition to the settings in PoolingConfig.

    Attributes:
        served_model_name: the model's name in the HTTP API. Empty means the name of the
            checkpoint's folder.
        max_requests: the largest number of requests in the model at the same time. Further requests
            are refused.
        start_timeout_s: the time limit for loading a checkpoint.
        hang_timeout_s: the time limit of one step. A worker that exceeds it is killed and
            restarted. 0 means no limit.
        max_restarts: the number of consecutive restarts of the worker process after which the
            model gives up.
    """

    served_model_name: str = ""
    max_requests: int = 4096
    start_timeout_s: int = 3600
    hang_timeout_s: int = 60
    max_restarts: int = 3

    def __post_init__(self) -> None:
        minima = {"max_requests": 1, "start_timeout_s": 1, "hang_timeout_s": 0, "max_restarts": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value < minimum:
                raise ConfigError(
                    f"{name}: the value must be at least {minimum}, but it is {value}."
                )


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """The validated settings of one pooling model.

    Attributes:
        variable: the environment variable that names the checkpoint, for error messages.
        serving: the settings of the stub.
        config: the settings of the worker process; None if no checkpoint is served.
    """

    variable: str
    serving: PoolingServing
    config: PoolingConfig | None


def read_pooling_settings(
    kind: str, args: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> PoolingSettings:
    """Return the settings of one pooling model.

    Args:
        kind: "embedding" or "rerank".
        args: the arguments of the model's `initialize`. "model_config" is JSON text, and
            "model_repository" is the folder of this model.
        environ: the environment variables. NEREID_EMBEDDING_X overrides the parameter x of the
            embedding model. An empty variable counts as missing.

    Raises:
        ConfigError: a name is unknown or a value is wrong. The message begins with the setting's
            name, such as "embedding_dtype".
    """
    prefix = f"{PREFIX}{kind.upper()}_"
    texts = _parameters(args) | variables(prefix, environ)
    serving_texts, config_texts = split_texts(
        texts, PoolingServing, PoolingConfig, prefix=f"{kind}_"
    )
    try:
        serving = from_texts(PoolingServing, serving_texts)
        if texts.get("model", NOT_SERVED).lower() == NOT_SERVED:
            return PoolingSettings(f"{prefix}MODEL", serving, None)
        config = PoolingConfig.from_settings(config_texts)
    except ConfigError as error:
        raise ConfigError(f"{kind}_{error}") from None
    return PoolingSettings(f"{prefix}MODEL", serving, config)


def _parameters(args: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of config.pbtxt. Ignore a default checkpoint that is not installed."""
    texts = parameters(args)
    if "model" in texts and not Path(texts["model"]).is_dir():
        texts["model"] = NOT_SERVED
    return texts
