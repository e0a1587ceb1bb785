# SPDX-License-Identifier: Apache-2.0
"""Chooses the transformers class of a model, and loads the weights of the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
    LazyWeight,
    Placeholder,
    fill_placeholders,
    round_weights,
    use_placeholders,
)
from nereid_backend.checkpoints.weight_arguments import (
    read_generation_config,
    weight_arguments,
)
from nereid_backend.checkpoints.weight_problems import (
    check_missing_weights,
    check_unused_weights,
    describe_wrong_shape,
    weights_path,
)
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.loading_progress import report_items

if TYPE_CHECKING:
    from transformers.distributed.configuration_utils import DistributedConfig


# The exceptions that transformers raises if it does not support a model.
_UNSUPPORTED_ERRORS = (ValueError, KeyError, ImportError)


class OwnAttentionError(Exception):
    """Raised if the model's class does not use transformers' attention interface."""


def load_with_attention(
    load: Callable[[str], PreTrainedModel], config: PretrainedConfig, attention: str
) -> PreTrainedModel | None:
    """Load a model that calls the attention function registered under the name `attention`.

    transformers' attention interface is a registry of attention functions. Return None if the class
    of the model ignores this registry and always uses its own attention. The caller can then load
    the model without the registered function.

    Args:
        load: loads the model. The argument is the name of the attention function. `load` raises an
            OwnAttentionError if the class does not accept this name.
        config: the config of the model.
        attention: the name of a registered attention function.
    """
    try:
        model = load(attention)
    except OwnAttentionError:
        return None
    return model if _uses_registered_attention(model, config) else None


def _uses_registered_attention(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Return whether a loaded model calls attention functions of transformers' registry."""
    # If the class of the model is part of the library transformers, `takes_attention_by_name` has
    # already checked the class. If the class is defined in a Python file of the checkpoint, the
    # class is checked here, because this check requires the loaded model.
    is_class_of_transformers = model_class(config) is not None
    return is_class_of_transformers or _has_attention_interface(model)


def _has_attention_interface(model: Any) -> bool:  # noqa: ANN401 - transformers' are untyped
    """Return whether a model, or a class of models, uses transformers' attention interface."""
    has_interface: bool = model._can_set_attn_implementation()  # only this private method tells
    return has_interface


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
    """Create a model with its transformers class, and load the weights.

    Args:
        folder: the folder of the checkpoint.
        config: the config of the checkpoint.
        dtype: the data type of the weights that do not remain integers.
        trust_remote_code: whether transformers may run Python files of the checkpoint.
        use_panels: whether quantised weights remain integers. The CPU kernels read these integers
            from panels, which are blocks of a weight matrix.
        rounded_bits: the number of bits to which the weights of linear layers are rounded; None if
            they are not rounded.
        distributed: describes how transformers divides the model among several processes; None if
            one process loads the whole model.
        progress: called with one line of text every few seconds.
        attention: the name of the attention implementation.

    Raises:
        OwnAttentionError: if the class does not accept the attention implementation `attention`.
        ModelError: if the weights are damaged.
        UnsupportedModelError: if transformers does not support the model.
    """
    generation_config = read_generation_config(folder)
    arguments = weight_arguments(folder, config, dtype, as_dict=rounded_bits is not None)
    # transformers reads the weights from the folder, or gets them in the dict "state_dict".
    reads_folder = "state_dict" not in arguments
    # The checkpoint may define the class of the model in a Python file. Such a class can be used
    # only if transformers itself reads the weights.
    if not reads_folder and model_class(config) is None:
        raise UnsupportedModelError(
            f"quantised weights of the model type {config.model_type} are not supported, because "
            "transformers has no class for this type. Use a checkpoint that is not quantised."
        )
    weights = arguments.get("state_dict", {})
    if use_panels and weights:
        try:
            weights = _with_placeholders(weights, arguments["config"], dtype, rounded_bits)
        except Exception as error:
            # The class of the model can raise any exception if a value of the config is wrong.
            raise _loading_error(error, folder, config, attention) from error
        arguments["state_dict"] = weights
    arguments |= {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
    }
    if distributed is not None:
        arguments["distributed_config"] = distributed
    model = _from_pretrained(folder, config, arguments, progress)
    fill_placeholders(model, weights.values(), progress)
    if not reads_folder and generation_config is not None and model.can_generate():
        model.generation_config = generation_config
    return model


