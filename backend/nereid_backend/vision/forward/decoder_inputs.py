# SPDX-License-Identifier: Apache-2.0
"""Computes the inputs of a model's decoder for prompts that contain images.

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

# The model's code calls the decoder with these arguments, but the arguments are ignored. The engine
# itself computes some of these arguments. The other arguments have no effect on the result.
_IGNORED = (
    "input_ids",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "cache_position",
    "mm_token_type_ids",
    "token_type_ids",
)
# Some decoders add further image features to the hidden states of their first layers (DeepStack).
# The argument DEEPSTACK contains, for each of these layers, the features of the image tokens. The
# argument DEEPSTACK_MASK is True for image tokens and False for text tokens.
DEEPSTACK_MASK, DEEPSTACK = "visual_pos_masks", "deepstack_visual_embeds"
# In some models, each token has a position on four axes: time, height, width, and the index of the
# token in the prompt.
_NUM_AXES_WITH_INDEX = 4
# The decoder's arguments that are stored in `DecoderInputs`.
_RECORDED = ("inputs_embeds", "position_ids", DEEPSTACK_MASK, DEEPSTACK)


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """The positions of the tokens of a prompt. Each token has one position on each axis.

    Attributes:
        prompt_positions: [num_axes, num_tokens] int64, the positions of the prompt's tokens.
        next_position: [num_axes] int64, the position of the first token after the prompt.
    """

    prompt_positions: Tensor
    next_position: Tensor

    def between(self, start: int, end: int) -> Tensor:
        """Return the positions of the tokens from `start` to `end`, [num_axes, end - start].

        The tokens may belong to the prompt or follow the prompt. After the prompt, the position
        rises by 1 with each token, on every axis.

        Example: `prompt_positions` is [[0, 1, 1], [0, 1, 2]], and `next_position` is [3, 3].
        `between(2, 5)` returns [[1, 3, 4], [2, 3, 4]]: the token 2 belongs to the prompt, and the
        tokens 3 and 4 follow the prompt.
        """
        num_prompt_tokens = self.prompt_positions.shape[1]
        # The tokens [first_later, end_later) follow the prompt. The range can be empty.
        first_later = max(start, num_prompt_tokens)
        end_later = max(end, num_prompt_tokens)
        later_tokens = torch.arange(first_later, end_later, device=self.prompt_positions.device)
        later_positions = self.next_position[:, None] + later_tokens - num_prompt_tokens
        return torch.cat([self.prompt_positions[:, start:end], later_positions], dim=1)


@dataclass(slots=True)
class DecoderInputs:
    """The inputs of a model's decoder for one prompt that contains images.

    Attributes:
        embeddings: [num_tokens, hidden_size].
        positions: the positions of the tokens. None means that the decoder computes the positions
            itself.
        deepstack: one tensor for each of the first layers of the decoder, [num_tokens,
            hidden_size]. The tensor contains image features that are added to the hidden states.
            The rows of text tokens are 0.
        deepstack_mask: [num_tokens] bool. True means that the token has image features in
            `deepstack`. None if the decoder gets no such features.
    """

    embeddings: Tensor
    positions: PromptPositions | None
    deepstack: list[Tensor]
    deepstack_mask: Tensor | None

    @property
    def has_embeddings(self) -> bool:
        """Whether the embeddings have not been freed."""
        return len(self.embeddings) > 0

    def free_embeddings(self) -> None:
        """Free the embeddings and the image features, but keep the positions."""
        # As long as a slice exists, the memory of the whole tensor is not freed. Therefore `clone`
        # replaces the empty slice by a copy.
        self.embeddings = self.embeddings[:0].clone()
        self.deepstack = [features[:0].clone() for features in self.deepstack]


class _RecordedError(Exception):
    """Raised to stop the run of a model as soon as the inputs of the decoder are known."""


def record_inputs(
    model: Any,  # noqa: ANN401 - a model of transformers
    decoder: Module,
    token_ids: list[int],
    images: ImageInputs,
) -> DecoderInputs:
    """Run a model until it calls its decoder, and return the inputs of the decoder.

    The decoder is the part of the model that computes the tokens after the images are encoded.

    Args:
        model: a vision-language model.
        decoder: the module of the model that computes the tokens.
        token_ids: the tokens of the prompt.
        images: the prepared images of the prompt.

    Raises:
        UnfitError: the decoder gets an input that the engine cannot divide into chunks.
    """
    ids = torch.tensor([token_ids], device=model.device)
    # `arguments` contains the token ids, the images, the positions and the attention mask.
    arguments = first_call_arguments(model, ids, images.arguments)
    decoder_arguments = _record_decoder_arguments(model, decoder, arguments)
    if not isinstance(decoder_arguments.get("inputs_embeds"), Tensor):
        raise UnfitError("its decoder gets no embeddings")
    return _parse_decoder_arguments(decoder_arguments, len(token_ids))


def _record_decoder_arguments(
    model: Any,  # noqa: ANN401 - a model of transformers
    decoder: Module,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Call a model, and return the keyword arguments with which the model calls its decoder.

    A hook on the decoder stores the arguments. The hook then raises an exception, so that the
    decoder does not run.

    Args:
        model: the model.
        decoder: the part of the model that computes the text tokens.
        arguments: the arguments of the model.

    Raises:
        UnfitError: the model calls its decoder with positional arguments.
    """
    recorded: dict[str, Any] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
        if args:
            raise UnfitError("its decoder has positional arguments")
        recorded.update(kwargs)
        raise _RecordedError

    handle = decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with suppress(_RecordedError):
            model(**arguments, return_dict=True)
    finally:
        handle.remove()
    return recorded


