# SPDX-License-Identifier: Apache-2.0
"""Checks that a model accepts the images of a prompt, before the prompt is scheduled.

An error in a step ends all sequences of the step. The code of some models raises an error for
unusual prompts. Example: two images without a token between them. Such a prompt must not end the
requests of other clients, so it is refused when it arrives.
"""

from typing import Any

import torch
from torch.nn import Module

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError, first_line
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.vision.decoder_inputs import record_inputs
from nereid_backend.vision.feature_cache import FeatureCache
from nereid_backend.vision.own_attention import OwnAttention


class PromptCheck:
    """Runs a model's code up to the decoder, which needs only the time of the image encoder.

    The features of the images are stored, so that the following steps do not run the encoder again.
    """

    def __init__(self, model: Any, features: FeatureCache, attention: OwnAttention) -> None:  # noqa: ANN401 - a model of transformers
        self._model = model
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        # Without the decoder's module, the inputs of the decoder cannot be recorded.
        self._decoder = decoder if isinstance(decoder, Module) and decoder is not model else None
        self._features = features
        self._attention = attention

    @torch.inference_mode()
    def __call__(self, token_ids: list[int], images: ImageInputs) -> None:
        """Compute the decoder's inputs for a prompt, and drop them.

        Raises:
            RequestError: the model's code raises an error for this prompt.
        """
        if self._decoder is None:
            return
        try:
            with self._attention.used(), self._features.serving(images.digest):
                record_inputs(self._model, self._decoder, token_ids, images)
        except UnfitError:
            # The inputs cannot be recorded, so this prompt cannot be checked.
            return
        except Exception as error:
            # A model's code can raise any exception. Only the request with these images ends.
            raise RequestError(
                "messages: the model cannot process the images of this prompt: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
