# SPDX-License-Identifier: Apache-2.0
"""Supports images in the forward path `packed`, which computes several sequences together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.step_batch import StepBatch
from nereid_backend.vision.forward.decoder_inputs import (
    DEEPSTACK,
    DEEPSTACK_MASK,
    DecoderInputs,
    record_inputs,
)
from nereid_backend.vision.forward.feature_cache import FeatureCache
from nereid_backend.vision.forward.own_attention import OwnAttention


@dataclass(frozen=True, slots=True)
class _ImageChunk:
    """Consecutive tokens of one sequence that has images.

    One run of the model computes all these tokens.

    Attributes:
        first_row: the index of the chunk's first token among all tokens of the step.
        start: the index of the chunk's first token in the sequence.
        end: the index after the chunk's last token in the sequence.
        prompt_end: `end` or the length of the prompt, whichever is smaller.
        inputs: the recorded decoder inputs of the prompt.
    """

    first_row: int
    start: int
    end: int
    prompt_end: int
    inputs: DecoderInputs

    @property
    def batch_rows(self) -> slice:
        """The slice that selects the tokens of this `_ImageChunk` from all tokens of the batch."""
        return slice(self.first_row, self.first_row + self.end - self.start)

    @property
    def has_prompt_tokens(self) -> bool:
        """Whether at least one token of this `_ImageChunk` belongs to the prompt."""
        return self.prompt_end > self.start

    @property
    def prompt_rows_in_batch(self) -> slice:
        """The slice that selects the prompt tokens of this `_ImageChunk` from the batch."""
        return slice(self.first_row, self.first_row + self.prompt_end - self.start)

    @property
    def prompt_rows_in_inputs(self) -> slice:
        """The slice that selects the prompt tokens of this `_ImageChunk` from `inputs`."""
        return slice(self.start, self.prompt_end)


class PackedImages:
    """Passes the embeddings and the positions of prompts with images to a model's decoder.

    In a step with images, at least one sequence has a prompt that contains an image.
    """

    def __init__(self, model: Any, features: FeatureCache, attention: OwnAttention) -> None:  # noqa: ANN401
        """Store the arguments, and find the decoder of the model.

        Args:
            model: a vision-language model of transformers.
            features: the cache of the features that the image encoder computes.
            attention: replaces the engine's attention by the model's own attention. This is needed
                while the model encodes the images of a prompt. The embeddings that the decoder then
                gets are stored, because the prompt is computed in chunks.

        Raises:
            UnfitError: the model does not name its decoder, so another method must be used.
        """
        self._model = model
        decoder = model.get_decoder()
        if not isinstance(decoder, Module) or decoder is model:
            raise UnfitError("it does not name its decoder")
        self._decoder = decoder
        self._features = features
        self._attention = attention
        # `_inputs` contains the decoder's inputs for each running sequence that has images. The
        # embeddings are freed when the whole prompt has been computed. The position ids are freed
        # when the sequence ends.
        self._inputs: WeakKeyDictionary[Sequence, DecoderInputs] = WeakKeyDictionary()

    @contextmanager
    def injecting(self, plan: StepPlan, batch: StepBatch) -> Iterator[None]:
        """In a `with` block, replace the decoder's inputs for sequences with images.

        In the block, the caller runs the model on the token ids of all sequences. At least one
        sequence must have images. The inputs of the other sequences stay the same. At the end of
        the block, the embeddings of each completely computed prompt are freed.
        """
        chunks = self._image_chunks(plan)

        def inject(
            module: Module,  # noqa: ARG001 - torch's signature
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # torch calls the decoder with the returned arguments.
            return args, {**kwargs, **self._new_arguments(batch, chunks, kwargs)}

        handle = self._decoder.register_forward_pre_hook(inject, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        # The embeddings are not freed in the `finally` block, because they are still needed after
        # an error.
        self._free_embeddings(plan)

    def _image_chunks(self, plan: StepPlan) -> list[_ImageChunk]:
        """Return an `_ImageChunk` for each chunk in `plan.chunks` whose sequence has images."""
        image_chunks = []
        first_row = 0
        for chunk in plan.chunks:
            if chunk.sequence.images is not None:
                end = chunk.start + chunk.num_tokens
                prompt_end = min(end, chunk.sequence.num_prompt_tokens)
                inputs = self._inputs_of(chunk, chunk.sequence.images)
                image_chunks.append(_ImageChunk(first_row, chunk.start, end, prompt_end, inputs))
            first_row += chunk.num_tokens
        return image_chunks

    def _inputs_of(self, chunk: Chunk, images: ImageInputs) -> DecoderInputs:
        """Return the inputs of the decoder for the whole prompt of `chunk.sequence`.

        The inputs are computed once for each sequence. When the prompt has been computed,
        `_free_embeddings` replaces the embeddings by an empty tensor. If the sequence is preempted
        later, its prompt is computed again, and so are the inputs.
        """
        sequence = chunk.sequence
        inputs = self._inputs.get(sequence)
        needs_embeddings = chunk.start < sequence.num_prompt_tokens
        if inputs is None or (needs_embeddings and not inputs.has_embeddings):
            token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            with self._attention.activated(), self._features.used_for(images.digest):
                inputs = record_inputs(self._model, self._decoder, token_ids, images)
            self._inputs[sequence] = inputs
        return inputs

    def _free_embeddings(self, plan: StepPlan) -> None:
        """Free the embeddings of each prompt whose last token has been computed."""
        for chunk in plan.chunks:
            inputs = self._inputs.get(chunk.sequence)
            is_done = chunk.start + chunk.num_tokens >= chunk.sequence.num_prompt_tokens
            if inputs is not None and is_done:
                inputs.free_embeddings()

    def _new_arguments(
        self, batch: StepBatch, chunks: list[_ImageChunk], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return new values for the decoder's arguments in a step that includes images.

        Args:
            batch: the inputs of the step.
            chunks: the chunks of sequences with images. There is at least one.
            kwargs: the arguments with which the model calls the decoder.
        """
        prompt_chunks = [chunk for chunk in chunks if chunk.has_prompt_tokens]
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:  # The model passes only token ids to its decoder.
            embeddings = self._model.get_input_embeddings()(batch.input_ids)
        replaced: dict[str, Any] = {
            "inputs_embeds": _with_recorded_embeddings(embeddings, prompt_chunks)
        }
        if "input_ids" in kwargs:
            # A decoder accepts either token ids or embeddings.
            replaced["input_ids"] = None
        positions = _positions_on_axes(batch, chunks)
        if positions is not None:
            has_one_axis = len(positions) == 1
            replaced["position_ids"] = positions if has_one_axis else positions[:, None]
        # Some decoders also add image features in their first layers (DeepStack).
        return replaced | _deepstack_arguments(batch, prompt_chunks)


