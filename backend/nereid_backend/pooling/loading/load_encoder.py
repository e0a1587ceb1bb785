# SPDX-License-Identifier: Apache-2.0
"""Loads the model and the tokenizer of an embedding, rerank or classification checkpoint."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nereid_backend.checkpoints.read_config import check_files
from nereid_backend.pooling.loading.checkpoint_spec import (
    BASE,
    RETRIEVAL,
    SEQUENCE,
    TOWERS,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.encoder_weights import (
    describe_unused_code,
    load_encoder_weights,
    quiet,
)
from nereid_backend.pooling.loading.load_tokenizer import load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        accepts_nereid_attention: whether the model accepts Nereid's attention implementation. Even
            then, the code of the model may ignore this implementation.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    own_attention: str
    accepts_nereid_attention: bool

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

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
    nereid_attention: str,
    progress: Callable[[str], None],
) -> Encoder:
    """Load the weights and the tokenizer of a checkpoint.

    Args:
        spec: the description of the checkpoint.
        dtype: the setting `dtype`.
        device: the device for the weights.
        nereid_attention: the name under which Nereid's attention function is registered in
            transformers. The model keeps its own attention, but `Encoder.accepts_nereid_attention`
            states whether the model could use Nereid's attention.
        progress: called with one line for each slow operation.

    Raises:
        ModelError: the checkpoint is broken.
        UnsupportedModelError: transformers has no code for the model.
    """
    check_files(spec.folder)
    model = _load_model(spec, _choose_dtype(dtype, spec.config, device), device, progress)
    if spec.loader == SEQUENCE:
        # Some heads that classify whole texts need the padding token to find the last token.
        _set_missing_padding_token(model)
    # The attention implementation that transformers has chosen for the model.
    own_attention = str(model.config._attn_implementation)
    return Encoder(
        model=model,
        base=_module_without_head(spec, model),
        tokenizer=load_tokenizer(spec),
        device=device,
        own_attention=own_attention,
        accepts_nereid_attention=_accepts_attention(model, nereid_attention, own_attention),
    )


def _load_model(
    spec: CheckpointSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> PreTrainedModel:
    """Load the model in eval mode on `device`. Report warnings and slow steps to `progress`."""
    dtype_name = str(dtype).removeprefix("torch.")
    progress(f"loading {spec.architecture} from {spec.folder} as {dtype_name}")
    model = load_encoder_weights(spec, dtype)
    warning = describe_unused_code(spec, model)
    if warning is not None:
        progress(warning)
    if device.type != "cpu":
        progress(f"copying the weights to {device}")
        model.to(device)
    return model.eval()


def _set_missing_padding_token(model: PreTrainedModel) -> None:
    """If the config of a model contains no padding token, set the padding token to -1.

    Some heads use the vector of the last token that is not padding. Such a head fails if the config
    has no padding token. No text contains the id -1, so with this id the head uses the last token
    of each text.
    """
    text_config = model.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = -1


def _module_without_head(spec: CheckpointSpec, model: PreTrainedModel) -> Any:  # noqa: ANN401 - transformers types base_model as a plain module
    """Return the submodule that computes token vectors (see Encoder.base)."""
    if spec.loader in (BASE, RETRIEVAL):
        return model
    if spec.loader == TOWERS:
        return getattr(model, "text_model", model)
    return model.base_model


def accepts(function: Callable[..., object], name: str) -> bool:
    """Return whether a function accepts a keyword argument with the name `name`."""
    parameters = inspect.signature(function).parameters
    accepts_any_name = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return accepts_any_name or name in parameters


def _accepts_attention(model: PreTrainedModel, attention: str, own_attention: str) -> bool:
    """Return whether the model accepts the attention implementation named `attention`.

    The attention implementation `own_attention` is set again before the function returns.
    """
    with quiet():
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError):
            return False
        # If a model computes the attention in its own code, `set_attn_implementation` raises no
        # error. It only logs a warning, and keeps the old attention implementation.
        is_accepted = bool(model.config._attn_implementation == attention)
        model.set_attn_implementation(own_attention)
    return is_accepted


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
