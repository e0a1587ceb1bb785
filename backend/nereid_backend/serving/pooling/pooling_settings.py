# SPDX-License-Identifier: Apache-2.0
"""Settings of one pooling model: config.pbtxt parameters, overridden by NEREID_EMBEDDING_*."""

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
    """What the Triton model needs besides the library's own settings.

    Attributes:
        served_model_name: its name in the HTTP API; empty is the checkpoint's folder name.
        max_requests: at most so many requests in the model at once; more are refused.
        start_timeout_s: loading a checkpoint may take this long.
        hang_timeout_s: a worker that is at one step for so long hangs and is killed; 0 is no limit.
        max_restarts: worker processes that may die in a row before the model gives up.
    """

    served_model_name: str = ""
    max_requests: int = 4096
    start_timeout_s: int = 3600
    hang_timeout_s: int = 60
    max_restarts: int = 3

    def __post_init__(self) -> None:
        limits = {"max_requests": 1, "start_timeout_s": 1, "hang_timeout_s": 0, "max_restarts": 0}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """One pooling model's settings, read and checked.

    Attributes:
        variable: the environment variable of the checkpoint, for messages.
        serving: for the stub.
        config: for the worker; None when no checkpoint is to be served.
    """

    variable: str
    serving: PoolingServing
    config: PoolingConfig | None


def read_pooling_settings(
    kind: str, args: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> PoolingSettings:
    """Settings of one Triton model from what its ``initialize`` is given.

    Args:
        kind: "embedding" or "rerank", the middle of its variables' names.
        args: the Python backend's arguments: "model_config" (JSON) and "model_repository" (the
            folder of this model).
        environ: NEREID_EMBEDDING_X, say, overrides the parameter x; an empty value counts as unset.

    Raises:
        ConfigError: an unknown name or a wrong value; the message gives the variable's name.
    """
    prefix = f"{PREFIX}{kind.upper()}_"
    texts = _parameters(args) | variables(prefix, environ)
    ours, theirs = split_texts(texts, PoolingServing, PoolingConfig, prefix=f"{kind}_")
    try:
        serving = from_texts(PoolingServing, ours)
        if texts.get("model", NOT_SERVED).lower() == NOT_SERVED:
            return PoolingSettings(f"{prefix}MODEL", serving, None)
        config = PoolingConfig.from_settings(theirs)
    except ConfigError as error:
        raise ConfigError(f"{kind}_{error}") from None
    return PoolingSettings(f"{prefix}MODEL", serving, config)


def _parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The file's parameters; its default checkpoint counts only where it is there."""
    texts = parameters(args)
    if "model" in texts and not Path(texts["model"]).is_dir():
        texts["model"] = NOT_SERVED
    return texts
