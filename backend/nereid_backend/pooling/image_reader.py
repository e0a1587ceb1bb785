# SPDX-License-Identifier: Apache-2.0
"""From the bytes of an image file to what an image tower reads."""

import io
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.pooling.checkpoint_spec import Recipe

_MAX_BYTES = 32 * 2**20
_MAX_PIXELS = 64 * 10**6


class ImageReader:
    """Decodes image files and prepares their pixels as the checkpoint's processor says."""

    def __init__(self, recipe: Recipe) -> None:
        """Load the processor.

        Raises:
            ModelError: it is missing or broken, or pillow is not installed.
        """
        try:
            import PIL.Image

            self._images = PIL.Image
            load: Any = AutoImageProcessor.from_pretrained
            self._processor: Any = load(
                recipe.folder, local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise ModelError(
                f"{recipe.folder}: images take a package that is not installed: {error}"
            ) from error
        except (ValueError, OSError, KeyError) as error:
            raise ModelError(
                f"{recipe.folder}: its image processor cannot be loaded: {error}"
            ) from error

    def __call__(self, data: bytes) -> Tensor:
        """Pixels [channels, height, width] float32 of one image.

        Raises:
            RequestError: the bytes are no image that can be read, or it is too large.
        """
        if len(data) > _MAX_BYTES:
            raise RequestError(f"image: has {len(data)} bytes; the limit is {_MAX_BYTES}")
        try:
            with warnings.catch_warnings():
                # Pillow warns of what may be decompression bombs; the limit is ours, below.
                warnings.simplefilter("ignore")
                image = self._images.open(io.BytesIO(data))
                width, height = image.size
                if width * height > _MAX_PIXELS:
                    raise RequestError(
                        f"image: has {width} x {height} pixels; the limit is {_MAX_PIXELS}"
                    )
                found = self._processor(images=image.convert("RGB"), return_tensors="pt")
        except RequestError:
            raise
        except Exception as error:
            # Decoders raise whatever they meet in a broken file.
            raise RequestError(f"image: cannot be read: {error}") from error
        pixels: Tensor = found["pixel_values"][0]
        return pixels.to(torch.float32)