def first_call_arguments(
    model: Any,  # noqa: ANN401 - a model of transformers
    ids: Tensor,
    image_arguments: Mapping[str, object],
) -> dict[str, Any]:
    """Return the arguments that transformers' `generate` passes to the first call of the model.

    The caller runs the model with these arguments without generating tokens. Like `generate`, this
    function calls the model's own methods, which compute the positions and select the arguments.
    transformers has no public method for the positions.

    Args:
        model: a vision-language model.
        ids: the token ids of the prompt, [1, num_tokens].
        image_arguments: the prepared images, such as {"pixel_values": ...}.
    """
    prompt_arguments: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,  # There is only one call, so no KV cache is needed.
        **image_arguments,
    }
    positions = model._prepare_position_ids_for_generation(ids, prompt_arguments)
    prompt_arguments["position_ids"] = positions
    call_arguments: dict[str, Any] = model.prepare_inputs_for_generation(
        ids, is_first_iteration=True, **prompt_arguments
    )
    return call_arguments


def _parse_decoder_arguments(recorded: dict[str, Any], num_tokens: int) -> DecoderInputs:
    """Create `DecoderInputs` from the arguments with which a model called its decoder.

    Args:
        recorded: the arguments by name. `inputs_embeds` is a tensor [1, num_tokens, hidden_size].
        num_tokens: the number of tokens of the prompt.

    Raises:
        UnfitError: the decoder got an argument that is not supported, or too few embeddings.
    """
    _refuse_unknown_arguments(recorded)
    embeddings = recorded["inputs_embeds"]
    if embeddings.shape[:2] != (1, num_tokens):
        raise UnfitError(
            f"its decoder gets {embeddings.shape[1]} embeddings for {num_tokens} tokens"
        )
    positions = _parse_positions(recorded.get("position_ids"), num_tokens)
    # Some decoders also get image features for their first layers (DeepStack).
    features_of_layers, mask = recorded.get(DEEPSTACK), recorded.get(DEEPSTACK_MASK)
    if features_of_layers is None or mask is None:
        return DecoderInputs(embeddings[0], positions, deepstack=[], deepstack_mask=None)
    is_image_token = mask.reshape(num_tokens)
    deepstack = [
        _with_text_rows(features, is_image_token, embeddings[0]) for features in features_of_layers
    ]
    return DecoderInputs(embeddings[0], positions, deepstack, is_image_token)


def _parse_positions(position_ids: Tensor | None, num_tokens: int) -> PromptPositions | None:
    """Convert the decoder's argument `position_ids`. Return None if the argument is None.

    The shape of the argument is [1, num_tokens] or [num_axes, 1, num_tokens].
    """
    if position_ids is None:
        return None
    by_axis = position_ids.reshape(-1, num_tokens)
    return PromptPositions(by_axis, _next_positions(by_axis))


def _refuse_unknown_arguments(recorded: dict[str, Any]) -> None:
    """Raise an UnfitError if the decoder has an argument that the engine cannot divide into chunks.

    An unknown tensor or collection could contain values for each token, and the engine does not
    know how to divide such values. Plain values, such as flags, are the same for all chunks.
    """
    for name, value in recorded.items():
        is_known = name in _RECORDED or name in _IGNORED
        if not is_known and isinstance(value, Tensor | list | tuple | dict):
            raise UnfitError(f"its decoder has the argument {name}")


def _with_text_rows(features: Tensor, mask: Tensor, embeddings: Tensor) -> Tensor:
    """Return features for all tokens: image features for image tokens, and 0 for text tokens.

    With one row for each token, the engine can divide the features into chunks.

    Args:
        features: [num_image_tokens, hidden_size].
        mask: [num_tokens] bool. True means an image token.
        embeddings: [num_tokens, hidden_size], which determines the shape and the data type.
    """
    rows = torch.zeros_like(embeddings)
    rows[mask] = features.to(rows)
    return rows


def _next_positions(axes: Tensor) -> Tensor:
    """Return the position of the token that follows a prompt: one number for each axis.

    `axes` contains the positions of the prompt's tokens, [num_axes, num_tokens]. The next token is
    text, and a text token has the same position on the axes time, height and width. This position
    is the largest position of the prompt on these axes, plus 1.

    If there are four axes, the first axis is the index of the token in the prompt.
    """
    has_index_axis = len(axes) == _NUM_AXES_WITH_INDEX
    if has_index_axis:
        last = axes[1:].max()
        return torch.stack([axes[0].max(), last, last, last]) + 1
    return axes.max().expand(len(axes)) + 1
