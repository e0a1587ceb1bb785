# SPDX-License-Identifier: Apache-2.0
"""Builds the prompt of a request. The request contains a chat, a text or token ids."""

from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.tokenizer.image_prompts import (
    ImagePrompts,
    has_image_parts,
    take_media,
)
from nereid_backend.serving.tokenizer.prompt_builder import Prompt, PromptBuilder, read_flag
from nereid_backend.serving.tokenizer.request_fields import RequestFields
from nereid_backend.serving.tokenizer.request_limits import RequestLimits

_TRUNCATE = "truncate_prompt_tokens"
_AS_MANY_AS_FIT = -1


class RequestPrompts:
    """Builds the prompt of each request that the Triton model `tokenizer` receives."""

    def __init__(self, prompts: PromptBuilder, images: ImagePrompts | None) -> None:
        """Store the builders of prompts.

        Args:
            prompts: builds prompts from messages and from texts.
            images: builds prompts with images; None if the checkpoint reads no images.
        """
        self._prompts = prompts
        self._images = images

    def take_images(
        self,
        request: Any,  # noqa: ANN401 - the server's own type
        body: dict[str, Any] | None,
    ) -> list[bytes]:
        """Return the images of a request, from the messages of the chat or from the tensor `image`.

        Mutates: `body`. Each image in the messages is replaced by a placeholder.

        Raises:
            RequestError: the messages and the tensor have images, or the request has images, but
                the served model reads no images.
        """
        tensor = triton_api.optional_array(request, tensor_names.IMAGE)
        tensor_images = [] if tensor is None else [bytes(image) for image in tensor]
        if self._images is None:  # The served model reads no images.
            if tensor_images:
                raise _image_error("image")
            if has_image_parts(body):
                raise _image_error("messages")
            return []
        message_images = [] if body is None else take_media(body)
        if message_images and tensor_images:
            raise RequestError(
                "image: the messages of the request have images, too. Send all images in the "
                "messages, or all images in the tensor."
            )
        return message_images or tensor_images

    def build(
        self,
        request: Any,  # noqa: ANN401 - the server's own type
        body: dict[str, Any] | None,
        fields: dict[str, Any],
        images: list[bytes],
    ) -> Prompt:
        """Return the prompt of a request. See `with_images` for a description of the arguments."""
        if images:
            return self.with_images(request, body, fields, images)
        return self.without_images(request, body, fields)

    def with_images(
        self,
        request: Any,  # noqa: ANN401 - the server's own type
        body: dict[str, Any] | None,
        fields: dict[str, Any],
        images: list[bytes],
    ) -> Prompt:
        """Return the prompt of a chat request or a text request that contains images.

        Args:
            request: the server's request. For a completion, its tensor `text_input` contains the
                text, with one placeholder for each image.
            body: the body of a chat; None for a completion.
            fields: the fields of the chat or of the completion, such as {"temperature": 0.5,
                "max_tokens": 100}.
            images: the return value of `take_images`.

        Raises:
            RequestError: an image is invalid, the prompt exceeds a limit or must be truncated, or
                the request has not exactly one of a chat and a text.
        """
        assert self._images is not None, "`take_images` refuses images without an image encoder"
        text = self._text_with_placeholders(request, body)
        limits = self._prompts.limits
        limits.check_text(text)
        limits.check_values_and_depth(fields)
        num_kept = read_num_kept(fields, limits.max_model_len)
        add_special_tokens = read_flag(fields, "add_special_tokens", default=None)
        token_ids, packed_images = self._images.prepare(
            text, images, add_special_tokens=add_special_tokens
        )
        limits.check_token_ids(len(token_ids))
        if num_kept is not None and len(token_ids) > num_kept:
            raise RequestError(
                f"truncate_prompt_tokens: the prompt has {len(token_ids)} tokens, but only "
                f"{num_kept} may be kept, and a prompt with images cannot be truncated. Send a "
                "shorter prompt or leave the field out."
            )
        return Prompt(token_ids, text, packed_images)

    def _text_with_placeholders(
        self,
        request: Any,  # noqa: ANN401 - the server's own type
        body: dict[str, Any] | None,
    ) -> str:
        """Return the text of a request with images: the rendered chat, or the tensor `text_input`.

        Raises:
            RequestError: the request has not exactly one of a chat and a text.
        """
        text = triton_api.optional_text(request, tensor_names.TEXT_INPUT)
        if not triton_api.has_tensor(request, tensor_names.INPUT_IDS):
            if body is not None and text is None:
                return self._prompts.render_chat(body)
            if body is None and text is not None:
                return text
        raise RequestError(
            "image: a request with images must have exactly one of text_input and chat_request, "
            "and no input_ids."
        )

    def without_images(
        self,
        request: Any,  # noqa: ANN401 - the server's own type
        body: dict[str, Any] | None,
        fields: dict[str, Any],
    ) -> Prompt:
        """Return the prompt of a request that contains no image.

        The request has exactly one of three sources: a chat, a text, or token ids.

        Args:
            request: the server's request.
            body: the body of a chat request; None for a completion.
            fields: the request's fields, such as {"temperature": 0.5, "max_tokens": 100}.

        Raises:
            RequestError: the request has none or several of the three sources, the source is wrong,
                or the prompt exceeds a limit.
        """
        text = triton_api.optional_text(request, tensor_names.TEXT_INPUT)
        num_kept = read_num_kept(fields, self._prompts.limits.max_model_len)
        ids = read_input_ids(request, self._prompts.limits, num_kept)
        num_sources = sum(source is not None for source in (body, text, ids))
        if num_sources != 1:
            raise RequestError(
                "a request must have exactly one of text_input, input_ids and chat_request."
            )
        if body is not None:
            # `from_chat` checks all limits of a chat, including the limits on nested values.
            return self._prompts.from_chat(body, num_kept)
        self._prompts.limits.check_values_and_depth(fields)
        if text is not None:
            add_special_tokens = read_flag(fields, "add_special_tokens", default=True)
            return self._prompts.from_text(
                text, add_special_tokens=add_special_tokens, num_kept=num_kept
            )
        if not ids:
            raise RequestError("input_ids: the list is empty. Send at least one token id.")
        return Prompt(ids, text=None)


