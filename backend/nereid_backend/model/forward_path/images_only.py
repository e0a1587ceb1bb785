# SPDX-License-Identifier: Apache-2.0
"""Chooses the forward path for models that cannot process a prompt without an image.

The code of some models, such as captioning models, raises an error for a prompt without an image.
No forward path for texts can be checked with such a model. If the model can process prompts with
images, the engine still serves the model, and refuses prompts without an image.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from nereid_backend.errors import EngineError, UnsupportedModelError
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.forward_path.choose_image_path import ImageSupport, choose_image_path
from nereid_backend.model.forward_path.choose_path import ChosenPath
from nereid_backend.model.forward_path.length_limits import model_limit
from nereid_backend.model.forward_path.path_spec import PathSpec, set_attention
from nereid_backend.model.forward_path.reference_logits import ReferenceLogits
from nereid_backend.paths.model_call import Sizes

# Describes a forward path that refuses texts: every call raises an error. This path is used if a
# model processes only prompts with images.
_IMAGES_ONLY_SPEC = PathSpec(
    "single",
    lambda sizes: NoTextPath(sizes),
    [],
    detail="only prompts with images",
    shares_blocks=False,
    whole_prefill=True,
    is_batched=False,
    uses_generated_reference=True,
)


class NoTextPath:
    """Implements `ForwardPath` for models that require images. Rejects prompts without images."""

    def __init__(self, sizes: Sizes) -> None:
        """Create an object that stores nothing. The argument `sizes` is ignored."""

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Raise an EngineError in every call, because the model requires prompts with images."""
        raise EngineError("A prompt without images has reached a model that needs images.")

    def clear(self, sequence: Sequence) -> None:
        """Do nothing, because this object stores no data of sequences."""


def choose_images_only(
    checkpoint: Checkpoint,
    folder: Path,
    block_size: int,
    progress: Progress,
    text_error: UnsupportedModelError,
) -> tuple[ChosenPath, ImageSupport]:
    """Choose how the engine runs a model that cannot process a prompt without an image.

    Example: the model's code raises an error if the images are missing. The forward path for texts
    then raises an error in every call, and prompts with images use the path in the returned
    `ImageSupport`.

    Args:
        checkpoint: the model.
        folder: the folder of the checkpoint, with the processor.
        block_size: the number of tokens in one block.
        progress: called with one line about the choice.
        text_error: the error of `choose_path`: no forward path for texts can be used.

    Raises:
        UnsupportedModelError: if the model cannot process prompts with images, either.
    """
    set_attention(checkpoint, None)
    images = choose_image_path(checkpoint, folder, _IMAGES_ONLY_SPEC, block_size, progress)
    if images.reason:
        raise UnsupportedModelError(f"{text_error} Images are refused, because {images.reason}")
    progress(f"texts: refused, because the model accepts only prompts with {images.kind}")
    limit = model_limit(checkpoint.text_config, is_batched=False)
    no_logits = torch.empty(0, checkpoint.vocab_size)
    reference_without_texts = ReferenceLogits(
        sequences=[], expected=no_logits, block_size=block_size
    )
    # The forward path refuses texts, so the difference of the logits was measured with prompts that
    # contain images.
    chosen = ChosenPath(_IMAGES_ONLY_SPEC, images.difference, limit, reference_without_texts)
    return chosen, replace(images, needs_images=True)
