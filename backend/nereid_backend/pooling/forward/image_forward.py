# SPDX-License-Identifier: Apache-2.0
"""Runs the code of a vision-language model on prompts. Each call computes one prompt."""

from typing import Any

import torch
from torch import Tensor

from nereid_backend.pooling.inputs.prepare_items import Prepared
from nereid_backend.pooling.loading.checkpoint_spec import RETRIEVAL, CheckpointSpec
from nereid_backend.pooling.loading.load_encoder import Encoder
from nereid_backend.vision.forward.feature_cache import FeatureCache
from nereid_backend.vision.forward.image_tensors import place_images
from nereid_backend.vision.image_digest import arguments_digest

# The largest total size of the cached image features, in bytes.
_FEATURE_BYTES = 64 * 2**20


class ImageForward:
    """Runs a vision-language model on prompts that may contain images.

    Attributes:
        features: the cached image features. If the same images are sent again, the image encoder is
            not run. Exception: the code of some models bypasses `get_image_features`, and so
            bypasses the cache.
    """

    def __init__(self, encoder: Encoder, spec: CheckpointSpec) -> None:
        """Store the arguments, and create the cache of image features.

        Mutates: the model's method `get_image_features`. The method uses the cache from now on.
        """
        self._encoder = encoder
        self._has_projection = spec.loader == RETRIEVAL
        self.features = FeatureCache(_FEATURE_BYTES)
        self.features.install(encoder.model)

    def token_vectors(self, prepared: Prepared) -> Tensor:
        """Return the vectors of a prompt's tokens, [num_tokens, hidden_size].

        If the model has an output projection (RETRIEVAL), the vectors are projected and have length
        1.
        """
        outputs = self._run(prepared)
        vectors: Tensor = outputs.embeddings if self._has_projection else outputs[0]
        return vectors[0]

    def last_logits(self, prepared: Prepared) -> Tensor:
        """Run the model on a prompt. Return the logits of the next token, float32 [vocab_size]."""
        logits: Tensor = self._run(prepared, logits_to_keep=1).logits
        return logits[0, -1].float()

    def _run(self, prepared: Prepared, **options: object) -> Any:  # noqa: ANN401 - an output class of transformers
        """Run the model on one prompt, and return the output of the model.

        If the prompt has images, the features that the image encoder computes are cached under the
        hash of the images.

        Args:
            prepared: the prompt.
            options: further arguments of the model, such as `logits_to_keep`.
        """
        encoder = self._encoder
        model: Any = encoder.model
        ids = torch.tensor([prepared.token_ids], device=encoder.device)
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "return_dict": True,
            **options,
        }
        if prepared.images is None:
            return model(**arguments)
        # Move the pixels and the other image data to the model's device, and convert the data to
        # the model's data type.
        images = place_images(prepared.images, encoder.device, encoder.dtype)
        arguments.update(images.arguments)
        with self.features.used_for(arguments_digest(prepared.images.arguments)):
            return model(**arguments)
