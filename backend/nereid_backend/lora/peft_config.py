# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a LoRA adapter from adapter_config.json."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]  # the module `re` has no time limit

from nereid_backend.errors import ModelError

# The settings that adapter_config.json may contain. Settings that describe only the training are
# ignored.
_HARMLESS_SETTINGS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "eva_config"),
        *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config", "runtime_ephemeral_gpu"),
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("modules_to_save", "init_lora_weights"),
    }
)
# The time limit for matching the name of one layer against one regular expression. The regular
# expressions come from adapter_config.json. A match usually takes microseconds.
_PATTERN_SECONDS = 1
# PEFT can initialise an adapter with these methods, which also change the weights of the model.
# Such an adapter does not fit the original weights.
_CHANGED_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The content of a file adapter_config.json.

    Attributes:
        file: the path of the file, for error messages.
        settings: the settings by name.
    """

    file: Path
    settings: dict[str, Any]

    def rank(self, layer_name: str) -> object:
        """Return the rank that the file contains for a layer; None if the file contains no rank.

        The rank is not validated, so the result can be any JSON value.
        """
        return self._layer_setting("rank_pattern", layer_name, default=self.settings.get("r"))

    def scale(self, layer_name: str, rank: int) -> float:
        """Return the factor by which the product of lora_B and lora_A is multiplied in a layer.

        The factor is lora_alpha / rank, or lora_alpha / sqrt(rank) with use_rslora. Example:
        lora_alpha=16 and rank 4 give 4.0, or 8.0 with use_rslora.

        Raises:
            ModelError: if lora_alpha is not a number, or is too large for a float.
        """
        default = self.settings.get("lora_alpha")
        alpha = self._layer_setting("alpha_pattern", layer_name, default=default)
        largest = sys.float_info.max
        # The comparison is also False for NaN. `math.isfinite` would fail for 10**400.
        if not isinstance(alpha, int | float) or not -largest <= alpha <= largest:
            raise ModelError(
                f"{self.file}: lora_alpha must be a number between -{largest:.2g} and "
                f"{largest:.2g}, but the file has {alpha!r}."
            )
        divisor = math.sqrt(rank) if self.settings.get("use_rslora") else rank
        return float(alpha / divisor)

    def _layer_setting(self, setting: str, layer_name: str, *, default: object) -> object:
        """Return the value of a setting for one layer; `default` if no pattern matches the layer.

        The setting maps regular expressions (patterns) of layer names to values.

        Example: with rank_pattern={"q_proj": 2} and the default 8, the layer "layers.0.q_proj" has
        the rank 2, and the layer "layers.0.k_proj" has the rank 8.

        Raises:
            ModelError: if the setting is not an object, or a pattern is not a regular expression.
        """
        patterns = self.settings.get(setting) or {}
        if not isinstance(patterns, dict):
            raise self._patterns_error(setting)
        for pattern, value in patterns.items():
            try:
                is_match = _matches(pattern, layer_name)
            except TimeoutError as error:
                raise ModelError(
                    f"{self.file}: the regular expression {pattern!r} in {setting} takes more than "
                    f"{_PATTERN_SECONDS} second to search. Simplify the expression."
                ) from error
            except (regex.error, OverflowError) as error:
                raise self._patterns_error(setting) from error
            if is_match:
                return value
        return default

    def _patterns_error(self, setting: str) -> ModelError:
        """Return the error for a setting that does not map regular expressions to values."""
        return ModelError(
            f"{self.file}: {setting} must be an object whose keys are regular expressions, but "
            f"the file has {self.settings[setting]!r}."
        )


def _matches(pattern: str, layer_name: str) -> bool:
    """Return whether a pattern matches a layer name, or the part of the name after any of its dots.

    Example: "q_proj" matches "layers.0.q_proj".

    Raises:
        regex.error, OverflowError: the pattern is not a valid regular expression.
        TimeoutError: the search takes too long.
    """
    text = rf"(.*\.)?({pattern})"
    return regex.fullmatch(text, layer_name, timeout=_PATTERN_SECONDS) is not None


def parse_config(file: Path, text: bytes) -> PeftConfig:
    """Parse the content of adapter_config.json, and check that it describes a plain LoRA adapter.

    Args:
        file: the path of the file, for error messages.
        text: the content of the file.

    Raises:
        ModelError: if the settings describe something other than a plain LoRA adapter.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: the file is not valid JSON ({error}).") from error
    settings: dict[str, Any] = config if isinstance(config, dict) else {}
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise ModelError(
            f"{file}: peft_type must be LORA, but the file has {peft_type!r}. Merge the adapter "
            "into the model if PEFT can merge this type, or train a LoRA adapter."
        )
    _check_changed_parts(file, settings)
    _check_unknown_settings(file, settings)
    return PeftConfig(file, settings)


def _check_changed_parts(file: Path, config: dict[str, Any]) -> None:
    """Raise a ModelError if an adapter changes anything other than the outputs of linear layers.

    Such an adapter replaces whole modules or biases, or also changes the weights of the model.

    Args:
        file: the path of adapter_config.json, for error messages.
        config: the content of adapter_config.json.
    """
    saved_modules = config.get("modules_to_save")
    if saved_modules:
        raise ModelError(
            f"{file}: modules_to_save: the adapter replaces whole modules ({saved_modules}), "
            "which is not supported. Merge the adapter into the model, or train it without "
            "modules_to_save."
        )
    if config.get("bias", "none") != "none":
        raise ModelError(
            f"{file}: bias must be 'none', but the file has {config['bias']!r}. Merge the adapter "
            "into the model."
        )
    # Some methods that initialise an adapter also change the weights of the model.
    initialisation = config.get("init_lora_weights")
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGED_WEIGHTS):
        raise ModelError(
            f"{file}: init_lora_weights is {initialisation!r}, so the adapter also changes the "
            "weights of the model. Convert the adapter to a plain LoRA adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )


def _check_unknown_settings(file: Path, config: dict[str, Any]) -> None:
    """Raise a ModelError if adapter_config.json has a setting whose effect is unknown.

    A setting whose value is empty or false has no effect.
    """
    for setting, value in config.items():
        is_unknown = setting not in _HARMLESS_SETTINGS
        if is_unknown and value:
            raise ModelError(
                f"{file}: the setting {setting} has the value {value!r}, and this server does not "
                "support such adapters. Merge the adapter into the model."
            )