def _with_placeholders(
    weights: Mapping[str, LazyWeight],
    config: PretrainedConfig,
    dtype: torch.dtype,
    rounded_bits: int | None,
) -> dict[str, "LazyWeight | Placeholder"]:
    """Return a copy of `weights` with placeholders for the integer weights of linear layers.

    transformers loads the placeholders, which are tensors that take almost no memory.
    `fill_placeholders` then stores the integers in the layers. transformers must have a class for
    the model.

    If `rounded_bits` is not None, the weights of all linear layers are first rounded to integers
    with this number of bits. Each of these layers then gets a placeholder. If `rounded_bits` is
    None, only the weights that the checkpoint itself stores as integers get placeholders.
    """
    class_of_model = model_class(config)
    assert class_of_model is not None, "`load_model` has checked that the class exists"
    # Only the names and shapes of the layers are needed. On the device "meta", the weights of a
    # model take no memory.
    with torch.device("meta"):
        empty_model = class_of_model(config)
    if rounded_bits is None:
        return use_placeholders(weights, empty_model, dtype)
    rounded_weights = round_weights(weights, empty_model, rounded_bits)
    return use_placeholders(rounded_weights, empty_model, dtype)


def _from_pretrained(
    folder: Path,
    config: PretrainedConfig,
    arguments: dict[str, Any],
    progress: Callable[[str], None],
) -> PreTrainedModel:
    """Return the model that transformers' `from_pretrained` loads with `arguments`.

    Args:
        folder: the folder of the checkpoint, for error messages.
        config: the config of the checkpoint, which determines the class of the model.
        arguments: the arguments of `from_pretrained`.
        progress: called with one line of text every few seconds.

    Raises:
        OwnAttentionError: if the class does not accept the attention implementation.
        ModelError: if the weights are damaged or incomplete. The message contains `folder`.
        UnsupportedModelError: if transformers does not support the model.
    """
    try:
        with _report_reading(progress):
            model, report = _load_with_report(config, arguments)
    except ModelError:
        # `arguments` can contain quantised weights as `LazyWeight` objects. If a weight cannot be
        # read, its object raises a ModelError while transformers loads the weight.
        raise
    except Exception as error:
        attention = arguments["attn_implementation"]
        raise _loading_error(error, folder, config, attention) from error
    unused = sorted(report["unexpected_keys"])
    # If the config lacks quantization_config, quantised tensors are unused, and the weights of
    # their layers are missing. Only the error about unused tensors mentions quantization_config, so
    # unused tensors are checked first.
    check_unused_weights(folder, unused, model)
    check_missing_weights(folder, sorted(report["missing_keys"]), unused)
    return model


