# SPDX-License-Identifier: Apache-2.0
"""Validates the settings of all models before anything is loaded.

The check takes a fraction of a second.

    python -m nereid_backend.serving.check_settings MODEL_REPOSITORY

The program reads the NEREID_* variables and the parameters of each config.pbtxt, and prints one
line for each wrong setting. Its exit code is 2 if a setting is wrong, else 0. The program and the
models use the same code to read the settings. The program does not detect problems that depend on
the machine, such as too little memory or a missing GPU. The models report such problems when they
load.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.chat_template import read_chat_template, read_template_defaults
from nereid_backend.serving.pooling_tensor_names import EMBEDDING, RERANK
from nereid_backend.serving.serving_settings import (
    NO_FORMAT,
    ServingSettings,
    read_pooling_settings,
    read_settings,
)

EXIT_WRONG_SETTINGS = 2
# The Triton models that share the settings of the language model.
_LANGUAGE_MODELS = ("tokenizer", "executor", "postprocessor")
# A sum of memory shares is rounded to this number of decimal places, because floating-point sums
# are inexact. Example: 0.55 + 0.34 + 0.11 is 1.0000000000000002.
_SHARE_DIGITS = 6
_COMMENT_LINE = re.compile(r"^\s*#.*$", re.MULTILINE)
# Matches one parameter of config.pbtxt, such as
# parameters { key: "max_num_seqs" value: { string_value: "8" } }
_PARAMETER = re.compile(
    r'parameters\s*:?\s*\{\s*key\s*:\s*"([^"]*)"\s*,?\s*'
    r'value\s*:?\s*\{\s*string_value\s*:\s*"((?:[^"\\]|\\.)*)"'
)


def find_problems(repository: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return messages about wrong settings of the models in `repository`; [] if there are none.

    The check of a model ends at the first wrong setting. Models that share a setting report the
    same message, which is returned only once. If the settings of every model are valid, the result
    has one message for each GPU whose memory shares (gpu_memory_utilization) exceed 1 in total.
    """
    problems: list[str] = []
    # The settings of each engine. The keys are the return values of `_share_setting`.
    configs: dict[str, EngineConfig | PoolingConfig] = {}
    for model in (*_LANGUAGE_MODELS, EMBEDDING, RERANK):
        path = repository / model / "config.pbtxt"
        if not path.is_file():
            continue  # The repository does not serve this model.
        try:
            config = _check_model(model, _read_initialize_arguments(path), environ)
        except ConfigError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        if config is not None:
            configs[_share_setting(model)] = config
    if not problems:  # A memory share can be read only if all settings of its model are valid.
        problems += _find_overcommitted_gpus(configs)
    return problems


def _check_model(
    model: str, args: Mapping[str, str], environ: Mapping[str, str]
) -> EngineConfig | PoolingConfig | None:
    """Raise a ConfigError for the first wrong setting of the Triton model `model`.

    Return the settings of the model's engine; None if the model starts no engine.
    """
    if model in _LANGUAGE_MODELS:
        config = _read_and_check_engine_settings(args, environ)
        return config if model == "executor" else None
    _, worker_config = read_pooling_settings(model, args, environ)
    return worker_config


def _read_and_check_engine_settings(
    args: Mapping[str, str], environ: Mapping[str, str]
) -> EngineConfig:
    """Return the settings of the engine that computes the language model.

    Raises:
        ConfigError: a setting of the language model is wrong.
    """
    settings, config = read_settings(args, environ)
    read_chat_template(settings)  # Raises an error if the chat template is wrong.
    read_template_defaults(settings)  # Raises an error if a variable of the template is wrong.
    _check_formats(settings)
    _check_folders(settings, config)
    _check_length(config)
    return config


def _share_setting(model: str) -> str:
    """Return the name of the setting that limits the GPU memory of a model's engine.

    Examples: "executor" returns "gpu_memory_utilization", and "rerank" returns
    "rerank_gpu_memory_utilization".
    """
    return "gpu_memory_utilization" if model == "executor" else f"{model}_gpu_memory_utilization"


def _find_overcommitted_gpus(configs: Mapping[str, EngineConfig | PoolingConfig]) -> list[str]:
    """Return one message for each GPU whose memory shares add up to more than 1.

    The shares are checked even if this machine has no GPU. The keys of `configs` are the names of
    the settings of the shares, such as "embedding_gpu_memory_utilization".
    """
    problems = []
    for device, shares in _group_shares(configs).items():
        total = round(sum(shares.values()), _SHARE_DIGITS)
        if total > 1:
            terms = ", ".join(f"{setting} {share:g}" for setting, share in shares.items())
            problems.append(
                f"gpu_memory_utilization: the models on {device} would use {total:g} times its "
                f"memory ({terms}). Lower a share, or set the device of a model to another GPU."
            )
    return problems


