# SPDX-License-Identifier: Apache-2.0
"""Enables the forward path `packed` to compute prompts that contain images."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.step_batch import StepBatch
from nereid_backend.vision.decoder_inputs import (
    DEEPSTACK,
    DEEPSTACK_MASK,
    DecoderInputs,
    record_inputs,
)
from nereid_backend.vision.feature_cache import FeatureCache
from nereid_backend.vision.own_attention import OwnAttention


class PackedImages:
    """Replaces inputs of a model's decoder when a step computes sequences with images.

    In a step with images, at least one sequence has a prompt that contains an image.
    """

    def __init__(self, model: Any, features: FeatureCache, attention: OwnAttention) -> None:  # noqa: ANN401
        """Store the arguments, and find the decoder of the model.

        Raises:
            UnfitError: the model does not name its decoder.
        """
        self._model = model
        decoder = model.get_decoder()
        if not isinstance(decoder, Module) or decoder is model:
            raise UnfitError("it does not name its decoder")
        self._decoder = decoder
        self._features = features
        self._attention = attention
        # Contains the recorded decoder inputs of each running sequence that has images. The
        # embeddings are freed when the whole prompt has been computed. The position ids are freed
        # when the sequence ends.
        self._inputs: WeakKeyDictionary[Sequence, DecoderInputs] = WeakKeyDictionary()

    @contextmanager
    def injecting(self, plan: StepPlan, batch: StepBatch) -> Iterator[None]:
        """Return a context in which the recorded inputs replace the inputs of the decoder.

        At least one sequence of the plan must have images. Inputs are replaced only for sequences
        with images.
        """
        parts = [self._inputs_of(chunk) for chunk in plan.chunks]

        def inject(
            module: Module,  # noqa: ARG001 - torch's signature
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**kwargs, **self._arguments(plan, batch, parts, kwargs)}

        handle = self._decoder.register_forward_pre_hook(inject, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        self._drop_embeddings(plan)

    def _inputs_of(self, chunk: Chunk) -> DecoderInputs | None:
        """Return the decoder inputs of a chunk's sequence; None if the sequence has no images."""
        sequence = chunk.sequence
        if sequence.images is None:
            return None
        inputs = self._inputs.get(sequence)
        needs_embeddings = chunk.start < sequence.num_prompt_tokens
        if inputs is None or (needs_embeddings and not len(inputs.embeddings)):
            token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            with self._attention.used(), self._features.serving(sequence.images.digest):
                inputs = record_inputs(self._model, self._decoder, token_ids, sequence.images)
            self._inputs[sequence] = inputs
        return inputs

    def _drop_embeddings(self, plan: StepPlan) -> None:
        """Free the recorded embeddings of each prompt that has been computed completely."""
        for chunk in plan.chunks:
            inputs = self._inputs.get(chunk.sequence)
            is_done = chunk.start + chunk.num_tokens >= chunk.sequence.num_prompt_tokens
            if inputs is not None and is_done:
                inputs.embeddings = inputs.embeddings[:0].clone()
                inputs.deepstack = [rows[:0].clone() for rows in inputs.deepstack]

    def _arguments(
        self,
        plan: StepPlan,
        batch: StepBatch,
        parts: list[DecoderInputs | None],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the new values of the decoder's arguments for a step with images."""
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = self._model.get_input_embeddings()(batch.input_ids)
        embeddings = embeddings.clone()
        result: dict[str, Any] = {"inputs_embeds": embeddings}
        if "input_ids" in kwargs:
            result["input_ids"] = None
        first = next(part for part in parts if part is not None)
        positions = _positions(plan, batch, parts, first)
        if positions is not None:
            result["position_ids"] = positions
        mask = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        deepstack: list[list[Tensor]] = []
        offset = 0
        for chunk, part in zip(plan.chunks, parts, strict=True):
            end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt_tokens)
            if part is not None and end > chunk.start:
                rows = slice(offset, offset + end - chunk.start)
                embeddings[0, rows] = part.embeddings[chunk.start : end].to(embeddings)
                if part.deepstack_mask is not None:
                    marked = part.deepstack_mask[chunk.start : end]
                    mask[0, rows] = marked
                    deepstack.append([layer[chunk.start : end][marked] for layer in part.deepstack])
            offset += chunk.num_tokens
        if deepstack:
            result[DEEPSTACK_MASK] = mask
            result[DEEPSTACK] = [torch.cat(layers) for layers in zip(*deepstack, strict=True)]
        return result


def _positions(
    plan: StepPlan, batch: StepBatch, parts: list[DecoderInputs | None], first: DecoderInputs
) -> Tensor | None:
    """Return the positions of all tokens of a step, [1, num_tokens] or [num_axes, 1, num_tokens].

    A token of a sequence without images has the same position on all axes. Return None if the
    decoder computes the positions itself.
    """
    if first.positions is None:
        return None
    positions = batch.position_ids.repeat(len(first.positions), 1)
    offset = 0
    for chunk, part in zip(plan.chunks, parts, strict=True):
        if part is not None and part.positions is not None and part.next_positions is not None:
            num_prompt = chunk.sequence.num_prompt_tokens
            end = chunk.start + chunk.num_tokens
            known = part.positions[:, chunk.start : min(end, num_prompt)]
            first_later = max(chunk.start, num_prompt)
            num_later = max(0, end - first_later)
            later = torch.arange(num_later, device=positions.device) + first_later - num_prompt
            values = torch.cat([known, part.next_positions[:, None] + later], dim=1)
            positions[:, offset : offset + chunk.num_tokens] = values
        offset += chunk.num_tokens
    return positions if len(positions) == 1 else positions[:, None]