def _load_with_report(
    config: PretrainedConfig, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model, and a report with the names of the unused tensors and the missing weights.

    If transformers has no class for the model, a Python file of the checkpoint may define the
    class. AutoModelForCausalLM imports such a file.
    """
    loading_class = model_class(config) or AutoModelForCausalLM
    # The type annotation of `from_pretrained` does not mention the report.
    load: Any = loading_class.from_pretrained
    model, report = load(**arguments, local_files_only=True, output_loading_info=True)
    return model, report


def _loading_error(
    error: Exception, folder: Path, config: PretrainedConfig, attention: str
) -> Exception:
    """Convert an exception of transformers' `from_pretrained` to an exception of this package.

    There are three cases:

    - The model's class refuses the attention implementation: an OwnAttentionError, after which the
      model is loaded again with its own attention.
    - transformers does not support the model: an UnsupportedModelError.
    - A file is damaged or missing: a ModelError.

    Args:
        error: the exception of `from_pretrained`.
        folder: the folder of the checkpoint.
        config: the config of the checkpoint.
        attention: the name of the attention implementation.
    """
    if _refuses_attention(error, attention):
        return OwnAttentionError()
    if isinstance(error, _UNSUPPORTED_ERRORS):
        reason = _unsupported_reason(error, folder)
        return UnsupportedModelError(
            f"the model type {config.model_type} is not supported: {reason}"
        )
    # A damaged file can cause many kinds of exceptions, and a missing file causes an OSError.
    wrong_shape = describe_wrong_shape(error, folder, config, model_class(config))
    return ModelError(
        wrong_shape
        or f"the weights in {weights_path(folder)} cannot be read ({first_line(error)}). "
        "Download the checkpoint again."
    )


def _refuses_attention(error: Exception, attention: str) -> bool:
    """Return whether transformers raised `error` because a class has no attention interface.

    transformers has no exception class for this case, and raises, for example, a ValueError. Its
    message contains `attention`, the name of the refused implementation, such as "nereid_paged_0".
    This package has generated the name, so no other message contains the name.
    """
    return isinstance(error, _UNSUPPORTED_ERRORS) and attention in str(error)


def _unsupported_reason(error: Exception, folder: Path) -> str:
    """Return the reason why transformers does not support a model: the first line of `error`.

    The message of a KeyError contains only the key. Example: if config.json contains the unknown
    rope_scaling type "abc", the message is "'abc'". For a KeyError, the result is therefore a
    sentence that contains the key and `folder`.
    """
    reason = first_line(error)
    if not isinstance(error, KeyError):
        return reason
    return (
        f"the value {reason} is unknown, or a field with this name is missing. Correct the JSON "
        f"files in {folder}, or install a newer version of transformers."
    )


def model_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' are untyped
    """Return the class in the library transformers that generates text with a model, or None.

    The config of a model has a class (such as LlamaConfig), and a field `architectures` with the
    name of the model's class. The result is the first of these classes that exists:

    - the class for images and text that transformers assigns to the class of the config, if
      `architectures` contains its name;
    - the class that AutoModelForCausalLM uses for the config;
    - the class whose name `architectures` contains, if it can generate text and has no encoder.
    """
    architectures = getattr(config, "architectures", None)
    class_name = architectures[0] if architectures else ""
    class_for_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if class_for_images is not None and class_for_images.__name__ == class_name:
        return class_for_images
    class_for_text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if class_for_text is not None:
        return class_for_text
    named_class: Any = getattr(transformers, class_name, None)
    is_model = isinstance(named_class, type) and issubclass(named_class, PreTrainedModel)
    if is_model and named_class.can_generate() and not config.is_encoder_decoder:
        return named_class
    return None


def takes_attention_by_name(config: PretrainedConfig, text_config: PretrainedConfig) -> bool:
    """Return whether a model calls the attention function whose name is passed to transformers.

    The name is the argument `attn_implementation` of `from_pretrained`. The class of the model must
    use transformers' attention interface. Any other class ignores the name or raises an error. If
    transformers has no class for the model, the result is True, because only an attempt to load the
    model shows the answer.

    Args:
        config: the config of the model.
        text_config: the part of the config that describes the decoder. For a model with images,
            this part can have a class of its own.
    """
    candidates = [model_class(config), model_class(text_config)]
    classes = [candidate for candidate in candidates if candidate is not None]
    if not classes:
        return True
    # In a model with images, the class of the decoder is sufficient, because only the attention of
    # the decoder is replaced.
    return any(map(_has_attention_interface, classes))


@contextmanager
def _report_reading(progress: Callable[[str], None]) -> Iterator[None]:
    """In the `with` block, let transformers call `progress` instead of showing progress bars.

    `progress` is called with one line of text every few seconds.
    """
    previous_hook = transformers_logging.set_tqdm_hook(partial(_report_bar, progress))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous_hook)


def _report_bar(
    progress: Callable[[str], None],
    _bar_class: object,
    args: tuple[Any, ...],
    _options: dict[str, Any],
) -> Iterator[Any]:
    """Return an iterator that transformers uses in place of a progress bar.

    transformers calls this hook whenever it would create a progress bar. While it reads weights, it
    only iterates over the bar.

    Args:
        progress: called with one line of text every few seconds.
        args: the positional arguments of the bar. The first argument contains the items.
    """
    return report_items(args[0], "reading weights", progress)