def _group_shares(
    configs: Mapping[str, EngineConfig | PoolingConfig],
) -> dict[str, dict[str, float]]:
    """For each GPU, return the fraction of its memory that each model may use.

    Example: `{"cuda:0": {"gpu_memory_utilization": 0.7, "rerank_gpu_memory_utilization": 0.2}}`.
    """
    shares_by_device: dict[str, dict[str, float]] = defaultdict(dict)
    for setting, config in configs.items():
        if config.device != "cpu":
            # A device without a number, such as "cuda", is the first GPU.
            device = config.device if ":" in config.device else "cuda:0"
            shares_by_device[device][setting] = config.gpu_memory_utilization
    return shares_by_device


def _read_initialize_arguments(path: Path) -> dict[str, str]:
    """Read a config.pbtxt, and return the arguments that Triton passes to the model's `initialize`.

    Only those two arguments are returned from which settings are read: the parameters of the model
    as JSON text, and the folder of the model. The file is searched with a regular expression, so
    that no protobuf schema is needed. A parameter is not found if its value precedes its key, or if
    a comment inside the parameter begins in the middle of a line.

    Example: the line `parameters { key: "dtype" value: { string_value: "float32" } }` returns
    {"model_config": '{"parameters": {"dtype": {"string_value": "float32"}}}', ...}.
    """
    # Only whole lines are comments here, because the text of a value may contain "#".
    text_without_comments = _COMMENT_LINE.sub("", path.read_text(encoding="utf-8"))
    pairs = _PARAMETER.findall(text_without_comments)
    parameters = {key: {"string_value": value} for key, value in pairs}
    return {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(path.parent.absolute()),
    }


def _check_formats(settings: ServingSettings) -> None:
    """Raise a ConfigError if a parser setting is not the name of a chat format."""
    if settings.reasoning_parser not in ("", NO_FORMAT):
        _check_format("reasoning_parser", reasoning=settings.reasoning_parser)
    if settings.tool_parser not in ("", NO_FORMAT):
        _check_format("tool_parser", tools=settings.tool_parser)


def _check_format(setting: str, *, reasoning: str | None = None, tools: str | None = None) -> None:
    """Raise a ConfigError if the value of a setting is not the name of a chat format.

    The value is passed as `reasoning` or as `tools`, depending on which part of the format the
    setting selects.
    """
    # The parsers are imported here and not at the beginning of the file, because the import takes
    # as long as all checks together.
    from nereid_parsers import NereidParsersError, get_format

    try:
        get_format(reasoning=reasoning, tools=tools)
    except NereidParsersError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _check_folders(settings: ServingSettings, config: EngineConfig) -> None:
    """Raise a ConfigError if a setting names a folder that does not exist or lacks its main file.

    The hosts in image_url_hosts are also checked. The models would report such a setting, too, but
    only after they have loaded their libraries.
    """
    folder = config.draft_model
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"draft_model: {folder} is not a folder with a file config.json. Set draft_model to "
            "the folder of a Hugging Face checkpoint."
        )
    for name, folder in config.lora_adapters.items():
        if not (Path(folder) / "adapter_config.json").is_file():
            # PEFT writes an adapter whose name is not "default" into a subfolder with this name.
            configs = sorted(Path(folder).glob("*/adapter_config.json"))
            example = f", such as {configs[0].parent}" if configs else ""
            raise ConfigError(
                f"lora_adapters: the folder {folder} of the adapter {name!r} has no file "
                "adapter_config.json. Give the folder of a LoRA adapter in PEFT's layout"
                f"{example}."
            )
    if settings.image_url_hosts or settings.image_folder:
        # The import takes a quarter of a second, and few servers read images from URLs.
        from nereid_backend.vision.image_sources import ImageSources

        ImageSources(settings.image_url_hosts, folder=settings.image_folder)  # checks the settings


def _check_length(config: EngineConfig) -> None:
    """Raise a ConfigError if max_model_len exceeds the limit in the checkpoint's config.json.

    The engine checks further limits when it loads the checkpoint. An unreadable config.json is not
    reported here, because `nereid serve` has checked the file.
    """
    if config.max_model_len is None:
        return
    path = Path(config.model) / "config.json"
    decoder = _read_decoder_config(path)
    for name in ("max_position_embeddings", "n_positions"):
        limit = decoder.get(name)
        if isinstance(limit, int) and 0 < limit < config.max_model_len:
            raise ConfigError(
                f"max_model_len: the value must be at most {limit} ({name} in {path}), but it is "
                f"{config.max_model_len}."
            )


def _read_decoder_config(path: Path) -> dict[str, Any]:
    """Return the config of the text decoder in a config.json; {} if the file is not readable."""
    try:
        checkpoint = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(checkpoint, dict):
        return {}
    # If the model reads text and images, the field `text_config` contains the config of the text
    # decoder. The field can be null.
    decoder: dict[str, Any] = checkpoint.get("text_config") or checkpoint
    return decoder


def main(argv: Sequence[str] = sys.argv) -> int:
    """Print one line for each wrong setting, and return the exit code of the program."""
    problems = find_problems(Path(argv[1]))
    for line in problems:
        print(line)  # noqa: T201 - the program's output
    return EXIT_WRONG_SETTINGS if problems else 0


if __name__ == "__main__":
    sys.exit(main())
