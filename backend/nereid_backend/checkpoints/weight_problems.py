# SPDX-License-Identifier: Apache-2.0
"""Describes weights of a checkpoint that are missing, unused or of the wrong shape."""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK
from nereid_backend.checkpoints.quantised_tensors import QUANTISED_SUFFIXES, quantisation_settings
from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.errors import ModelError, UnsupportedModelError

logger = logging.getLogger(__name__)

_NUMBERED_LAYER = re.compile(r"(.*?\.\d+)\.")


def check_missing_weights(folder: Path, names: list[str], unused: list[str]) -> None:
    """Raise a ModelError if weights are missing from a checkpoint.

    Args:
        folder: the folder of the checkpoint.
        names: the names of the weights that the checkpoint lacks.
        unused: the names of the tensors in the checkpoint that the model does not use.
    """
    if names:
        raise ModelError(
            f"{weights_path(folder)} lacks {len(names)} weights, such as {names[0]}, so the "
            f"model's output would be random. {remedy_for_missing_weight(names[0], unused)}"
        )


def remedy_for_missing_weight(name: str, unused: Iterable[str]) -> str:
    """Return a sentence that tells users what to do if a weight is missing from a checkpoint.

    Wrappers for training add prefixes to the names of weights. Example: torch.compile writes
    "_orig_mod.lm_head.weight" instead of "lm_head.weight".

    Args:
        name: the name of the missing weight.
        unused: the names of the tensors in the checkpoint that the model does not use.
    """
    for other in unused:
        if other.endswith(f".{name}"):
            return (
                f"The files contain {other} instead. Save the model again without the wrapper that "
                f"added the prefix {other.removesuffix(name)!r}, or rename the tensors."
            )
    if name.endswith("lm_head.weight"):
        return (
            "If the model's output layer is its embedding table, set tie_word_embeddings to true "
            "in config.json. Otherwise, download the checkpoint again."
        )
    return "Download the checkpoint again."


def weights_path(folder: Path) -> Path:
    """Return the path of the weights. Error messages contain this path.

    If `folder` contains a link to a GGUF file, return the path of the GGUF file. Otherwise, return
    `folder`.
    """
    link = folder / GGUF_LINK
    return link.resolve() if link.is_file() else folder


def check_unused_weights(folder: Path, names: list[str], model: PreTrainedModel) -> None:
    """Raise an UnsupportedModelError if the model ignores weights that a correct output requires.

    These weights are required:
    - Every tensor of a GGUF file.
    - The tensors of quantised weights, such as scales. The model ignores scales if config.json does
      not describe the quantisation.
    - A bias of one of the model's layers, if the model has created the layer without a bias. Only a
      bias of zeros may be ignored; see `_is_needed_by_layer`.

    Other checkpoints than GGUF files often contain extra tensors. If an extra tensor is a weight in
    one of the model's numbered layers, only log a warning, because the output may still be right.

    Args:
        folder: the folder of the checkpoint.
        names: the names of the weights in `folder` that the model does not use.
        model: the loaded model.
    """
    if (folder / GGUF_LINK).is_file():
        if names:
            raise UnsupportedModelError(
                f"{weights_path(folder)}: the model does not use {len(names)} weights of the "
                f"file, such as {names[0]}, so the model's output would be wrong. Use "
                "the model's safetensors files."
            )
        return
    if problem := _describe_quantised(folder, names):
        raise UnsupportedModelError(problem)
    in_layers = [name for name in names if _is_weight_in_layer(name, model)]
    if in_layers:
        logger.warning(
            "%s: %s of transformers does not use %d weights of its layers, such as %s. If "
            "config.json does not belong to these weights, the output is wrong.",
            *(folder, type(model).__name__, len(in_layers), in_layers[0]),
        )
    _check_needed_weights(folder, names, model)


def _check_needed_weights(folder: Path, names: list[str], model: PreTrainedModel) -> None:
    """Raise an UnsupportedModelError if the output is wrong because the model ignores a weight.

    Example: the file contains a bias for a linear layer, but the model creates this layer without a
    bias. If an ignored weight contains only zeros, the output is correct, so no error is raised.
    Some programs write a bias of zeros for a layer without a bias. `check_unused_weights` describes
    the arguments.
    """
    needed = [name for name in names if _is_needed_by_layer(name, model)]
    tensors = open_tensors(folder) if needed else {}
    for name in needed:
        # If transformers has renamed a weight, the files contain the weight under another name. The
        # weight is then not checked.
        if name in tensors and bool(tensors[name].read().any()):
            raise UnsupportedModelError(
                f"{folder}: {type(model).__name__} of transformers does not use {len(needed)} "
                f"weights of the layers, such as {name}, so the output would be wrong. If "
                "config.json lacks a setting, such as attention_bias, correct the file. Otherwise, "
                "use another checkpoint."
            )


