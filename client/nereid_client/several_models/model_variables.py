"""The environment variables NEREID_* that contain settings of models.

`nereid serve --config` uses these settings as defaults for the models in models.toml.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

_ENGINE_SETTINGS = Path(__file__).parents[1] / "cli" / "engine_settings.json"
PREFIXES = {"llm": "NEREID_", "embedding": "NEREID_EMBEDDING_", "rerank": "NEREID_RERANK_"}
# These environment variables configure the test engine, not a model.
TEST_ENGINE_VARIABLES = {"NEREID_ENGINE", "NEREID_SCRIPT"}
# These environment variables do not set default values for the models in models.toml,
# because every model needs its own values for these settings.
_NEVER_DEFAULTS = ("NEREID_MODEL", "NEREID_SERVED_MODEL_NAME", "NEREID_LORA_ADAPTERS")


def without_model_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return all environment variables except the settings of models.

    The Triton server must not receive the settings, because a model prefers an environment variable
    to the setting in models.toml.
    """
    return {
        variable: value
        for variable, value in environment.items()
        if kind_of_variable(variable) is None and variable not in _NEVER_DEFAULTS
    }


def default_settings(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the default settings for each kind of model, from environment variables.

    Variables without a value are omitted. The settings in `_NEVER_DEFAULTS`, such as the
    checkpoint, are omitted, too, because each model has its own value.

    Example: NEREID_DTYPE=bfloat16 and NEREID_EMBEDDING_DTYPE=float32 return
    {"llm": {"dtype": "bfloat16"}, "embedding": {"dtype": "float32"}, "rerank": {}}.
    """
    defaults: dict[str, dict[str, str]] = {kind: {} for kind in PREFIXES}
    for variable, value in environment.items():
        kind = kind_of_variable(variable)
        if kind is None or not value.strip():
            continue
        setting = variable.removeprefix(PREFIXES[kind])
        if f"NEREID_{setting}" not in _NEVER_DEFAULTS:
            defaults[kind][setting.lower()] = value
    return defaults


def kind_of_variable(variable: str) -> str | None:
    """Return the kind of model that `variable` configures, or None if it configures no model.

    Examples: "NEREID_DTYPE" returns "llm", "NEREID_RERANK_DTYPE" returns "rerank", and
    "NEREID_OPENAI_PORT" returns None.
    """
    for kind in ("embedding", "rerank"):
        if variable.startswith(PREFIXES[kind]):
            return kind
    # The prefix "NEREID_" does not identify the variables of the language model, because all
    # variables of Nereid have this prefix.
    return "llm" if variable in _engine_variables() else None


@functools.cache
def _engine_variables() -> frozenset[str]:
    """Return the names of the environment variables that configure the language model."""
    return (
        frozenset(json.loads(_ENGINE_SETTINGS.read_text(encoding="utf-8"))) - TEST_ENGINE_VARIABLES
    )
