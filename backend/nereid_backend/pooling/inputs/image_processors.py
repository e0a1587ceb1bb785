# SPDX-License-Identifier: Apache-2.0
"""Loads and calls the image processors of embedding checkpoints without a chat template."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoImageProcessor, PretrainedConfig

from nereid_backend.errors import ModelError, RequestError, first_line
from nereid_backend.pooling.loading.checkpoint_spec import RETRIEVAL_HEAD
from nereid_backend.vision.load_processor import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

# If an output of a processor has one of these names, the output is not passed to the model as an
# image argument. The output "labels" is only used in training.
_NOT_FOR_IMAGES = ("input_ids", "attention_mask", "labels")

# Converts an image to the token ids of a prompt and to the model's arguments for the image.
ImageProcessor = Callable[["Image"], tuple[list[int], dict[str, Any]]]


def load_image_processor(folder: Path, config: PretrainedConfig) -> ImageProcessor:
    """Load the image processor of a model such as ColPali, or of a model with an image tower.

    Raises:
        ModelError: the processor is missing or broken, or needs a package that is not installed.
    """
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture.endswith(RETRIEVAL_HEAD):
        processor = load_page_processor(folder, config)
        return lambda image: split_outputs(run_processor(processor.process_images, images=[image]))
    tower_processor = load_tower_processor(folder)
    return lambda image: _tower_pixels(tower_processor, image)


def load_page_processor(folder: Path, config: PretrainedConfig) -> Any:  # noqa: ANN401 - a processor of transformers
    """Load the processor of a model such as ColPali. The processor prepares pages and queries.

    Raises:
        ModelError: the processor is missing or broken, or has no prompts for retrieval.
    """
    processor: Any = load_processor(folder, config)
    for name in ("process_images", "process_queries"):
        if not hasattr(processor, name):
            raise ModelError(
                f"the processor {type(processor).__name__} in {folder} has no method {name}. A "
                "model that returns one vector for each token of a page needs this method."
            )
    return processor


def load_tower_processor(folder: Path) -> Any:  # noqa: ANN401 - a processor of transformers
    """Load the image processor of a model with a text tower and an image tower.

    Raises:
        ModelError: the processor is missing or broken, or pillow is not installed.
    """
    try:
        # transformers imports pillow only when it processes an image. If pillow is missing, this
        # import fails when the model is loaded, instead of during the first request.
        importlib.import_module("PIL.Image")
        return AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        raise ModelError(
            f"{folder} needs a package for images that is not installed: {error}"
        ) from error
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"the image processor in {folder} cannot be loaded: {error}") from error


def run_processor(process: Callable[..., Any], **inputs: object) -> dict[str, Any]:
    """Call a method of a processor, and return the outputs of the method.

    Raises:
        RequestError: the method refuses the inputs.
    """
    try:
        return dict(process(**inputs))
    except Exception as error:
        # A processor can raise any exception. Convert the exception to a RequestError, so that only
        # the current request fails.
        raise RequestError(
            f"input: the checkpoint's processor cannot prepare the input: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def split_outputs(outputs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Split the outputs of a processor into the token ids and the arguments for the image.

    Example: {"input_ids": [[5, 6]], "pixel_values": pixels} returns ([5, 6], {"pixel_values":
    pixels}).
    """
    token_ids = [int(token) for token in outputs["input_ids"][0]]
    return token_ids, {
        name: value for name, value in outputs.items() if name not in _NOT_FOR_IMAGES
    }


def _tower_pixels(processor: Any, image: "Image") -> tuple[list[int], dict[str, Any]]:  # noqa: ANN401
    """Return an empty list of token ids, and the pixels that an image tower takes as input.

    The pixels are the argument "pixel_values", float32 [channels, height, width].
    """
    outputs = run_processor(processor, images=image, return_tensors="pt")
    return [], {"pixel_values": outputs["pixel_values"][0].float()}
