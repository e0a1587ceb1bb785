# SPDX-License-Identifier: Apache-2.0
"""Chooses the class of transformers for a model, and loads the weights into this class."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.checkpoints.integer_panels import (
    fill_placeholders,
    round_weights,
    use_placeholders,
)
from nereid_backend.checkpoints.weight_arguments import (
    restore_generation_config,
    weight_arguments,
)
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.loading_progress import report_items

if TYPE_CHECKING:
    from transformers.distributed.configuration_utils import DistributedConfig


class _OwnAttentionError(Exception):
    """Raised if the model's class does not use transformers' attention interface."""


def load_with_attention(
    load: Callable[[str], PreTrainedModel], config: PretrainedConfig, attention: str
) -> PreTrainedModel | None:
    """Load the model with the attention `attention` of transformers' attention interface.

    Return None if the class of the model always uses its own attention.
    """
    try:
        model = load(attention)
    except _OwnAttentionError:
        return None
    # If the class is a part of transformers, `takes_attention_by_name` has already checked that the
    # class uses the attention interface. Otherwise, a Python file of the checkpoint defines the
    # class. Loading the model has imported this file, so the class can be checked now.
    is_class_of_transformers = model_class(config) is not None
    if is_class_of_transformers or model._can_set_attn_implementation():
        return model
    return None


def load_model(  # noqa: PLR0913 - as `load_checkpoint`
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    use_panels: bool,
    rounded_bits: int | None,
    distributed: "DistributedConfig | None",
    progress: Callable[[str], None],
    attention: str,
) -> PreTrainedModel:
    """Load the weights into the class of the model.

    Raises:
        _OwnAttentionError: the class does not accept the attention implementation `attention`.
        ModelError: the weights are broken, or transformers does not support the model.
    """
    arguments = weight_arguments(folder, config, dtype, is_lazy=rounded_bits is not None)
    reads_folder = arguments["pretrained_model_name_or_path"] is not None
    if not reads_folder and model_class(config) is None:
        raise UnsupportedModelError(
            f"quantised weights of the model type {config.model_type} are not supported, because "
            "transformers has no class for this type. Use a checkpoint that is not quantised."
        )
    weights = arguments.get("state_dict", {})
    if use_panels and weights:
        with torch.device("meta"):
            empty_model = model_class(config)(arguments["config"])
        if rounded_bits is not None:
            weights = round_weights(weights, empty_model, rounded_bits)
        weights = arguments["state_dict"] = use_placeholders(weights, empty_model, dtype)
    arguments |= {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
    }
    if distributed is not None:
        arguments["distributed_config"] = distributed
    model = _from_pretrained(folder, config, arguments, progress)
    fill_placeholders(model, weights.values(), progress)
    if not reads_folder:
        restore_generation_config(model, folder)
    return model


def _from_pretrained(
    folder: Path,
    config: PretrainedConfig,
    arguments: dict[str, Any],
    progress: Callable[[str], None],
) -> PreTrainedModel:
    """Call transformers' `from_pretrained` with `arguments`.

    `load_model` documents the errors. `folder` is the folder of the checkpoint, for messages.
    """
    try:
        # With output_loading_info=True, `from_pretrained` returns a pair. The type annotation of
        # `from_pretrained` does not mention this pair, so the type here is more general.
        load: Callable[..., Any] = (model_class(config) or AutoModelForCausalLM).from_pretrained
        with _report_reading(progress):
            model, report = load(**arguments, local_files_only=True, output_loading_info=True)
    except (ValueError, KeyError, ImportError) as error:
        if arguments["attn_implementation"] in str(error):
            # The class accepts only the attention implementations in its own table.
            raise _OwnAttentionError from error
        raise UnsupportedModelError(
            f"the model type {config.model_type} is not supported: {first_line(error)}"
        ) from error
    except ModelError:
        raise
    except Exception as error:
        # A broken file can cause an exception of any class. Examples are the exceptions of
        # safetensors, and RuntimeError if a tensor has a wrong shape.
        raise ModelError(
            f"the weights in {folder} cannot be read ({first_line(error)}). Download the "
            "checkpoint again."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} weights, such as {missing[0]}, so the model's output "
            "would be random. Download the checkpoint again."
        )
    return model  # type: ignore[no-any-return]


def model_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' are untyped
    """Return the class that runs `config` as a causal language model; None if there is none.

    If the checkpoint names a class of transformers for images and text, this class is returned. For
    most other models, AutoModelForCausalLM determines the class. If AutoModelForCausalLM knows no
    class, the result is the class in the checkpoint's field `architectures`, if this class can
    generate text. Example: a multimodal model to which the engine sends only text.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        class_for_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        if class_for_images.__name__ == name:
            return class_for_images
    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and named.can_generate() and not config.is_encoder_decoder:
            return named
        return None


def takes_attention_by_name(config: PretrainedConfig, text_config: PretrainedConfig) -> bool:
    """Return whether the decoder's class uses transformers' attention interface.

    Other classes ignore the name of an attention implementation, or raise an error for it.
    """
    candidates = [model_class(config), model_class(text_config)]
    classes = [candidate for candidate in candidates if candidate is not None]
    # If transformers has no class for the model, return True. `from_pretrained` then raises an
    # error with the reason.
    return not classes or any(one._can_set_attn_implementation() for one in classes)


@contextmanager
def _report_reading(progress: Callable[[str], None]) -> Iterator[None]:
    """Return a context that replaces transformers' progress bars by calls of `progress`."""

    def create_bar(
        factory: object, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Iterator[Any]:
        del factory, options
        return report_items(args[0], "reading weights", progress)

    previous = transformers_logging.set_tqdm_hook(create_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
