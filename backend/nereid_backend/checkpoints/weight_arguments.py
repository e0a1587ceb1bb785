# SPDX-License-Identifier: Apache-2.0
"""Chooses where transformers reads the weights of a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from nereid_backend.checkpoints.quantised_tensors import lazy_weights, quantisation_settings
from nereid_backend.checkpoints.safetensors_files import open_tensors


def weight_arguments(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of transformers' from_pretrained that select the weights.

    transformers reads the files of an unquantised checkpoint itself. For a quantised checkpoint, it
    gets weights that are read and dequantised one by one, and a config without
    quantization_config, because it would otherwise create layers for a quantisation library.

    Args:
        folder: the folder of the checkpoint.
        config: the config of the checkpoint.
        dtype: the data type of the weights in the model.

    Raises:
        ModelError: if the weights are missing or damaged.
        UnsupportedModelError: if the quantisation method is not supported.
    """
    settings = quantisation_settings(config)
    if settings is None:
        return {
            "pretrained_model_name_or_path": folder,
            "config": config,
            "use_safetensors": True,
        }
    return {
        "pretrained_model_name_or_path": None,
        "config": _without_quantisation(config),
        "state_dict": lazy_weights(open_tensors(folder), settings, dtype),
    }


def restore_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Set the generation config of a model that was not loaded from a folder. Mutates: the model.

    The engine reads the end-of-sequence tokens of the generation config.
    """
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def _without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config without the field quantization_config."""
    config = copy.deepcopy(config)
    for owner in (config, config.get_text_config(decoder=True)):
        if hasattr(owner, "quantization_config"):
            del owner.quantization_config
    return config
