# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint, and chooses the methods that compute the outputs of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.errors import ConfigError
from nereid_backend.load_checkpoint import choose_device
from nereid_backend.pooling.forward.choose_forward import (
    ChosenForward,
    pack_layers_and_choose_forward,
)
from nereid_backend.pooling.forward.choose_head import choose_head
from nereid_backend.pooling.forward.image_text_towers import prepack_towers
from nereid_backend.pooling.forward.pooling_forward import Head
from nereid_backend.pooling.inputs.answer_tokens import find_answer_tokens
from nereid_backend.pooling.inputs.text_prompts import TextPrompts, create_text_prompts
from nereid_backend.pooling.length_limit import length_limit
from nereid_backend.pooling.loading.checkpoint_spec import (
    IMAGE_CAUSAL,
    RETRIEVAL,
    SEQUENCE,
    TOKENS,
    TOWERS,
    AnswerTokens,
    CheckpointSpec,
)
from nereid_backend.pooling.loading.integer_weights import store_as_integers
from nereid_backend.pooling.loading.load_encoder import Encoder, load_encoder
from nereid_backend.pooling.loading.output_layers import OutputLayers, load_output_layers
from nereid_backend.pooling.loading.read_checkpoint import read_checkpoint_spec
from nereid_backend.pooling.pooling_config import PoolingConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint, and the methods by which its outputs are computed.

    Attributes:
        spec: the description of the checkpoint.
        encoder: the model and the tokenizer.
        hook: Nereid's entry in transformers' attention interface.
        max_model_len: the length limit of inputs in tokens.
        forward: the method of computing the token vectors of a batch. None for a model with a text
            tower and an image tower, because such a model always computes padded batches. Also None
            for a vision-language model that computes all inputs one by one.
        head: the method of computing the output of a classifier's head; None for other models.
        self_check_difference: see PoolingInfo.self_check_difference.
        poolers: the names of the pooling methods (see poolers.py).
        normalizes: whether dense vectors are scaled to length 1 by default.
        layers: the layers that convert the token vectors to the outputs.
        prompts: converts texts and pairs to prompts; None if inputs are tokenised directly.
        answer_tokens: the tokens that give the score of a generative reranker; None for other
            models.
    """

    spec: CheckpointSpec
    encoder: Encoder
    hook: AttentionHook
    max_model_len: int
    forward: ChosenForward | None
    head: Head | None
    self_check_difference: float
    poolers: tuple[str, ...]
    normalizes: bool
    layers: OutputLayers
    prompts: TextPrompts | None
    answer_tokens: AnswerTokens | None


def load_model(config: PoolingConfig, progress: Callable[[str], None]) -> LoadedModel:
    """Load a checkpoint, and choose the method of computing batches.

    Args:
        config: the settings.
        progress: called with one line for each slow operation.

    Raises:
        ConfigError: the settings do not fit the checkpoint or the machine.
        ModelError: the checkpoint is missing, broken or not supported.
    """
    spec = read_checkpoint_spec(config)
    # transformers calls this object to compute the attention of each layer.
    hook = AttentionHook()
    device = choose_device(config.device)
    with gpu_share(device, config.gpu_memory_utilization):
        encoder = load_encoder(
            spec,
            dtype=config.dtype,
            device=device,
            nereid_attention=hook.name,
            progress=progress,
        )
    store_as_integers(encoder, config.weight_dtype, spec.architecture, progress)
    max_len = length_limit(config, spec, encoder)
    # Every model is tested, because a wrong method would return wrong vectors without an error.
    progress("comparing the vectors of texts in a batch and one by one")
    methods = _choose_methods(spec, encoder, hook, max_len)
    poolers, normalizes = _choose_pooling(spec, methods.forward)
    return LoadedModel(
        spec=spec,
        encoder=encoder,
        hook=hook,
        max_model_len=max_len,
        forward=methods.forward,
        head=methods.head,
        self_check_difference=methods.self_check_difference,
        poolers=poolers,
        normalizes=normalizes,
        layers=load_output_layers(Path(config.model), spec, encoder),
        prompts=create_text_prompts(spec, encoder.tokenizer),
        answer_tokens=find_answer_tokens(spec, encoder.tokenizer),
    )


@contextmanager
def gpu_share(device: torch.device, share: float) -> Iterator[None]:
    """Limit the GPU memory of this process, from the start of a `with` block to the process's end.

    Args:
        device: the device of the model. If the device is a CPU, nothing is limited.
        share: the setting gpu_memory_utilization.

    Raises:
        ConfigError: the code in the block needs more memory than the limit. The message names the
            setting.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"gpu_memory_utilization: the model may use {share:.0%} of the memory of {device}, but "
            "its weights need more. Raise the setting. The sum of the shares of all models on a "
            "GPU must not exceed 1."
        ) from error


class _Methods(NamedTuple):
    """The chosen methods of computing outputs. `LoadedModel` describes the fields."""

    self_check_difference: float
    forward: ChosenForward | None = None
    head: Head | None = None


def _choose_methods(
    spec: CheckpointSpec, encoder: Encoder, hook: AttentionHook, max_len: int
) -> _Methods:
    """Choose the methods that compute the token vectors and the head's output for a batch of texts.

    Of the exact methods, the fastest is chosen. A method is exact if its outputs for a batch equal
    its outputs for single texts, except for rounding errors.

    The result also contains the difference between the outputs for a batch and the outputs for
    single texts. The loader determines which methods the model has:

        loader                    method for token vectors    method for the head
        TOWERS                    None                        None
        IMAGE_CAUSAL, RETRIEVAL   None                        None
        SEQUENCE, TOKENS          yes                         yes
        all other loaders         yes                         None

    Args:
        spec: the description of the checkpoint.
        encoder: the loaded model.
        hook: Nereid's entry in transformers' attention interface.
        max_len: the length limit of inputs in tokens.

    Raises:
        ModelError: the outputs of the model are not finite, or no method is exact.
    """
    name = spec.architecture
    if spec.loader == TOWERS:
        # The text tower returns one vector for each text, and always computes padded batches.
        difference = prepack_towers(encoder, name, max_len)
        return _Methods(self_check_difference=difference)
    if spec.loader in (IMAGE_CAUSAL, RETRIEVAL):
        # These models compute all inputs one by one. Batches are not used, so there is no
        # difference between the outputs for batches and the outputs for single inputs.
        return _Methods(self_check_difference=0.0)
    forward = pack_layers_and_choose_forward(encoder, hook, name, max_len)
    if spec.loader not in (SEQUENCE, TOKENS):
        return _Methods(forward.difference, forward)
    head = choose_head(encoder, forward, name, max_len, per_token=spec.loader == TOKENS)
    return _Methods(forward.difference, forward, head)


def _choose_pooling(
    spec: CheckpointSpec, forward: ChosenForward | None
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the pooling methods, and whether vectors are scaled to length 1.

    If the checkpoint's files do not determine the methods, a causal model uses the last token, and
    any other model uses the mean. If the files do not determine the scaling, only the dense vectors
    of a causal model are scaled.
    """
    is_causal = forward is not None and forward.is_causal
    poolers = spec.poolers
    if not poolers:
        poolers = ("lasttoken",) if is_causal else ("mean",)
    normalizes = spec.normalizes
    if normalizes is None:
        normalizes = is_causal and "dense" in spec.kinds
    return poolers, normalizes
