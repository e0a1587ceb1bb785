# SPDX-License-Identifier: Apache-2.0
"""Loads the model and the tokenizer of an embedding, rerank or classification checkpoint."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers.normalizers import Lowercase, Normalizer, Sequence
from transformers import (
    AddedToken,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.checkpoints.weight_arguments import weight_arguments
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.load_checkpoint import check_files
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

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The auto class of transformers for each kind of model.
_AUTO: dict[str, Any] = {
    BASE: AutoModel,
    SEQUENCE: AutoModelForSequenceClassification,
    TOKENS: AutoModelForTokenClassification,
    MASKED: AutoModelForMaskedLM,
    CAUSAL: AutoModelForCausalLM,
    IMAGE_CAUSAL: AutoModelForImageTextToText,
    TOWERS: AutoModel,
}
# A tensor whose name ends with one of these texts is constant. If a checkpoint lacks such a tensor,
# or contains one that the model does not need, this is not an error.
_NOT_SAVED = ("position_ids", "token_type_ids", "inv_freq")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded model.

    Attributes:
        model: the model with its head, on `device`, in eval mode.
        base: the submodule that computes token vectors. If the model has no head, `base` is the
            model itself. If the model has a text tower and an image tower, `base` is the text
            tower.
        tokenizer: the tokenizer of the checkpoint.
        device: the device of the weights.
        own_attention: the name of the attention implementation with which the model was loaded.
        takes_hook: whether the model accepts Nereid's attention implementation. Even then, the code
            of the model may ignore this implementation.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    own_attention: str
    takes_hook: bool

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """The number of valid token ids."""
        try:
            weight = self.base.get_input_embeddings().weight
        except (NotImplementedError, AttributeError):
            return int(self.model.config.get_text_config().vocab_size)
        assert isinstance(weight, torch.Tensor)
        return int(weight.shape[0])


def load_encoder(
    spec: CheckpointSpec,
    *,
    dtype: str,
    device: torch.device,
    attention: str,
    progress: Callable[[str], None],
) -> Encoder:
    """Load the weights and the tokenizer of a checkpoint.

    Args:
        spec: the description of the checkpoint.
        dtype: the setting `dtype`.
        device: the device for the weights.
        attention: the name of Nereid's attention in transformers' attention interface.
        progress: called with one line for each slow operation.

    Raises:
        ModelError: the checkpoint is broken.
        UnsupportedModelError: transformers has no code for the model.
    """
    check_files(spec.folder)
    torch_dtype = _choose_dtype(dtype, spec.config, device)
    name = str(torch_dtype).removeprefix("torch.")
    progress(f"loading {spec.architecture} from {spec.folder} as {name}")
    model = _load_weights(spec, torch_dtype)
    if device.type != "cpu":
        progress(f"copying the weights to {device}")
        model.to(device)  # type: ignore[arg-type]  # transformers decorates torch's signature
    model.train(False)
    text = model.config.get_text_config()
    if spec.loader == SEQUENCE and text.pad_token_id is None:
        # Some heads use the last token that is not padding. If the config names no padding token,
        # such a head fails. The id -1 occurs in no text, so with this id the head uses the last
        # token of each text.
        text.pad_token_id = -1
    own_attention = str(model.config._attn_implementation)
    takes_hook = _accepts_attention(model, attention, own_attention)
    return Encoder(
        model=model,
        base=_base_module(spec, model),
        tokenizer=load_tokenizer(spec),
        device=device,
        own_attention=own_attention,
        takes_hook=takes_hook,
    )


def _base_module(spec: CheckpointSpec, model: PreTrainedModel) -> Any:  # noqa: ANN401 - transformers types base_model as a plain module
    """Return the submodule that computes token vectors (see Encoder.base)."""
    if spec.loader in (BASE, RETRIEVAL):
        return model
    if spec.loader == TOWERS:
        return getattr(model, "text_model", model)
    return model.base_model


def load_tokenizer(spec: CheckpointSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint.

    Raises:
        ModelError: the tokenizer is missing or broken.
        UnsupportedModelError: the model classifies single tokens, but the tokenizer cannot report
            the characters of each token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            spec.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # The tokenizers library raises the class Exception itself for broken files.
        raise ModelError(
            f"the tokenizer in {spec.folder} cannot be loaded: {first_line(error)}"
        ) from error
    if spec.lower_case:
        _convert_to_lower_case(tokenizer)
    if spec.loader == TOKENS and not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{spec.architecture} requires a tokenizer that reports the characters of each token, "
            f"but {type(tokenizer).__name__} does not. Add a tokenizer.json to {spec.folder}."
        )
    _register_markers(tokenizer, spec)
    return tokenizer


def _convert_to_lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change the tokenizer, so that it converts each text to lower case first.

    Do nothing if the tokenizer is not a fast tokenizer, which has a `backend_tokenizer`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    parts: list[Normalizer] = [Lowercase()]
    if backend.normalizer is not None:
        parts.append(backend.normalizer)
    backend.normalizer = Sequence(parts)


def _register_markers(tokenizer: PreTrainedTokenizerBase, spec: CheckpointSpec) -> None:
    """Change the tokenizer, so that it converts each marker of queries or documents to one token.

    Without this function, a tokenizer may split the marker "[unused0]" into several tokens, because
    the marker is an ordinary entry of the vocabulary. A marker that the vocabulary does not contain
    stays ordinary text, as in sentence-transformers.
    """
    vocabulary = tokenizer.get_vocab()
    for _, marker in spec.late_interaction.markers:
        # The marker ends with a space. The vocabulary may contain the marker with or without this
        # space.
        entry = marker if marker in vocabulary else marker.strip()
        if entry in vocabulary and tokenizer.tokenize(entry) != [entry]:
            token = AddedToken(entry, normalized=False, special=True)
            tokenizer.add_tokens([token], special_tokens=True)


def accepts(function: Callable[..., object], name: str) -> bool:
    """Return whether a function accepts a keyword argument with the name `name`."""
    parameters = inspect.signature(function).parameters
    accepts_any_name = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return accepts_any_name or name in parameters


def _load_weights(spec: CheckpointSpec, dtype: torch.dtype) -> PreTrainedModel:
    """Create the model on the CPU, and load its weights.

    The docstring of `load_encoder` lists the errors.
    """
    arguments = weight_arguments(spec.folder, spec.config, dtype)
    try:
        load, extra = _loader(
            spec, has_folder=arguments["pretrained_model_name_or_path"] is not None
        )
        with quiet():
            model, report = load(
                **arguments,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                **extra,
            )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: {first_line(error)}"
        ) from error
    except (OSError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        # RuntimeError: the weights have wrong shapes. TypeError and AttributeError: the config
        # contains values that the model's code cannot use.
        raise ModelError(
            f"the weights in {spec.folder} cannot be read ({first_line(error)}). Download the "
            "checkpoint again."
        ) from error
    _check_report(spec, report)
    return model  # type: ignore[no-any-return]


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers shows no progress bars and no warnings."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _accepts_attention(model: PreTrainedModel, attention: str, own_attention: str) -> bool:
    """Return whether the model accepts the attention implementation named `attention`.

    The attention implementation `own_attention` is set again before the function returns.
    """
    with quiet():
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError):
            return False
        is_accepted = bool(model.config._attn_implementation == attention)
        model.set_attn_implementation(own_attention)
    return is_accepted


def _check_report(spec: CheckpointSpec, report: dict[str, Any]) -> None:
    """Raise an error if the checkpoint lacks weights, or has weights that the model does not use.

    Args:
        spec: the description of the checkpoint.
        report: transformers' report: lists of names in `missing_keys` and `unexpected_keys`.

    Raises:
        ModelError: weights are missing.
        UnsupportedModelError: weights are unused, and transformers has no class for the model.
    """
    missing = sorted(key for key in report["missing_keys"] if not key.endswith(_NOT_SAVED))
    if missing:
        raise ModelError(
            f"{spec.folder} lacks {len(missing)} weights that the task {spec.task} needs, such as "
            f"{missing[0]}. The model's output would be random. Download the checkpoint again, or "
            "choose another task."
        )
    if hasattr(transformers, spec.architecture):
        return  # The unused weights belong to a head that this task does not need.
    # The class of the model is missing in transformers. This class may need the unused weights.
    unused = sorted(key for key in report.get("unexpected_keys", ()) if not _is_ignored(spec, key))
    if unused:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: transformers has no such class, and the class "
            f"for {spec.config.model_type} does not use {len(unused)} of the weights, such as "
            f"{unused[0]}."
        )


def _is_ignored(spec: CheckpointSpec, name: str) -> bool:
    """Return whether a weight of the checkpoint may be unused, although its model has no class."""
    is_projection = spec.architecture == STANFORD_ARCHITECTURE and name == STANFORD_PROJECTION
    # OutputLayers contains the projection. The model is loaded without its pooler.
    return is_projection or "pooler." in name or name.endswith(_NOT_SAVED)


def _loader(spec: CheckpointSpec, *, has_folder: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function that loads the model, and the keyword arguments of this function.

    `has_folder` determines whether transformers reads the weights from the checkpoint's folder. The
    auto classes cannot load a model without a folder.
    """
    if spec.loader == RETRIEVAL:
        # transformers has no auto class for these models.
        retrieval_class = getattr(transformers, spec.architecture, None)
        if retrieval_class is None:
            raise ValueError(f"transformers has no class {spec.architecture}")
        return retrieval_class.from_pretrained, {}
    auto = _AUTO[spec.loader]
    has_head = spec.loader != BASE
    # If the model has no head, its class is needed, so that the pooler can be left out.
    needs_class = not has_head or not has_folder
    model_class = _model_class(auto, spec) if needs_class else None
    if model_class is None:
        return auto.from_pretrained, {"trust_remote_code": False}
    if has_head:
        return model_class.from_pretrained, {}
    return _loader_without_head(spec, model_class)


