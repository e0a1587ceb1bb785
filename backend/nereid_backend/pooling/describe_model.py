# SPDX-License-Identifier: Apache-2.0
"""Describes a loaded model for operators and clients."""

from collections.abc import Sequence
from typing import Any

from nereid_backend.pooling.load_model import LoadedModel
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    MASKED,
    RETRIEVAL,
    SEQUENCE,
    TOKENS,
    TOWERS,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.vector_layers import Layer
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.pooling.pooling_items import PoolingInfo
from nereid_backend.text.prompt_encoder import PromptEncoder

# The default limits on the number of tokens that the engine computes in one step. A new request
# waits until the current step ends. CPUs compute slowly, so their limit is small, which keeps the
# wait short. Between limits of 512 and 4096 tokens, the throughput of a CPU changes by at most 3 %.
_DEFAULT_TOKENS_ON_CPU = 1024
_DEFAULT_TOKENS_ON_GPU = 16384
# For two kinds of models, the field of the config that contains the size of the output vectors.
_SIZE_FIELDS = {TOWERS: "projection_dim", RETRIEVAL: "embedding_dim"}
# The value of `PoolingInfo.pooling` for each kind of model that does not pool token vectors.
_POOLING_OF_LOADER = {
    MASKED: "splade",
    CAUSAL: "yes or no",
    IMAGE_CAUSAL: "yes or no",
    SEQUENCE: "the model's head",
    TOKENS: "the model's head",
    TOWERS: "the model's projection",
}


def describe_model(config: PoolingConfig, loaded: LoadedModel, load_seconds: float) -> PoolingInfo:
    """Return the description of a loaded model, for operators and clients.

    Most values come from the checkpoint's files (`loaded.spec`). `PoolingInfo` describes each
    value.

    Args:
        config: the settings.
        loaded: the model.
        load_seconds: the duration of loading in seconds.
    """
    spec = loaded.spec
    encoder = loaded.encoder
    is_on_cpu = encoder.device.type == "cpu"
    default_batch_tokens = _DEFAULT_TOKENS_ON_CPU if is_on_cpu else _DEFAULT_TOKENS_ON_GPU
    has_scores = spec.task != "embed"
    accepts_images = spec.takes_messages or spec.loader in (TOWERS, RETRIEVAL)
    max_token_bytes = PromptEncoder(encoder.tokenizer).max_token_bytes
    return PoolingInfo(
        model=config.model,
        architecture=spec.architecture,
        task=spec.task,
        kinds=spec.kinds,
        dimension=_dimension(loaded),
        max_model_len=loaded.max_model_len,
        max_token_bytes=max_token_bytes,
        vocab_size=encoder.vocab_size,
        pooling=_describe_pooling(loaded),
        normalizes=loaded.normalizes,
        activation=spec.activation if has_scores else "none",
        path=_method_for_batches(loaded),
        labels=_labels(spec),
        prompts=dict(spec.prompts),
        default_prompt_name=spec.default_prompt_name,
        accepts_images=accepts_images,
        device=str(encoder.device),
        dtype=str(encoder.dtype).removeprefix("torch."),
        max_batch_tokens=config.max_batch_tokens or default_batch_tokens,
        self_check_difference=loaded.self_check_difference,
        load_seconds=load_seconds,
    )


def _method_for_batches(loaded: LoadedModel) -> str:
    """Return the name of the method that computes batches (see PoolingInfo.path)."""
    if loaded.spec.loader in (IMAGE_CAUSAL, RETRIEVAL):
        return "single"
    # `forward` is None if the model has a text tower and an image tower. Such a model computes
    # padded batches. If `method` is "whole", the classification head also needs padded batches (see
    # `Head.method`).
    if loaded.forward is None or (loaded.head is not None and loaded.head.method == "whole"):
        return "padded"
    return loaded.forward.path


def _dimension(loaded: LoadedModel) -> int:
    """Return the size of the output vectors, or 0 if the model computes scores.

    Example: the token vectors have 768 numbers, and the model has two pooling methods ("cls" and
    "mean"). The results of the two methods are concatenated, so the output vectors have 2 * 768 =
    1536 numbers. A layer after the pooling can change this size again.
    """
    spec = loaded.spec
    config: Any = loaded.encoder.model.config
    if spec.task != "embed":
        return 0
    if spec.loader in _SIZE_FIELDS:
        return int(getattr(config, _SIZE_FIELDS[spec.loader]))
    if spec.loader == MASKED:  # a sparse vector has one weight for each entry of the vocabulary
        return loaded.encoder.vocab_size
    # All other models compute token vectors. The layers in `loaded.layers.tokens` convert these
    # vectors, and can change the size of the vectors.
    size = _output_size(loaded.layers.tokens, _hidden_size(config))
    if "dense" in spec.kinds:
        # The vectors that the pooling methods compute for a text are concatenated.
        size *= len(loaded.poolers)
    return _output_size(loaded.layers.vector, size)


def _hidden_size(config: Any) -> int:  # noqa: ANN401 - a config of transformers
    """Return the size of the token vectors that the transformers model computes."""
    text_config = config.get_text_config()
    # Some configs store the size of the token vectors in `d_model` instead of `hidden_size`.
    size: Any = getattr(text_config, "hidden_size", None) or getattr(text_config, "d_model", 0)
    return int(size)


def _describe_pooling(loaded: LoadedModel) -> str:
    """Return a readable description of the method by which a model computes its output.

    An embedding model pools: it combines the token vectors of a text into one vector. Example:
    "cls+mean" for a model that concatenates the vectors of two pooling methods.
    """
    spec = loaded.spec
    if spec.loader in _POOLING_OF_LOADER:
        return _POOLING_OF_LOADER[spec.loader]
    if spec.kinds == ("multi_vector",):  # the output consists of the token vectors themselves
        return "none"
    return "+".join(loaded.poolers)


def _output_size(layers: Sequence[Layer], size: int) -> int:
    """Return the size of the vectors that the last layer computes.

    `size` is the size of the first layer's input vectors. A layer that does not change the size,
    such as a norm, has the `out_features` None.
    """
    for layer in layers:
        if layer.out_features is not None:
            size = layer.out_features
    return size


def _labels(spec: CheckpointSpec) -> tuple[str, ...]:
    """Return the labels of a classifier, or an empty tuple for other models."""
    if spec.loader not in (SEQUENCE, TOKENS):
        return ()
    names: dict[Any, Any] = spec.config.id2label or {}
    count = int(spec.config.num_labels or 0)
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(count))