def _image_error(field: str) -> RequestError:
    """Return the error for images in the field `field`. The served model accepts no images."""
    return RequestError(
        f"{field}: the served model does not accept images, videos or audio. Send text only."
    )


def read_input_ids(
    request: Any,  # noqa: ANN401 - the server's own type
    limits: RequestLimits,
    num_kept: int | None = None,
) -> list[int] | None:
    """Return the token ids in a request's input tensor; None if the tensor is missing.

    If `num_kept` is set, return only the last `num_kept` token ids. Example: the tensor [5, 6, 7]
    and `num_kept` 2 return [6, 7].

    Raises:
        RequestError: the request has more token ids than the limit.
    """
    ids = triton_api.optional_array(request, tensor_names.INPUT_IDS)
    if ids is None:
        return None
    if num_kept is not None:
        first_kept = max(0, ids.size - num_kept)
        ids = ids[first_kept:]
    # A list of Python integers needs much memory, so the limit is checked first.
    limits.check_token_ids(ids.size)
    token_ids: list[int] = ids.tolist()
    return token_ids


def read_num_kept(fields: Mapping[str, Any], max_model_len: int) -> int | None:
    """Return the number of tokens that truncation keeps; None if the prompt is not truncated.

    Truncation keeps the last tokens of a prompt. The value -1 means as many tokens as fit. Example:
    -1 with max_tokens=100 and max_model_len=4096 returns 3996.

    Args:
        fields: the request's fields.
        max_model_len: the length limit of the prompt and the output together, in tokens.

    Raises:
        RequestError: the value is neither -1 nor at least 1.
    """
    # Validate only this field. `check` refuses values below -1.
    num_kept = RequestFields.check({_TRUNCATE: fields.get(_TRUNCATE)}).truncate_prompt_tokens
    if num_kept is None:
        return None
    if num_kept == 0:
        raise RequestError(
            f"{_TRUNCATE}: the value must be -1 or at least 1, but the request has 0."
        )
    if num_kept != _AS_MANY_AS_FIT:
        return num_kept
    # Leave space for max_tokens new tokens. A wrong value of max_tokens is refused later.
    max_tokens = fields.get("max_tokens")
    if isinstance(max_tokens, int) and 0 < max_tokens < max_model_len:
        return max_model_len - max_tokens
    return max_model_len - 1
