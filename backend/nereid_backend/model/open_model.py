# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of a model, and chooses how the engine runs the model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.config import EngineConfig
from nereid_backend.errors import UnsupportedModelError
from nereid_backend.load_checkpoint import Checkpoint, Progress, choose_device
from nereid_backend.lora.peft_files import LayerSizes
from nereid_backend.model.adaptable_layers import find_adaptable_layers
from nereid_backend.model.forward_path.choose_image_path import ImageSupport, choose_image_path
from nereid_backend.model.forward_path.choose_path import ChosenPath, choose_path
from nereid_backend.model.forward_path.images_only import choose_images_only
from nereid_backend.model.load_weights import load_weights
from nereid_backend.model.memory.memory_plan import kv_cache_budget


class StageClock:
    """Measures how long each stage of loading takes.

    Attributes:
        seconds: the duration of each finished stage in seconds, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage_start = time.monotonic()

    def end(self, stage: str) -> None:
        """Record the duration of `stage`, and start to measure the next stage."""
        now = time.monotonic()
        self.seconds[stage] = now - self._stage_start
        self._stage_start = now


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights are loaded, and the way in which the engine runs the model.

    Attributes:
        checkpoint: the model.
        chosen: the forward path.
        adaptable_layers: the linear layers that LoRA adapters can change, by name.
        images: how the model processes prompts with images.
        cache_budget: returns the memory for the KV cache in bytes. The argument is the memory of
            one step in bytes.
    """

    checkpoint: Checkpoint
    chosen: ChosenPath
    adaptable_layers: dict[str, LayerSizes]
    images: ImageSupport
    cache_budget: Callable[[int], int]


OpenModel = Callable[[EngineConfig, AttentionHook, Progress, StageClock], OpenedModel]


def open_model(
    config: EngineConfig, hook: AttentionHook, progress: Progress, clock: StageClock
) -> OpenedModel:
    """Read the weights of a model, and choose how the model processes texts and images.

    Args:
        config: the settings.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.
        clock: measures the duration of each stage of loading.
    """
    device = choose_device(config.device)
    checkpoint = load_weights(config, device, hook, progress)
    adaptable_layers = find_adaptable_layers(checkpoint) if config.lora_memory else {}
    clock.end("weights")
    progress("comparing the logits of the engine with those of the unmodified model")
    chosen, images = _choose_paths(config, checkpoint, hook, progress)
    clock.end("self-check")
    cache_budget = partial(kv_cache_budget, config, device)
    return OpenedModel(checkpoint, chosen, adaptable_layers, images, cache_budget)


def _choose_paths(
    config: EngineConfig, checkpoint: Checkpoint, hook: AttentionHook, progress: Progress
) -> tuple[ChosenPath, ImageSupport]:
    """Choose how the model processes texts and how it processes prompts with images.

    The arguments are those of `open_model`, and `checkpoint` is the loaded model.

    Raises:
        UnsupportedModelError: if the model can process neither texts nor prompts with images.
    """
    folder = Path(checkpoint_folder(config.model))
    try:
        chosen = choose_path(checkpoint, hook, config, progress)
    except UnsupportedModelError as text_error:
        return choose_images_only(checkpoint, folder, config.block_size, progress, text_error)
    images = choose_image_path(checkpoint, folder, chosen.spec, config.block_size, progress)
    return chosen, images
