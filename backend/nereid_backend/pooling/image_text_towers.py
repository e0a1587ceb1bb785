# SPDX-License-Identifier: Apache-2.0
"""Models with a text encoder and an image encoder (towers) whose vectors share one space."""

import itertools
from typing import Any

import torch
from torch import Tensor

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.pooling.choose_forward import random_batch, relative_difference
from nereid_backend.pooling.load_encoder import Encoder
from nereid_backend.pooling.packed_texts import TokenBatch

_LENS = (5, 5, 13, 21)
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


def text_vectors(encoder: Encoder, batch: TokenBatch) -> Tensor:
    """Return the vectors of texts, float32 [num_texts, projection_dim]. The batch is padded."""
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
    """Check that a batch of texts has the same vectors as each text alone.

    Mutates: the layout of the model's linear layers.

    Returns:
        The largest relative difference between the two.

    Raises:
        ModelError: the vectors are not finite numbers.
        UnsupportedModelError: the model has no such encoders, or the difference is too large.
    """
    if not hasattr(encoder.model, "get_text_features"):
        raise UnsupportedModelError(
            f"{name} is not supported: the model has no method get_text_features."
        )
    batch = _random_texts(encoder, tuple(min(n, max_len) for n in _LENS))
    starts = batch.starts
    parts = [
        text_vectors(encoder, TokenBatch(batch.token_ids[start:end], None, (end - start,)))
        for start, end in itertools.pairwise(starts)
    ]
    alone = torch.cat(parts)
    if not alone.isfinite().all():
        raise ModelError(
            f"{name}: the vectors are not finite numbers, so the weights are broken. Download the "
            "checkpoint again."
        )
    prepack_linears(encoder.model)
    difference = relative_difference(text_vectors(encoder, batch), alone)
    tolerance = _TOLERANCE if encoder.dtype == torch.float32 else _LOW_PRECISION_TOLERANCE
    # NaN is refused, too.
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name} is not supported: the vectors of a padded batch differ from those of each "
            f"text alone by {difference:.2g} (relative)."
        )
    return difference


def _random_texts(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Return random texts that end with the end-of-sequence token, whose vector is the text's."""
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
