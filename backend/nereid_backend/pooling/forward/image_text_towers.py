# SPDX-License-Identifier: Apache-2.0
"""Models with a text encoder and an image encoder. Text and image vectors can be compared."""

import io
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from nereid_backend.errors import ModelError, RequestError, UnsupportedModelError
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.pooling.forward.choose_forward import (
    SELF_CHECK_LENS,
    random_batch,
    relative_difference,
)
from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.loading.load_encoder import Encoder

# Limits for the test of padded batches. The vectors of texts in a padded batch may differ by at
# most this relative error from the vectors of the same texts computed one by one. Otherwise the
# model is refused.
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1
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
                # Pillow warns about large images. The warning is not needed, because large images
                # are refused below.
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
            # Catch every exception, because image decoders can raise any exception for a broken
            # file. Only the request with this image fails.
            raise RequestError(f"image: the image cannot be decoded: {error}") from error
        pixels: Tensor = processed["pixel_values"][0]
        return pixels.to(torch.float32)


def text_vectors(encoder: Encoder, batch: TokenBatch) -> Tensor:
    """Return the vectors of texts, float32 [num_texts, projection_dim].

    The texts are computed as one padded batch.
    """
    padding = encoder.tokenizer.pad_token_id
    if padding is None:
        padding = encoder.tokenizer.eos_token_id or 0
    model: Any = encoder.model
    out = model.get_text_features(
        input_ids=batch.pad(batch.token_ids, padding), attention_mask=batch.mask().long()
    )
    return _vectors(out)


def image_vectors(encoder: Encoder, pixels: Tensor) -> Tensor:
    """Return the vectors of images, float32 [num_images, projection_dim].

    Shapes: pixels [num_images, channels, height, width].
    """
    model: Any = encoder.model
    return _vectors(model.get_image_features(pixels.to(encoder.device, encoder.dtype)))


@torch.inference_mode()
def check_towers(encoder: Encoder, name: str, max_len: int) -> float:
    """Check that texts have the same vectors in a padded batch and one by one.

    Mutates: the layout of the model's linear layers.

    Args:
        encoder: the loaded model.
        name: the name of the architecture, for error messages.
        max_len: the length limit of inputs in tokens.

    Returns:
        The largest relative difference between the two vectors of a text.

    Raises:
        ModelError: the vectors are not finite numbers.
        UnsupportedModelError: the model has no such encoders, or the difference is too large.
    """
    if not hasattr(encoder.model, "get_text_features"):
        raise UnsupportedModelError(
            f"{name} is not supported: the model has no method get_text_features."
        )
    batch = _random_texts(encoder, tuple(min(n, max_len) for n in SELF_CHECK_LENS))
    expected = torch.cat([text_vectors(encoder, text) for text in batch.split()])
    if not expected.isfinite().all():
        raise ModelError(
            f"{name}: the vectors are not finite numbers, so the weights are broken. Download the "
            "checkpoint again."
        )
    prepack_linears(encoder.model)
    difference = relative_difference(text_vectors(encoder, batch), expected)
    tolerance = _TOLERANCE if encoder.dtype == torch.float32 else _LOW_PRECISION_TOLERANCE
    if not difference <= tolerance:  # The negation also refuses NaN.
        raise UnsupportedModelError(
            f"{name} is not supported: the vectors of texts in a padded batch differ from the "
            f"vectors of the same texts computed one by one. The relative difference is "
            f"{difference:.2g}, but at most {tolerance:g} is allowed."
        )
    return difference


def _random_texts(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Return random texts that end with the end-of-sequence token.

    A text encoder returns the vector of this token as the vector of the text.
    """
    batch = random_batch(encoder, lens)
    end = encoder.tokenizer.eos_token_id
    if end is not None:
        last = torch.tensor(batch.starts[1:], device=batch.token_ids.device) - 1
        batch.token_ids[last] = end
    return batch


def _vectors(out: Any) -> Tensor:  # noqa: ANN401 - a tensor, or an object with a tensor in newer versions of transformers
    """Return the vectors in the output of a model, float32."""
    vectors: Tensor = out if isinstance(out, Tensor) else out.pooler_output
    return vectors.float()
