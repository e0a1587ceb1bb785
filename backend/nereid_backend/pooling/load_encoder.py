# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a model in memory."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers.normalizers import Lowercase, Normalizer, Sequence
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from nereid_backend.checkpoint import check_files
from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.checkpoint_spec import BASE, CAUSAL, MASKED, SEQUENCE, TOWERS, Recipe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO: dict[str, Any] = {
    BASE: AutoModel,
    SEQUENCE: AutoModelForSequenceClassification,
    MASKED: AutoModelForMaskedLM,
    CAUSAL: AutoModelForCausalLM,
    TOWERS: AutoModel,
}
# Constants that some checkpoints hold and some do not.
_NOT_SAVED = ("position_ids", "token_type_ids", "inv_freq")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded model.

    Attributes:
        model: with its head, on its device, in eval mode.
        base: the part that makes token vectors; the model itself where there is no head, the tower
            of texts where there is one of images, too.
        tokenizer: of its checkpoint.
        device: where it is.
        own_attention: transformers' attention that it was loaded with, and still has.
        takes_hook: whether its attention can be set to ours; its code may still go its own way.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    own_attention: str
    takes_hook: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids below this can be given."""
        try:
            weight = self.base.get_input_embeddings().weight
        except (NotImplementedError, AttributeError):
            return int(self.model.config.get_text_config().vocab_size)
        assert isinstance(weight, torch.Tensor)
        return int(weight.shape[0])


def load_encoder(
    recipe: Recipe,
    *,
    dtype: str,
    device: torch.device,
    attention: str,
    progress: Callable[[str], None],
) -> Encoder:
    """Load weights and tokenizer.

    Args:
        recipe: what the checkpoint is.
        dtype: the setting of that name.
        device: where the weights go.
        attention: name in transformers' attention interface.
        progress: gets a line for every slow step.

    Raises:
        ModelError: the checkpoint is broken.
        UnsupportedModelError: transformers has no code for it.
    """
    check_files(recipe.folder)
    chosen = _choose_dtype(dtype, recipe.config, device)
    name = str(chosen).removeprefix("torch.")
    progress(f"loading {recipe.architecture} from {recipe.folder} as {name}")
    model = _load_weights(recipe, chosen)
    if device.type != "cpu":
        progress(f"copying the weights to {device}")
        model.to(device)  # type: ignore[arg-type]  # transformers decorates torch's signature
    model.train(False)
    text = model.config.get_text_config()
    if recipe.loader == SEQUENCE and text.pad_token_id is None:
        # Heads that look for the last token that is no padding insist on knowing what padding is.
        text.pad_token_id = -1
    base: Any = model if recipe.loader == BASE else model.base_model
    if recipe.loader == TOWERS:
        base = getattr(model, "text_model", model)
    own = str(model.config._attn_implementation)
    return Encoder(model, base, load_tokenizer(recipe), device, own, _takes(model, attention, own))


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.

    Raises:
        ModelError: there is none, or a broken one.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            recipe.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # tokenizers raises bare exceptions for broken files.
        raise ModelError(
            f"{recipe.folder}: its tokenizer cannot be loaded: {_first_line(error)}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if recipe.lower_case and backend is not None:
        parts: list[Normalizer] = [Lowercase()]
        if backend.normalizer is not None:
            parts.append(backend.normalizer)
        backend.normalizer = Sequence(parts)
    return tokenizer


def accepts(function: Callable[..., object], name: str) -> bool:
    """Whether a function takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _load_weights(recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    load, extra = _loading(recipe)
    try:
        with quiet():
            model, report = load(
                recipe.folder,
                config=recipe.config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **extra,
            )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"{recipe.architecture} is not supported: {_first_line(error)}"
        ) from error
    except Exception as error:
        # safetensors raises its own errors for broken files, and torch RuntimeError for shapes.
        raise ModelError(
            f"{recipe.folder}: its weights cannot be read: {_first_line(error)}; download them "
            "again"
        ) from error
    _check_report(recipe, report)
    return model  # type: ignore[no-any-return]


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters of them is in our errors."""
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


def _takes(model: PreTrainedModel, attention: str, own: str) -> bool:
    """Whether a model's attention can be set to a name; it is set back."""
    with quiet():
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError):
            return False
        taken = bool(model.config._attn_implementation == attention)
        model.set_attn_implementation(own)
    return taken


def _check_report(recipe: Recipe, report: dict[str, Any]) -> None:
    missing = sorted(k for k in report["missing_keys"] if not k.endswith(_NOT_SAVED))
    if missing:
        raise ModelError(
            f"{recipe.folder} lacks {len(missing)} weights of a {recipe.task} model, first "
            f"{missing[0]}; the answers would be random; download the checkpoint again"
        )
    # The pooler is left out on purpose.
    unused = sorted(
        key
        for key in report.get("unexpected_keys", ())
        if "pooler." not in key and not key.endswith(_NOT_SAVED)
    )
    if unused and not hasattr(transformers, recipe.architecture):
        raise UnsupportedModelError(
            f"{recipe.architecture} is not supported: transformers does not know it, and its "
            f"{recipe.config.model_type} has no place for {len(unused)} weights, first {unused[0]}"
        )


def _loading(recipe: Recipe) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that loads the model, and arguments for it alone."""
    auto, config = _AUTO[recipe.loader], recipe.config
    if recipe.loader != BASE:
        return auto.from_pretrained, {"trust_remote_code": False}
    with suppress(KeyError):
        found = auto._model_mapping[type(config)]
        # Some configs stand for several classes.
        classes = found if isinstance(found, list | tuple) else (found,)
        known = next((c for c in classes if c.__name__ == recipe.architecture), classes[0])
        if getattr(config, "is_encoder_decoder", False):
            known = _encoder_alone(recipe, known)
        # The pooler makes a vector that no pooler here reads, and often has no trained weights.
        has_pooler = "add_pooling_layer" in inspect.signature(known.__init__).parameters
        return known.from_pretrained, {"add_pooling_layer": False} if has_pooler else {}
    return auto.from_pretrained, {"trust_remote_code": False}


def _encoder_alone(recipe: Recipe, whole: type) -> Any:  # noqa: ANN401 - a model class
    name = whole.__name__.removesuffix("Model") + "EncoderModel"
    found = getattr(transformers, name, None)
    if found is None:
        raise UnsupportedModelError(
            f"{recipe.architecture} is not supported: it is an encoder with a decoder, and "
            f"transformers has no {name}"
        )
    return found


def _choose_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    found: Any = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(found, str):
        found = _DTYPES.get(found)
    if found not in _DTYPES.values() or (found == torch.float16 and device.type == "cpu"):
        return torch.float32
    return found  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
