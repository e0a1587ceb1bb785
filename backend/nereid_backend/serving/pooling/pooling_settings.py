# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a pooling model from config.pbtxt and from environment variables.

The variables NEREID_EMBEDDING_* or NEREID_RERANK_* override the parameters of config.pbtxt.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.serving_settings import PoolingServing, parameters, variables
from nereid_backend.settings_schema import check_names, from_texts, setting_names

_NOT_SERVED = "none"


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
    prefix = f"{kind}_"
    texts = parameters(args)
    check_names(texts, setting_names(PoolingServing, PoolingConfig), prefix=prefix)
    if "model" in texts and not Path(texts["model"]).is_dir():
        # The default checkpoint of config.pbtxt may be absent.
        texts["model"] = _NOT_SERVED
    texts |= variables(f"NEREID_{prefix}".upper(), environ)
    is_served = texts.get("model", _NOT_SERVED).lower() != _NOT_SERVED
    return PoolingSettings(
        f"NEREID_{prefix}MODEL".upper(),
        from_texts(PoolingServing, texts, prefix=prefix),
        from_texts(PoolingConfig, texts, prefix=prefix) if is_served else None,
    )
