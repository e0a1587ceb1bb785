# SPDX-License-Identifier: Apache-2.0
"""Computes one prompt of a vision-language model at a time, with the model's own code."""

from typing import Any

import torch
from torch import Tensor

from nereid_backend.pooling.inputs.prepare_items import Prepared
from nereid_backend.pooling.loading.checkpoint_spec import RETRIEVAL, CheckpointSpec
from nereid_backend.pooling.loading.load_encoder import Encoder
from nereid_backend.vision.image_tensors import place_images


class ImageForward:
    """Runs a vision-language model on prompts that may contain images."""

    def __init__(self, encoder: Encoder, spec: CheckpointSpec) -> None:
        self._encoder = encoder
        self._has_projection = spec.loader == RETRIEVAL

    def token_vectors(self, prepared: Prepared) -> Tensor:
        """Return the vectors of a prompt's tokens, [num_tokens, hidden_size].

        For a model with one vector for each token, these are the projected vectors of length 1.
        """
        outputs = self._run(prepared)
        vectors: Tensor = outputs.embeddings if self._has_projection else outputs[0]
        return vectors[0]

    def last_logits(self, prepared: Prepared) -> Tensor:
        """Return the logits after the last token of a prompt, float32 [vocab_size]."""
        logits: Tensor = self._run(prepared, logits_to_keep=1).logits
        return logits[0, -1].float()

    def _run(self, prepared: Prepared, **options: object) -> Any:  # noqa: ANN401 - an output class of transformers
        encoder = self._encoder
        model: Any = encoder.model
        ids = torch.tensor([prepared.token_ids], device=encoder.device)
        arguments: dict[str, Any] = {}
        if prepared.images is not None:
            images = place_images(prepared.images, encoder.device, encoder.dtype)
            arguments.update(images.arguments)
        return model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_dict=True,
            **arguments,
            **options,
        )
