# SPDX-License-Identifier: Apache-2.0
"""Sends image files to the process that decodes them, and returns the prepared images."""

from collections.abc import Sequence

from torch import Tensor

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError
from nereid_backend.pooling.inputs.image_processors import load_tower_processor
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.vision.image_process import ImageProcess
from nereid_backend.vision.packed_tensors import unpack_images

# The worker process for models such as ColPali and for models with an image tower (see
# pooling_image_worker.py).
IMAGE_WORKER = "nereid_backend.pooling.inputs.pooling_image_worker"
# The image worker also prepares the images of chats, so its error messages begin with "messages:
# image 1: ". An input of a pooling model has no field `messages` and at most one image. Therefore,
# "messages: image 1: " is replaced by "image: ".
_CHAT_FIELD = "messages: "
_FIRST_IMAGE = "image 1: "


class TowerImages:
    """Prepares images for a model with a text tower and an image tower.

    Attributes:
        process: the process that decodes and prepares images.
        num_tokens: the number of tokens that is counted for one image.
    """

    def __init__(self, spec: CheckpointSpec, num_tokens: int) -> None:
        """Check that the image processor of the checkpoint can be loaded.

        Raises:
            ModelError: the processor is missing or broken, or pillow is not installed.
        """
        load_tower_processor(spec.folder)
        self.process = ImageProcess(IMAGE_WORKER, str(spec.folder))
        self.num_tokens = num_tokens

    def pixels(self, data: bytes) -> Tensor:
        """Return the pixels of one image file, float32 [channels, height, width].

        Raises:
            RequestError: the data is not a readable image, or the image is too large.
            EngineError: the process that decodes images cannot be started.
        """
        _, images = prepare_images(self.process, "", [data])
        pixels = images.arguments["pixel_values"]
        assert isinstance(pixels, Tensor)
        return pixels


def prepare_images(
    process: ImageProcess, text: str, images: Sequence[bytes]
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
        # Example: "messages: image 1: it is damaged." becomes "image: it is damaged." The number of
        # the image is not needed, because an input of a pooling model has at most one image.
        problem = str(error).removeprefix(_CHAT_FIELD).removeprefix(_FIRST_IMAGE)
        raise RequestError(f"image: {problem}") from error
    return token_ids, unpack_images(packed)
