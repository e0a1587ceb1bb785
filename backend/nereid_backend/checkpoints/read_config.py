# SPDX-License-Identifier: Apache-2.0
"""Reads the config of a checkpoint, and checks that the config and the files are valid."""

import json
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoConfig,
    PretrainedConfig,
)

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK
from nereid_backend.checkpoints.safetensors_files import (
    ADAPTER_CONFIG_FILE,
    check_read_permission,
    describe_adapter,
    open_tensors,
)
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line

# One of these fields of config.json contains the number of layers, depending on the architecture.
_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# The fields in which a multimodal or encoder-decoder model describes its decoder.
_NESTED_CONFIGS = ("text_config", "decoder", "generator")
# A model whose layers share their weights has at most this number of layers.
_MAX_SHARED_LAYERS = 1000


def check_files(folder: Path) -> None:
    """Check that config.json and the weight files of a checkpoint exist and are complete.

    No weight is read.

    Raises:
        ModelError: a file is missing, incomplete or damaged.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder. Set model to the folder of a Hugging Face checkpoint."
        )
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER_CONFIG_FILE).is_file():
            raise ModelError(describe_adapter(folder))
        remedy = "Set model to the folder of a Hugging Face checkpoint."
        gguf_file = next(iter(sorted(folder.glob("*.gguf"))), None)
        if gguf_file is not None:
            remedy = f"Set model to a GGUF file, such as {gguf_file}."
        raise ModelError(f"{folder} has no config.json. {remedy}")
    check_read_permission(folder / "config.json")
    if not (folder / GGUF_LINK).is_file():
        # `open_tensors` raises a ModelError if a safetensors file is missing or damaged. A GGUF
        # file was checked when its checkpoint folder was created.
        tensors = open_tensors(folder, for_reading=False)
        _check_num_layers(folder / "config.json", len(tensors))


def _check_num_layers(file: Path, num_tensors: int) -> None:
    """Raise a ModelError if a config describes far more layers than the weight files contain.

    transformers would create all these layers, which can take hours and all memory.

    Args:
        file: the path of config.json.
        num_tensors: the number of tensors in the weight files.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # `read_config` reports the damaged file.
    if not isinstance(config, dict):
        return  # `read_config` reports this file, too.
    text_config = config.get("text_config")
    sections = [config, text_config] if isinstance(text_config, dict) else [config]
    # A valid model can have more layers than tensors, because several layers can share one tensor.
    max_layers = max(num_tensors, _MAX_SHARED_LAYERS)
    for name in _LAYER_FIELDS:
        for section in sections:
            num_layers = section.get(name)
            if isinstance(num_layers, int) and num_layers > max_layers:
                raise ModelError(
                    f"{file}: {name} is {num_layers}, but the weight files contain only "
                    f"{num_tensors} tensors. Download the file again."
                )


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """Return the config of a checkpoint.

    Raises:
        UnsupportedModelError: transformers does not know the model, or the config is damaged.
    """
    check_dtype_name(folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # A config with values of wrong types can cause any exception in transformers.
        raise UnsupportedModelError(
            f"transformers cannot load {folder}/config.json ({first_line(error)}). Python code of "
            "a checkpoint is only run if trust_remote_code is true."
            f"{_describe_newer_version(folder)}"
        ) from error
    check_architectures(folder, config)
    for field in _NESTED_CONFIGS:
        # transformers leaves an object unchanged if models of this type have no nested config.
        if isinstance(getattr(config, field, None), dict):
            raise UnsupportedModelError(
                f"{folder}/config.json: a model of the type {config.model_type} must not have the "
                f"field {field}. Move the field's values to the top level, or correct model_type."
            )
    return config


def check_dtype_name(folder: Path) -> None:
    """Raise an UnsupportedModelError if config.json contains the name of an unknown data type."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = [(field, config[field]) for field in ("dtype", "torch_dtype") if field in config]
    except (OSError, ValueError, TypeError, RecursionError):
        return  # transformers reports the damaged file.
    for field, name in names:
        if isinstance(name, str) and not isinstance(getattr(torch, name, None), torch.dtype):
            raise UnsupportedModelError(
                f"{folder}/config.json: {field} must be a data type of torch, such as bfloat16, "
                f"but it is {name!r}. Correct the file."
            )


def check_architectures(folder: Path, config: PretrainedConfig) -> None:
    """Raise an UnsupportedModelError if the field `architectures` is not a list of class names."""
    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModelError(
            f"{folder}/config.json: architectures must be a list of class names, but it is "
            f"{names!r}. Download the file again."
        )


def _describe_newer_version(folder: Path) -> str:
    """Return a sentence that suggests a newer version of transformers.

    config.json contains the version of transformers that wrote the file. If that version is newer
    than the installed version, the sentence names it.
    """
    installed_version = Version(transformers.__version__)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config_version = Version(str(config["transformers_version"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        config_version = None  # config.json names no version
    if config_version is None or config_version <= installed_version:
        return " A newer version of transformers may support the architecture."
    return (
        f" The file was written for transformers {config_version}, but the installed version is "
        f"{transformers.__version__}. Install the newer version."
    )