def _is_weight_in_layer(name: str, model: PreTrainedModel) -> bool:
    """Return whether `name` is the name of a weight in one of a model's numbered layers.

    Example: "model.layers.0.self_attn.q_norm.weight" gives True if the model has "model.layers.0".
    """
    layer = _NUMBERED_LAYER.match(name)
    if layer is None or not name.endswith(".weight"):
        return False
    return _find_module(layer[1], model) is not None


def _is_needed_by_layer(name: str, model: PreTrainedModel) -> bool:
    """Return whether the output of a layer is wrong because the model ignores the weight `name`.

    `name` is the name of a weight in the files that the model does not use. The result is True in
    two cases:
    - The weight is the bias of a layer that the model creates without a bias.
    - The weight is BERT's embedding of relative positions, which transformers no longer supports.
    """
    if name.endswith(".distance_embedding.weight"):
        return True
    layer_name, _, kind = name.rpartition(".")
    if kind != "bias":
        return False
    layer = _find_module(layer_name, model)
    has_weight = isinstance(getattr(layer, "weight", None), torch.Tensor)
    return has_weight and getattr(layer, "bias", None) is None


def _find_module(name: str, model: PreTrainedModel) -> nn.Module | None:
    """Return the module `name` of a model; None if the model has no such module.

    Names of a model with a head begin with the prefix of the model, and names of a model without a
    head do not. If only the saved model had a head, the file contains, for example,
    "bert.encoder.layer.0", and the module is "encoder.layer.0". If only the loaded model has a
    head, the file contains "layers.0", and the module is "model.layers.0". Therefore, the name
    without the prefix and the name with the prefix are also tried.
    """
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        try:
            module: nn.Module = model.get_submodule(candidate)
            return module
        except AttributeError:
            continue
    return None


def _describe_quantised(folder: Path, names: Iterable[str]) -> str | None:
    """Return a message about quantised weights in a checkpoint without quantization_config.

    `names` contains the names of tensors in `folder`. The result is None if no name belongs to a
    quantised weight.
    """
    quantised = [name for name in names if name.endswith(QUANTISED_SUFFIXES)]
    if not quantised:
        return None
    return (
        f"{folder} contains {len(quantised)} tensors of quantised weights, such as "
        f"{quantised[0]}, but its config.json has no quantization_config that describes them, so "
        "the weights would be wrong. Use a checkpoint whose config.json has this field, or one "
        "that is not quantised."
    )


def describe_wrong_shape(
    error: Exception,
    folder: Path,
    config: PretrainedConfig,
    loading_class: Any,  # noqa: ANN401 - transformers' are untyped
) -> str | None:
    """Return a message about the weight whose wrong shape caused an exception of transformers.

    transformers only logs the names of such weights. The result is None if `error` has another
    cause, or if the weight has one name in the file and another name in the model.

    Args:
        error: the exception of transformers' `from_pretrained`.
        folder: the folder of the checkpoint.
        config: the config of the checkpoint.
        loading_class: the class of the model; None if transformers has no class for the model.
    """
    # transformers raises an exception of a general class if the shape of a weight is wrong. Such an
    # exception is recognised by its message, which recommends the argument
    # `ignore_mismatched_sizes`.
    is_about_shape = "ignore_mismatched_sizes" in str(error)
    if loading_class is None or not is_about_shape:
        return None
    if (folder / GGUF_LINK).is_file():
        return None
    tensors = open_tensors(folder, for_reading=False)
    is_quantised = quantisation_settings(config) is not None
    if not is_quantised and (problem := _describe_quantised(folder, sorted(tensors))):
        return problem
    needed_shapes = _shapes_of_weights(loading_class, config)
    for name, tensor in tensors.items():
        needed_shape = needed_shapes.get(name, tensor.shape)
        has_only_other_rows = (
            len(tensor.shape) == len(needed_shape) and tensor.shape[1:] == needed_shape[1:]
        )
        # In a quantised checkpoint, the shape of a stored tensor can differ from the shape of the
        # weight in the model. Therefore, only a wrong number of rows is a problem in a quantised
        # checkpoint.
        if tensor.shape != needed_shape and (has_only_other_rows or not is_quantised):
            remedy = "Download the checkpoint again."
            # Some programs add tokens to a model, and do not change vocab_size.
            num_tokens = getattr(config.get_text_config(), "vocab_size", None)
            if has_only_other_rows and needed_shape[0] == num_tokens:
                remedy = f"Set vocab_size to {tensor.shape[0]}, or download the checkpoint again."
            return (
                f"the tensor {name} in {tensor.file} has the shape {tensor.shape}, but "
                f"{folder}/config.json requires the shape {needed_shape}. {remedy}"
            )
    return None


def _shapes_of_weights(
    loading_class: Callable[[PretrainedConfig], nn.Module], config: PretrainedConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by name. The class and the config define the model."""
    # On the device "meta", the weights of a model take no memory.
    with torch.device("meta"):
        weights = loading_class(config).state_dict()
    return {name: tuple(weight.shape) for name, weight in weights.items()}
