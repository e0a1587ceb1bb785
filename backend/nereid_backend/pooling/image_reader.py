# SPDX-License-Identifier: Apache-2.0
"""Decodes image files to the pixels that an image encoder needs."""

import io
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.pooling.checkpoint_spec import CheckpointSpec

# The limits of an image: the size of the file in bytes, and the number of pixels.
_MAX_BYTES = 32 * 2**20
_MAX_PIXELS = 64 * 10**6


class ImageReader:
    """Decodes image files and prepares their pixels with the checkpoint's image processor."""

    def __init__(self, spec: CheckpointSpec) -> None:
        """Load the image processor.

        Raises:
            ModelError: the processor is missing or broken, or pillow is not installed.
        """
        try:
            import PIL.Image

            self._images = PIL.Image
            load: Any = AutoImageProcessor.from_pretrained
            self._processor: Any = load(spec.folder, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise ModelError(
                f"{spec.folder} needs a package for images that is not installed: {error}"
            ) from error
        except (ValueError, OSError, KeyError) as error:
            raise ModelError(
                f"the image processor in {spec.folder} cannot be loaded: {error}"
            ) from error

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels of one image file, float32 [channels, height, width].

        Raises:
            RequestError: the data is not a readable image, or the image is too large.
        """
        if len(data) > _MAX_BYTES:
            raise RequestError(
                f"image: the file has {len(data)} bytes, but the limit is {_MAX_BYTES}."
            )
        try:
            with warnings.catch_warnings():
                # Pillow warns about large images, but they are refused below.
                warnings.simplefilter("ignore")
                image = self._images.open(io.BytesIO(data))
                width, height = image.size
                if width * height > _MAX_PIXELS:
                    raise RequestError(
                        f"image: the image has {width} x {height} pixels, but the limit is "
                        f"{_MAX_PIXELS} pixels."
                    )
                processed = self._processor(images=image.convert("RGB"), return_tensors="pt")
        except RequestError:
            raise
        except Exception as error:
            # Boundary: the request ends here, because image decoders can raise any exception for a
            # broken file.
            raise RequestError(f"image: the image cannot be decoded: {error}") from error
        pixels: Tensor = processed["pixel_values"][0]
        return pixels.to(torch.float32)
