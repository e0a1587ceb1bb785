# SPDX-License-Identifier: Apache-2.0
"""Models with a text and an image tower that meet in one space."""

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


def text_vectors(encoder: Encoder, batch: TokenBatch) -> Tensor:
    """Vectors of texts in a padded batch, [num_texts, projection_dim]."""
    padding = encoder.tokenizer.pad_token_id
    if padding is None:
        padding = encoder.tokenizer.eos_token_id or 0
    model: Any = encoder.model
    out = model.get_text_features(
        input_ids=batch.pad(batch.token_ids, padding), attention_mask=batch.mask().long()
    )
    return _vectors(out)


def image_vectors(encoder: Encoder, pixels: Tensor) -> Tensor:
    """Vectors of images, [num_images, projection_dim].

    Shapes: pixels [num_images, channels, height, width].
    """
    model: Any = encoder.model
    return _vectors(model.get_image_features(pixels.to(encoder.device, encoder.dtype)))


@torch.inference_mode()
def choose_towers(encoder: Encoder, name: str, max_len: int) -> float:
    """See that a mixed batch of texts gives what each gives alone; the relative difference.

    Mutates: the layout of the model's linear layers.

    Raises:
        ModelError: the vectors are not finite numbers.
        UnsupportedModelError: it has no such towers, or a mixed batch differs.
    """
    if not hasattr(encoder.model, "get_text_features"):
        raise UnsupportedModelError(f"{name} is not supported: it gives no text features")
    batch = _ended(encoder, tuple(min(n, max_len) for n in _LENS))
    starts = batch.starts
    parts = [
        text_vectors(encoder, TokenBatch(batch.token_ids[start:end], None, (end - start,)))
        for start, end in itertools.pairwise(starts)
    ]
    alone = torch.cat(parts)
    if not alone.isfinite().all():
        raise ModelError(f"{name}: its vectors are not finite numbers; the weights are broken")
    prepack_linears(encoder.model)
    difference = relative_difference(text_vectors(encoder, batch), alone)
    if not difference <= (_TOLERANCE if encoder.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(
            f"{name} is not supported: a padded batch of texts differs from each alone by "
            f"{difference:.2g} of the vectors' spread"
        )
    return difference


def _ended(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Random texts that end as the tokenizer ends them; the vector is that of the end."""
    batch = random_batch(encoder, lens)
    end = encoder.tokenizer.eos_token_id
    if end is not None:
        last = torch.tensor(batch.starts[1:], device=batch.token_ids.device) - 1
        batch.token_ids[last] = end
    return batch


def _vectors(out: Any) -> Tensor:  # noqa: ANN401 - a tensor or an output with one, by version
    found: Tensor = out if isinstance(out, Tensor) else out.pooler_output
    return found.float()
