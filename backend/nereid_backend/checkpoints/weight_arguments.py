# SPDX-License-Identifier: Apache-2.0
"""Creates the arguments with which transformers loads the weights of a checkpoint.

transformers either reads the files of the checkpoint, or gets a dict of weights. A weight in the
dict is read and dequantised when transformers needs it.
"""

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import is_peft_available

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK
from nereid_backend.checkpoints.quantised_tensors import lazy_weights, quantisation_settings
from nereid_backend.checkpoints.safetensors_files import (
    ADAPTER_CONFIG_FILE,
    INDEX,
    USUAL_FILE,
    open_tensors,
)
from nereid_backend.errors import ModelError, first_line

logger = logging.getLogger(__name__)


def weight_arguments(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, as_dict: bool = False
) -> dict[str, Any]:
    """Return the arguments with which transformers' from_pretrained loads a checkpoint's weights.

    For an unquantised checkpoint whose files have the usual names, the arguments contain the
    folder, and transformers reads the files. In all other cases, the arguments contain a dict of
    weights ("state_dict"). Each weight in the dict is read and dequantised when transformers needs
    it.

    Args:
        folder: the folder of the checkpoint.
        config: the config of the checkpoint.
        dtype: the data type of the weights in the model.
        as_dict: whether the arguments must contain a dict. The caller can replace weights in the
            dict, for example by rounded weights.

    Raises:
        ModelError: if the weights are missing or damaged.
        UnsupportedModelError: if the quantisation method is not supported.
    """
    gguf_link = folder / GGUF_LINK
    if gguf_link.is_file():
        return _arguments_with_weights(config, _gguf_weights(gguf_link, config, dtype))
    _warn_about_adapter(folder)
    settings = quantisation_settings(config)
    if settings is None and _can_transformers_read(folder) and not as_dict:
        return {
            "pretrained_model_name_or_path": folder,
            "config": config,
            "use_safetensors": True,
        }
    weights = lazy_weights(open_tensors(folder), settings, dtype)
    return _arguments_with_weights(_without_quantisation(config), weights)


def _warn_about_adapter(folder: Path) -> None:
    """Log a warning if the folder of a checkpoint also contains an adapter."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        logger.warning(
            "%s also contains an adapter, which is not applied to the model. To apply it, merge it "
            "into the model, or set lora_adapters to name=%s.",
            folder,
            folder,
        )


def _can_transformers_read(folder: Path) -> bool:
    """Return whether transformers can read the weight files of an unquantised checkpoint.

    The files must have the usual names. transformers also requires the field `metadata` of an
    index, which some programs do not write. If the library PEFT is installed, transformers would
    apply an adapter in the folder to the model.
    """
    if (folder / ADAPTER_CONFIG_FILE).is_file() and is_peft_available():
        return False
    if (folder / USUAL_FILE).is_file():
        return True
    index = folder / INDEX
    return index.is_file() and "metadata" in json.loads(index.read_text(encoding="utf-8"))


def _arguments_with_weights(
    config: PretrainedConfig, weights: Mapping[str, object]
) -> dict[str, Any]:
    """Return arguments of from_pretrained that pass the weights as a dict instead of a folder."""
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


def _gguf_weights(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights of a GGUF file by name."""
    # Only GGUF files need the gguf library.
    from nereid_backend.checkpoints.gguf.gguf_file import read_gguf
    from nereid_backend.checkpoints.gguf.gguf_weights import gguf_weights

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return dict(gguf_weights(read_gguf(path.resolve()), heads, kv_heads, dtype))


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the generation config in a folder; None if the folder has no generation config.

    transformers does not set the generation config if it loads the weights from a dict, so the
    caller sets it. The engine needs the end-of-sequence tokens in the generation config.

    Raises:
        ModelError: if the file is damaged.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # A file with values of wrong types can cause any exception in transformers.
        raise ModelError(
            f"{file} cannot be read ({first_line(error)}). Correct or delete the file."
        ) from error


def _without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config without the field quantization_config.

    With this field, transformers would create the layers of a quantisation library.
    """
    config = copy.deepcopy(config)
    for owner in (config, config.get_text_config(decoder=True)):
        if hasattr(owner, "quantization_config"):
            del owner.quantization_config
    return config