def _with_recorded_embeddings(embeddings: Tensor, prompt_chunks: list[_ImageChunk]) -> Tensor:
    """Return a copy of `embeddings` that contains the recorded embeddings of `prompt_chunks`.

    Args:
        embeddings: [1, num_tokens, hidden_size], the embeddings of all tokens of the step.
        prompt_chunks: the parts of prompts with images that this step computes. Their recorded
            embeddings contain the image features.
    """
    replaced = embeddings.clone()
    for chunk in prompt_chunks:
        recorded = chunk.inputs.embeddings[chunk.prompt_rows_in_inputs]
        replaced[0, chunk.prompt_rows_in_batch] = recorded.to(replaced)
    return replaced


def _positions_on_axes(batch: StepBatch, chunks: list[_ImageChunk]) -> Tensor | None:
    """Return the positions of all tokens of a batch, [num_axes, num_tokens].

    In some models, each token has several positions, for example for time, height and width (the
    axes). A token of a sequence without images has the same position on all axes. Return None if
    the decoder computes the positions itself. `chunks` contains all tokens of sequences with images
    in the batch. There is at least one chunk.
    """
    # If a model passes positions to its decoder for one prompt, it passes positions with the same
    # axes for all prompts. Therefore, the first chunk shows whether there are positions, and how
    # many axes they have.
    first_positions = chunks[0].inputs.positions
    if first_positions is None:
        return None
    num_axes = len(first_positions.prompt_positions)
    batch_positions = batch.position_ids.repeat(num_axes, 1)
    for chunk in chunks:
        sequence_positions = chunk.inputs.positions
        assert sequence_positions is not None
        batch_positions[:, chunk.batch_rows] = sequence_positions.between(chunk.start, chunk.end)
    return batch_positions


def _deepstack_arguments(batch: StepBatch, prompt_chunks: list[_ImageChunk]) -> dict[str, Any]:
    """Return the arguments that let the decoder add image features in its first layers.

    This technique is called DeepStack. Return an empty dict if no prompt has such features.
    Otherwise, the arguments are the mask of the image tokens, [1, num_tokens] bool, and a list with
    one tensor for each layer: the features of the image tokens, [num_image_tokens, hidden_size].

    Args:
        batch: the inputs of the step.
        prompt_chunks: the parts of prompts with images that this step computes, in the order of
            their tokens in the batch. The decoder needs the features in this order.
    """
    mask = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    # Each item belongs to one chunk. The item is a list with one feature tensor for each layer.
    features_of_chunks: list[list[Tensor]] = []
    for chunk in prompt_chunks:
        inputs = chunk.inputs
        if inputs.deepstack_mask is None:
            continue
        # `inputs` describes the whole prompt, but this step computes only a part of the prompt.
        part = chunk.prompt_rows_in_inputs
        is_image_token = inputs.deepstack_mask[part]
        mask[0, chunk.prompt_rows_in_batch] = is_image_token
        features_of_chunks.append([features[part][is_image_token] for features in inputs.deepstack])
    if not features_of_chunks:
        return {}
    # Each item belongs to one layer. The item is a tuple with one feature tensor for each chunk.
    features_of_layers = zip(*features_of_chunks, strict=True)
    return {DEEPSTACK_MASK: mask, DEEPSTACK: [torch.cat(parts) for parts in features_of_layers]}
