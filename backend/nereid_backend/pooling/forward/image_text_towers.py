# SPDX-License-Identifier: Apache-2.0
"""Models with a text encoder and an image encoder.

The vectors of texts and images are comparable.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.pooling.forward.packed_texts import TokenBatch
from nereid_backend.pooling.forward.self_check_texts import (
    random_batch,
    relative_difference,
    self_check_lens,
)
from nereid_backend.pooling.loading.load_encoder import Encoder

# Limits for the test of padded batches. Each text is computed twice: in a padded batch, and alone.
# If the relative difference of the two vectors exceeds the limit, the model is refused.
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


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
    return _pooled_vectors(out)


def image_vectors(encoder: Encoder, pixels: Tensor) -> Tensor:
    """Return the vectors of images, float32 [num_images, projection_dim].

    Shapes: pixels [num_images, channels, height, width].
    """
    model: Any = encoder.model
    return _pooled_vectors(model.get_image_features(pixels.to(encoder.device, encoder.dtype)))


def num_image_tokens(encoder: Encoder) -> int:
    """Return the number of tokens that the image encoder uses for one image.

    An image encoder has one token for each patch of the image, and one more token.

    Example: an image size of 224 and a patch size of 16 return 14 * 14 + 1 = 197.
    """
    vision = encoder.model.config.vision_config
    side = getattr(vision, "image_size", 224) // max(1, getattr(vision, "patch_size", 16))
    return int(side * side + 1)


@torch.inference_mode()
def prepack_towers(encoder: Encoder, name: str, max_len: int) -> float:
    """Pack the model's linear layers, and check that the packed layers give the right text vectors.

    The vectors of texts in a padded batch are compared with those of the original layers for each
    text alone.

    Mutates: the layout of the model's linear layers, for the CPU kernels.

    Args:
        encoder: the loaded model.
        name: the name of the architecture, for error messages.
        max_len: the length limit of inputs in tokens.

    Returns:
        The largest relative difference between the vector of a text computed alone and its vector
        in a batch.

    Raises:
        ModelError: the vectors are not finite numbers.
        UnsupportedModelError: the model has no method for text vectors, or the difference is too
            large.
    """
    if not hasattr(encoder.model, "get_text_features"):
        raise UnsupportedModelError(
            f"{name} is not supported: the model has no method get_text_features. Use "
            "another model."
        )
    batch = _random_texts(encoder, self_check_lens(max_len))
    expected = torch.cat([text_vectors(encoder, text) for text in batch.split()])
    if not expected.isfinite().all():
        raise ModelError(
            f"{name}: the vectors are not finite numbers, so the weights are broken. Download the "
            "checkpoint again."
        )
    prepack_linears(encoder.model)
    difference = relative_difference(text_vectors(encoder, batch), expected)
    tolerance = _TOLERANCE if encoder.dtype == torch.float32 else _LOW_PRECISION_TOLERANCE
    if math.isnan(difference) or difference > tolerance:
        raise UnsupportedModelError(
            f"{name} is not supported: the vectors of texts in a padded batch differ from the "
            f"vectors of the same texts computed one by one. The relative difference is "
            f"{difference:.2g}, but at most {tolerance:g} is allowed. Use another model."
        )
    return difference


def _random_texts(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Return random texts that end with the end-of-sequence token.

    A text encoder returns the vector of the end-of-sequence token as the vector of the text.
    """
    batch = random_batch(encoder, lens)
    end = encoder.tokenizer.eos_token_id
    if end is not None:
        last = torch.tensor(batch.starts[1:], device=batch.token_ids.device) - 1
        batch.token_ids[last] = end
    return batch


def _pooled_vectors(out: Any) -> Tensor:  # noqa: ANN401 - a tensor, or an object with a tensor in newer versions of transformers
    """Return the vectors of texts or images from the output of a tower, float32 [n, dimension]."""
    vectors: Tensor = out if isinstance(out, Tensor) else out.pooler_output
    return vectors.float()
