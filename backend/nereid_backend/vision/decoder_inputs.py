# SPDX-License-Identifier: Apache-2.0
"""Records the inputs of a model's decoder for prompts that contain images.

The model's code encodes the images, replaces the embeddings of the placeholder tokens by image
features, and computes the positions. The embeddings and the positions are inputs of the decoder. A
hook on the decoder records the inputs and stops the forward pass. Later, the engine divides the
recorded inputs into chunks, and runs the decoder on each chunk.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.paths.model_call import UnfitError

# These recorded arguments of the decoder are ignored. The engine computes some of these arguments
# itself. The other arguments have no effect on the result.
_IGNORED = (
    "input_ids",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "cache_position",
    "mm_token_type_ids",
    "token_type_ids",
)
DEEPSTACK_MASK, DEEPSTACK = "visual_pos_masks", "deepstack_visual_embeds"


@dataclass(slots=True)
class DecoderInputs:
    """The inputs of a model's decoder for one prompt that contains images.

    Attributes:
        embeddings: [num_tokens, hidden_size].
        positions: [num_axes, num_tokens] int64. None means that the decoder computes the positions
            itself.
        next_positions: [num_axes] int64, the position of the first token after the prompt.
        deepstack: one tensor for each of the first layers of the decoder, [num_tokens,
            hidden_size]. The tensor contains image features that are added to the hidden states.
            The rows of text tokens are 0.
        deepstack_mask: [num_tokens] bool. True means that the token has image features in
            `deepstack`. None if the decoder gets no such features.
    """

    embeddings: Tensor
    positions: Tensor | None
    next_positions: Tensor | None
    deepstack: list[Tensor]
    deepstack_mask: Tensor | None


class _RecordedError(Exception):
    """Raised to stop a forward pass as soon as the inputs of the decoder are recorded."""


def record_inputs(
    model: Any,  # noqa: ANN401 - a model of transformers
    decoder: Module,
    token_ids: list[int],
    images: ImageInputs,
) -> DecoderInputs:
    """Run a model until it calls its decoder, and return the inputs of the decoder.

    Raises:
        UnfitError: the decoder gets an input that the engine cannot divide into chunks.
    """
    recorded: dict[str, Any] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
        if args:
            raise UnfitError("its decoder has positional arguments")
        recorded.update(kwargs)
        raise _RecordedError

    ids = torch.tensor([token_ids], device=model.device)
    handle = decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with suppress(_RecordedError):
            model(**first_inputs(model, ids, images.arguments), return_dict=True)
    finally:
        handle.remove()
    if not isinstance(recorded.get("inputs_embeds"), Tensor):
        raise UnfitError("its decoder gets no embeddings")
    return _read(recorded, len(token_ids))


def first_inputs(
    model: Any,  # noqa: ANN401 - a model of transformers
    ids: Tensor,
    arguments: Mapping[str, object],
) -> dict[str, Any]:
    """Return the arguments that transformers' `generate` passes to the first call of the model."""
    kwargs: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
        **arguments,
    }
    kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids, kwargs)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids, is_first_iteration=True, **kwargs
    )
    return inputs


def _read(recorded: dict[str, Any], num_tokens: int) -> DecoderInputs:
    """Convert the recorded arguments of a decoder to DecoderInputs.

    Raises:
        UnfitError: the decoder got an argument that is not supported.
    """
    embeddings = recorded.pop("inputs_embeds")
    positions = recorded.pop("position_ids", None)
    mask = recorded.pop(DEEPSTACK_MASK, None)
    deepstack = recorded.pop(DEEPSTACK, None)
    for name, value in recorded.items():
        if name not in _IGNORED and isinstance(value, Tensor | list | tuple | dict):
            raise UnfitError(f"its decoder has the argument {name}")
    if embeddings.shape[:2] != (1, num_tokens):
        raise UnfitError(
            f"its decoder gets {embeddings.shape[1]} embeddings for {num_tokens} tokens"
        )
    axes = next_positions = None
    if positions is not None:
        axes = positions.reshape(-1, num_tokens)
        next_positions = _next_positions(axes)
    if mask is None or deepstack is None:
        return DecoderInputs(embeddings[0], axes, next_positions, [], None)
    mask = mask.reshape(num_tokens)
    rows = []
    for features in deepstack:
        dense = torch.zeros_like(embeddings[0])
        dense[mask] = features.to(dense)
        rows.append(dense)
    return DecoderInputs(embeddings[0], axes, next_positions, rows, mask)


def _next_positions(axes: Tensor) -> Tensor:
    """Return the position of the first token that follows a prompt, [num_axes].

    If there are four axes, the first axis counts the tokens, and the other three axes are time,
    height and width. The next token has the same position on these three axes. This position is the
    largest position of the prompt on these axes, plus 1.
    """
    if len(axes) == 4:
        last = axes[1:].max()
        return torch.stack([axes[0].max(), last, last, last]) + 1
    return axes.max().expand(len(axes)) + 1
