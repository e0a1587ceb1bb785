# SPDX-License-Identifier: Apache-2.0
"""Loads the weights of an embedding, rerank or classification checkpoint."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.checkpoints.weight_arguments import weight_arguments
from nereid_backend.checkpoints.weight_problems import (
    check_unused_weights,
    describe_wrong_shape,
    remedy_for_missing_weight,
)
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.pooling.loading.checkpoint_spec import (
    BASE,
    CAUSAL,
    IMAGE_CAUSAL,
    MASKED,
    RETRIEVAL,
    SEQUENCE,
    TOKENS,
    TOWERS,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.late_interaction_files import (
    STANFORD_ARCHITECTURE,
    STANFORD_PROJECTION,
)

# The auto class of transformers for each kind of model, except RETRIEVAL and BASE. RETRIEVAL has no
# auto class. BASE has AutoModel, but a model of this kind is loaded without its head and pooler.
_AUTO: dict[str, Any] = {
    SEQUENCE: AutoModelForSequenceClassification,
    TOKENS: AutoModelForTokenClassification,
    MASKED: AutoModelForMaskedLM,
    CAUSAL: AutoModelForCausalLM,
    IMAGE_CAUSAL: AutoModelForImageTextToText,
    TOWERS: AutoModel,
}
_OUTPUT_LAYER = "lm_head.weight"
# If the name of a tensor ends with one of these suffixes, the tensor is constant. It is no error if
# a checkpoint lacks such a tensor, or contains such a tensor that the model does not need.
_SUFFIXES_OF_CONSTANTS = ("position_ids", "token_type_ids", "inv_freq")

# The errors with which `from_pretrained` reports that transformers does not support the model.
# ValueError: no class supports the config. KeyError: the type of the model is unknown. ImportError:
# the code of the model needs a package that is not installed.
_UNSUPPORTED_ERRORS = (ValueError, KeyError, ImportError)
# The errors that a damaged checkpoint causes in `from_pretrained`. OSError and SafetensorError: a
# file is missing or broken. RuntimeError: the weights have wrong shapes. TypeError and
# AttributeError: the config contains values that the code of the model cannot use.
_DAMAGE_ERRORS = (OSError, SafetensorError, RuntimeError, TypeError, AttributeError)


def load_encoder_weights(spec: CheckpointSpec, dtype: torch.dtype) -> PreTrainedModel:
    """Create the model on the CPU, and load its weights.

    Raises:
        ModelError: the weights are damaged or incomplete.
        UnsupportedModelError: transformers has no code for the model.
    """
    # The weights are in one of two places. For an ordinary checkpoint, transformers reads the files
    # in the folder. For a quantised checkpoint, Nereid dequantises the weights, and passes a dict.
    arguments = weight_arguments(spec.folder, spec.config, dtype)
    weights_are_dict = arguments["pretrained_model_name_or_path"] is None
    with _translated_errors(spec):
        load = _loading_function(spec, weights_are_dict=weights_are_dict)
        with quiet():
            model, report = load(
                **arguments, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    _check_missing_weights(spec, report["missing_keys"], report["unexpected_keys"])
    _check_ignored_weights(spec, report["unexpected_keys"], model)
    return model


def describe_unused_code(spec: CheckpointSpec, model: PreTrainedModel) -> str | None:
    """Return a warning if config.json names a class in Python code of the checkpoint.

    The class of transformers for the same model type was loaded instead. Example: the code of some
    embedding models computes attention to later tokens, too, unlike the class of transformers.

    Args:
        spec: the description of the checkpoint.
        model: the loaded model.
    """
    auto_class = _AUTO.get(spec.loader, AutoModel)
    classes: Any = getattr(spec.config, "auto_map", None)
    own_class = classes.get(auto_class.__name__) if isinstance(classes, dict) else None
    if not own_class:
        return None
    return (
        f"warning: {spec.folder}/config.json names the class {own_class} (auto_map), which is "
        f"Python code of the checkpoint and is not run. {type(model).__name__} of transformers is "
        "used instead. Compare some outputs with the model card, because the classes can differ."
    )


@contextmanager
def _translated_errors(spec: CheckpointSpec) -> Iterator[None]:
    """Convert errors of transformers in the `with` block to a ModelError or its subclass.

    An UnsupportedModelError means that transformers has no code for the model. Another ModelError
    means that the checkpoint is damaged.
    """
    try:
        yield
    except _UNSUPPORTED_ERRORS as error:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: {first_line(error)}"
        ) from error
    except _DAMAGE_ERRORS as error:
        raise ModelError(_describe_damage(spec, error)) from error


def _describe_damage(spec: CheckpointSpec, error: Exception) -> str:
    """Return the error message for a damaged checkpoint that transformers cannot load.

    `error` is the exception of transformers' `from_pretrained`.
    """
    loading_class = getattr(transformers, spec.architecture, None)
    wrong_shape = describe_wrong_shape(error, spec.folder, spec.config, loading_class)
    return wrong_shape or (
        f"the weights in {spec.folder} cannot be read ({first_line(error)}). Download the "
        "checkpoint again."
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context manager that hides the progress bars and the warnings of transformers."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_shown:
            transformers_logging.enable_progress_bar()


def _check_missing_weights(
    spec: CheckpointSpec, names: Iterable[str], unused: Iterable[str]
) -> None:
    """Raise a ModelError if the checkpoint lacks weights that the model needs.

    Constant tensors, such as "position_ids", may be missing, because the model computes them.

    Args:
        spec: the description of the checkpoint.
        names: the names of the model's weights that are not in the checkpoint.
        unused: the names of the tensors in the checkpoint that the model does not use.
    """
    missing = sorted(name for name in names if not name.endswith(_SUFFIXES_OF_CONSTANTS))
    if missing:
        raise ModelError(
            f"{spec.folder} lacks {len(missing)} weights that the task {spec.task} needs, such as "
            f"{missing[0]}. The model's output would be random. "
            f"{remedy_for_missing_weight(missing[0], sorted(unused))} If the checkpoint is "
            "complete, choose another task."
        )


def _check_ignored_weights(
    spec: CheckpointSpec, names: Iterable[str], model: PreTrainedModel
) -> None:
    """Raise an UnsupportedModelError if the output is wrong because the model ignores weights.

    Args:
        spec: the description of the checkpoint.
        names: the names of the weights in the checkpoint that the model does not use.
        model: the loaded model.
    """
    # The output layer of a language model may stay unused, because vectors are computed without
    # this layer.
    may_stay_unused = {_OUTPUT_LAYER} if spec.loader == BASE else set()
    unused = sorted(name for name in names if name not in may_stay_unused)
    check_unused_weights(spec.folder, unused, model)
    has_own_class = hasattr(transformers, spec.architecture)
    # If transformers has a class for the architecture, the unused weights belong to a head that
    # this task does not need.
    if not has_own_class:
        _check_similar_class(spec, unused)


def _check_similar_class(spec: CheckpointSpec, unused: list[str]) -> None:
    """Raise an UnsupportedModelError if the class that transformers loaded ignores needed weights.

    transformers has no class for the checkpoint's own architecture, so it has loaded the class of a
    similar architecture. `unused` lists the weights that this class does not use.
    """
    needed = [name for name in unused if not _may_stay_unused(spec, name)]
    if needed:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: transformers has no such class, and the class "
            f"for {spec.config.model_type} does not use {len(needed)} of the weights, such as "
            f"{needed[0]}. Use a model of another architecture."
        )


def _may_stay_unused(spec: CheckpointSpec, name: str) -> bool:
    """Return whether the weight `name` may stay unused when transformers loads the model.

    This function is for checkpoints whose class does not exist in transformers.
    """
    # Three kinds of weights may stay unused: the projection in Stanford's ColBERT checkpoints,
    # which Nereid loads separately; poolers (layers that follow the token vectors), which Nereid
    # does not run; and constant tensors.
    is_projection = spec.architecture == STANFORD_ARCHITECTURE and name == STANFORD_PROJECTION
    return is_projection or "pooler." in name or name.endswith(_SUFFIXES_OF_CONSTANTS)


def _loading_function(spec: CheckpointSpec, *, weights_are_dict: bool) -> Callable[..., Any]:
    """Return a function that loads the model: `from_pretrained` of a transformers class.

    Example: for a classifier in a folder, the result is the function of
    AutoModelForSequenceClassification.

    Args:
        spec: the description of the checkpoint.
        weights_are_dict: whether the caller passes the weights as a dict instead of a folder.

    Raises:
        UnsupportedModelError: transformers has no class for the model or its encoder.
    """
    if spec.loader == RETRIEVAL:
        return _retrieval_loading_function(spec)
    if spec.loader == BASE:
        return _loading_function_without_head(spec)
    auto_class = _AUTO[spec.loader]
    if weights_are_dict:
        # An auto class can only read a folder, so use the class that it would choose.
        return _model_class(auto_class, spec).from_pretrained  # type: ignore[no-any-return]
    # With trust_remote_code=True, an auto class would run Python files of the checkpoint.
    return partial(auto_class.from_pretrained, trust_remote_code=False)


def _retrieval_loading_function(spec: CheckpointSpec) -> Callable[..., Any]:
    """Return a function that loads a vision-language model for retrieval, such as ColPali.

    transformers has no auto class for these models, so the class is looked up by its name.

    Raises:
        UnsupportedModelError: transformers has no class for the model.
    """
    retrieval_class = getattr(transformers, spec.architecture, None)
    if retrieval_class is None:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: transformers has no class "
            f"{spec.architecture}. Use a model of another architecture."
        )
    return retrieval_class.from_pretrained  # type: ignore[no-any-return]


def _loading_function_without_head(spec: CheckpointSpec) -> Callable[..., Any]:
    """Return a function that loads a model without a head and without a pooler.

    A pooler is a layer that follows the token vectors. Nereid does not use the pooler, and the
    weights of a pooler are often untrained. AutoModel cannot leave out the pooler, so the result is
    the function of the class that AutoModel would choose.

    Raises:
        UnsupportedModelError: transformers has no class for the model or its encoder.
    """
    loaded_class = _class_without_head(spec)
    has_pooler = "add_pooling_layer" in inspect.signature(loaded_class.__init__).parameters
    if has_pooler:
        return partial(loaded_class.from_pretrained, add_pooling_layer=False)
    return loaded_class.from_pretrained  # type: ignore[no-any-return]


def _class_without_head(spec: CheckpointSpec) -> Any:  # noqa: ANN401 - a model class
    """Return transformers' class that computes token vectors.

    Of an encoder-decoder model, only the encoder is loaded, because it computes the token vectors.
    """
    model_class = _model_class(AutoModel, spec)
    is_encoder_decoder = getattr(spec.config, "is_encoder_decoder", False)
    return _encoder_class(spec, model_class) if is_encoder_decoder else model_class


def _model_class(auto_class: Any, spec: CheckpointSpec) -> Any:  # noqa: ANN401 - transformers' classes
    """Return the class that an auto class, such as AutoModel, assigns to the checkpoint's config.

    Raises:
        UnsupportedModelError: the auto class assigns no class to the config.
    """
    try:
        mapped = auto_class._model_mapping[type(spec.config)]
    except KeyError as error:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: Unrecognized configuration class "
            f"{type(spec.config)} for this kind of AutoModel: {auto_class.__name__}. Use a model "
            "of another architecture."
        ) from error
    # Some configs belong to several classes.
    classes = mapped if isinstance(mapped, list | tuple) else (mapped,)
    for model_class in classes:
        if model_class.__name__ == spec.architecture:
            return model_class
    return classes[0]


def _encoder_class(spec: CheckpointSpec, model_class: type) -> Any:  # noqa: ANN401 - a model class
    """For an encoder-decoder model, return transformers' class that contains only the encoder.

    Example: the class T5Model returns T5EncoderModel.
    """
    name = model_class.__name__.removesuffix("Model") + "EncoderModel"
    encoder_class = getattr(transformers, name, None)
    if encoder_class is None:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: it has an encoder and a decoder, and "
            f"transformers has no class {name} for the encoder alone. Use a model of another "
            "architecture."
        )
    return encoder_class
