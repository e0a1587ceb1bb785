# SPDX-License-Identifier: Apache-2.0
"""Checks that a model can process a prompt with images, before the prompt is scheduled.

The code of some models raises an error for unusual prompts, such as a prompt in which no token
separates two images. If a step raises an error, all sequences of the step end. Therefore a prompt
is checked when it arrives. If the model's code raises an error, only this prompt is refused, and
the requests of other clients continue.
"""

import logging
from typing import Any

import torch
from torch.nn import Module

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError, first_line
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.vision.forward.decoder_inputs import record_inputs
from nereid_backend.vision.forward.feature_cache import FeatureCache
from nereid_backend.vision.forward.own_attention import OwnAttention

logger = logging.getLogger(__name__)


class PromptCheck:
    """Runs the model's code until the inputs of the decoder are computed.

    A run takes about as long as the image encoder. The image features are cached, so the later
    steps of the request do not run the image encoder again. In an encoder-decoder model, a run also
    computes the encoder of the text.
    """

    def __init__(self, model: Any, features: FeatureCache, attention: OwnAttention) -> None:  # noqa: ANN401 - a model of transformers
        self._model = model
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        # The inputs of the decoder are read by a hook. The hook is a function that torch calls when
        # the decoder's module is called. If the model has no separate module for the decoder, the
        # inputs cannot be read.
        self._decoder = decoder if isinstance(decoder, Module) and decoder is not model else None
        self._has_encoder = bool(model.config.is_encoder_decoder)
        self._features = features
        self._attention = attention

    @torch.inference_mode()
    def check(self, token_ids: list[int], images: ImageInputs) -> None:
        """Raise a RequestError if the model's code fails for a prompt with images.

        The model encodes the images and computes the inputs of its decoder. The decoder itself is
        not run, and its inputs are discarded.
        """
        if self._decoder is None:  # The model has no separate decoder, so nothing can be checked.
            return
        try:
            # Encode the images with the model's own attention instead of the engine's. The features
            # stay in the cache, so the request does not compute them again.
            with self._attention.activated(), self._features.used_for(images.digest):
                if self._has_encoder:
                    self._run_encoder(token_ids, images)
                else:
                    record_inputs(self._model, self._decoder, token_ids, images)
        except UnfitError as error:
            logger.debug("A prompt with images cannot be checked: %s", error)
        except Exception as error:
            # A model's code can raise any exception. Convert the exception to a RequestError, so
            # that only the current request fails.
            raise RequestError(
                "messages: the model cannot process the images of this prompt: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    def _run_encoder(self, token_ids: list[int], images: ImageInputs) -> None:
        """Run the encoder of an encoder-decoder model in the same way as transformers' `generate`.

        The encoder reads the whole prompt. Its outputs are discarded.
        """
        ids = torch.tensor([token_ids], device=self._model.device)
        arguments = {"attention_mask": torch.ones_like(ids), **images.arguments}
        self._model._maybe_prepare_encoder_kwargs_for_generation(
            ids, arguments, "input_ids", self._model.generation_config
        )
