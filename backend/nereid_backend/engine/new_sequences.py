# SPDX-License-Identifier: Apache-2.0
"""Checks new requests, and creates their sequences."""

import operator
import random
from collections import abc
from collections.abc import Callable
from dataclasses import replace

from nereid_backend.config import EngineConfig
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.lora.adapter_store import AdapterStore
from nereid_backend.model.forward_path.choose_image_path import ImageSupport
from nereid_backend.sampling.logits_processor import check_token_ids
from nereid_backend.vision.refused_parts import refuse_kind


class NewSequences:
    """Creates the sequences of new requests, and refuses invalid requests."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        scheduler: Scheduler,
        adapters: AdapterStore,
        images: ImageSupport,
        place_images: Callable[[ImageInputs], ImageInputs],
    ) -> None:
        """Create an object that validates new requests and creates their sequences.

        Args:
            config: the settings, including the limit on waiting requests and the seed.
            info: facts about the model, including the limits on prompts.
            scheduler: contains the requests that have not ended.
            adapters: the LoRA adapters that requests can select.
            images: how the model processes prompts that contain images.
            place_images: moves the images of a prompt to the device of the model.
        """
        self._max_num_waiting = config.max_num_waiting
        # If a request has no seed, this generator chooses one.
        self._seeds = random.Random(config.seed)
        self._info = info
        self._scheduler = scheduler
        self._adapters = adapters
        self._images = images
        self._place_images = place_images

    def create(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        images: ImageInputs | None,
    ) -> Sequence:
        """Validate a new request, and return its first sequence.

        If the request generates several sequences (`params.n`), the scheduler later copies the
        first sequence with its images. `Engine.add_request` documents the arguments and the errors.
        """
        if request_id in self._scheduler:
            raise RequestError(
                f"request_id: the id {request_id!r} belongs to a request that has not ended. Use "
                "another id."
            )
        if images is None:
            self._check_needs_no_images()  # Some models process only prompts with images.
        token_ids = self._read_prompt(prompt_token_ids)
        check_token_ids(params, self._info.vocab_size)
        self._check_prompt_logprobs(params)
        self._check_queue()
        sequence = self._make_sequence(request_id, token_ids, params)
        if images is not None:
            sequence.images = self._accept_images(token_ids, images)
        return sequence

    def _check_needs_no_images(self) -> None:
        """Raise a RequestError if the model cannot process a prompt that has only text."""
        if self._images.needs_images:
            raise RequestError(
                f"messages: the request has no {self._images.kind}, but {self._info.architecture} "
                f"accepts only prompts with {self._images.kind}. Send a chat with "
                f"{self._images.kind}."
            )

    def _check_prompt_logprobs(self, params: SamplingParams) -> None:
        """Raise a RequestError if the model cannot compute the requested prompt_logprobs."""
        if params.prompt_logprobs is not None and self._images.config.is_encoder_decoder:
            raise RequestError(
                "prompt_logprobs: the model is an encoder-decoder model, which computes no "
                "log-probabilities of the prompt. Remove prompt_logprobs from the request."
            )

    def _check_queue(self) -> None:
        """Raise a CapacityError if the waiting queue is full."""
        num_waiting = self._scheduler.num_waiting
        if num_waiting >= self._max_num_waiting:
            raise CapacityError(
                f"{num_waiting} requests are waiting, and the limit is {self._max_num_waiting} "
                "(max_num_waiting). Try again later."
            )

    def _make_sequence(
        self, request_id: str, token_ids: list[int], params: SamplingParams
    ) -> Sequence:
        """Create the first sequence of a request. The prompt and the parameters must be valid.

        Raises:
            RequestError: if the request selects an unknown LoRA adapter.
            CapacityError: if the adapter does not fit into the memory for adapters.
        """
        max_total_tokens = self._info.max_model_len
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(token_ids) + params.max_tokens)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        sequence = Sequence(
            request_id,
            token_ids,
            params,
            max_total_tokens=max_total_tokens,
            eos_token_ids=self._info.eos_token_ids,
            # A client can send any integer as the seed, but the random number generator needs a
            # 64-bit seed.
            seed=seed % 2**64,
        )
        if params.lora_name:
            # `acquire` reads the adapter from disk if the adapter is not in memory.
            sequence.adapter = self._adapters.acquire(params.lora_name)
        return sequence

    def _accept_images(self, token_ids: list[int], images: ImageInputs) -> ImageInputs:
        """Check the images of a prompt, and copy the images to the device of the model."""
        self._check_kinds(images)
        if not self._images.shares_blocks:
            # The model stores no keys and values in the blocks of a prompt with images, so no other
            # prompt may reuse these blocks. `first_token` is the first token whose keys and values
            # depend on the images. The value 0 therefore also prevents the reuse of blocks that
            # contain only text before the first image.
            images = replace(images, first_token=0)
        images = self._place_images(images)
        self._images.check(token_ids, images)
        return images

    def _check_kinds(self, images: ImageInputs) -> None:
        """Raise a RequestError if `images` contains a kind of media that the model does not accept.

        The kinds are images, videos and audio.
        """
        if self._images.reason:
            raise RequestError(f"messages: images are refused, because {self._images.reason}")
        for kind in images.kinds:
            if kind in self._images.refused:
                raise refuse_kind(kind, self._images.refused[kind])

    def _read_prompt(self, prompt: abc.Sequence[int]) -> list[int]:
        """Return the token ids of a prompt as a list of Python integers.

        Raises:
            RequestError: if the prompt is empty or too long, or if it contains an invalid token id.
        """
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(
                f"prompt: the value must be a list of token ids, but it is not ({error})."
            ) from error
        self._check_length(token_ids)  # refuses an empty list, for which `min` would fail
        # If the smallest and the largest id are valid, all ids are valid.
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._info.vocab_size:
                raise RequestError(
                    f"prompt: the token id {token_id} is outside the vocabulary (0 to "
                    f"{self._info.vocab_size - 1})."
                )
        return token_ids

    def _check_length(self, token_ids: list[int]) -> None:
        """Raise a RequestError if a prompt is empty, or so long that no token of an answer fits."""
        limit = self._info.max_model_len
        if not token_ids:
            raise RequestError("prompt: the prompt is empty. Send at least one token.")
        if len(token_ids) > limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len). Send a "
                "shorter prompt."
            )
        if len(token_ids) == limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len), which "
                "leaves no token for the answer. Send a shorter prompt."
            )