def _loader_without_head(
    spec: CheckpointSpec,
    model_class: Any,  # noqa: ANN401 - a model class
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function that loads a model without a head, and the arguments of the function."""
    # If an encoder-decoder model has no head, only the encoder computes the token vectors.
    if getattr(spec.config, "is_encoder_decoder", False):
        model_class = _encoder_alone(spec, model_class)
    # Load the model without its own pooler. The pooler is not used, and the weights of the pooler
    # are often untrained.
    has_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    arguments = {"add_pooling_layer": False} if has_pooler else {}
    return model_class.from_pretrained, arguments


def _model_class(auto: Any, spec: CheckpointSpec) -> Any:  # noqa: ANN401 - classes of transformers
    """Return the class that the auto class `auto` assigns to the config, or None."""
    try:
        mapped = auto._model_mapping[type(spec.config)]
    except KeyError:
        return None
    # Some configs belong to several classes.
    classes = mapped if isinstance(mapped, list | tuple) else (mapped,)
    for model_class in classes:
        if model_class.__name__ == spec.architecture:
            return model_class
    return classes[0]


def _encoder_alone(spec: CheckpointSpec, whole: type) -> Any:  # noqa: ANN401 - a model class
    """Return the class of the encoder of an encoder-decoder model."""
    name = whole.__name__.removesuffix("Model") + "EncoderModel"
    encoder_class = getattr(transformers, name, None)
    if encoder_class is None:
        raise UnsupportedModelError(
            f"{spec.architecture} is not supported: it has an encoder and a decoder, and "
            f"transformers has no class {name} for the encoder alone."
        )
    return encoder_class


def _choose_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the data type of the weights for the setting `dtype`."""
    if name != "auto":
        return _DTYPES[name]
    dtype: Any = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype)
    is_slow_float16 = dtype == torch.float16 and device.type == "cpu"
    if dtype not in _DTYPES.values() or is_slow_float16:
        return torch.float32
    return dtype  # type: ignore[no-any-return]
