# SPDX-License-Identifier: Apache-2.0
"""Sends image files to the process that decodes them, and returns the prepared images."""

from collections.abc import Sequence

from torch import Tensor

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError
from nereid_backend.pooling.inputs.image_processors import load_tower_processor
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle
from nereid_backend.vision.packed_tensors import unpack_images

# The worker process for models such as ColPali and for models with an image tower (see
# pooling_image_worker.py).
IMAGE_WORKER = "nereid_backend.pooling.inputs.pooling_image_worker"


class TowerImages:
    """Prepares images for a model with a text tower and an image tower.

    Attributes:
        image_process: the process that decodes and prepares images.
        num_tokens: the number of tokens that is counted for one image.
    """

    def __init__(self, spec: CheckpointSpec, num_tokens: int) -> None:
        """Check that the image processor of the checkpoint can be loaded.

        Raises:
            ModelError: the processor is missing or broken, or pillow is not installed.
        """
        load_tower_processor(spec.folder)
        self.image_process = ImageWorkerHandle(IMAGE_WORKER, str(spec.folder))
        self.num_tokens = num_tokens

    def pixels(self, data: bytes) -> Tensor:
        """Return the pixels of one image file, float32 [channels, height, width].

        Raises:
            RequestError: the data is not a readable image, or the image is too large.
            EngineError: the process that decodes images cannot be started.
        """
        _, images = prepare_images(self.image_process, "", [data])
        pixels = images.arguments["pixel_values"]
        assert isinstance(pixels, Tensor)
        return pixels


def prepare_images(
    process: ImageWorkerHandle, text: str, images: Sequence[bytes]
) -> tuple[list[int], ImageInputs]:
    """Prepare the images of a prompt. Return the token ids of the prompt, and the prepared images.

    Args:
        process: the process that decodes and prepares images.
        text: the prompt, with one placeholder for each image. Some processes ignore the text.
        images: the images in the form that the process expects.

    Raises:
        RequestError: an image is invalid. The message begins with "image: ".
        EngineError: the process has ended or cannot be started.
    """
    try:
        token_ids, packed = process.call([text, list(images)])
    except RequestError as error:
        raise RequestError(f"image: {_problem_of_image(str(error))}") from error
    return token_ids, unpack_images(packed)


def _problem_of_image(message: str) -> str:
    """Remove the names of the field and of the image from an error message of the image process.

    The process also prepares the images of chats. An input of a pooling model has no field
    `messages` and at most one image. Example: "messages: image 1: it is damaged." returns "it is
    damaged."
    """
    return message.removeprefix("messages: ").removeprefix("image 1: ")
