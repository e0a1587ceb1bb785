# SPDX-License-Identifier: Apache-2.0
"""Converts texts and images to the inputs of a vision-language model that embeds or reranks.

The checkpoint's own processor prepares the inputs. Images are decoded in a separate process,
because an image file may be hostile. There are two types of checkpoints. Checkpoints of the first
type have a chat template. It renders a text, an image or both as a chat message. Checkpoints of the
second type, such as ColPali, have two fixed prompts: one prompt for pages (images), and one prompt
for queries (texts).
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nereid_backend.errors import ModelError, RequestError
from nereid_backend.pooling.inputs.image_processors import (
    load_page_processor,
    run_processor,
    split_outputs,
)
from nereid_backend.pooling.inputs.image_requests import IMAGE_WORKER, prepare_images
from nereid_backend.pooling.inputs.text_prompts import TextPrompts
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.pooling_items import PoolingItem
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle

# The worker process for checkpoints with a chat template. The process expects images in base64.
_CHAT_IMAGE_WORKER = "nereid_backend.vision.image_worker"
_TRUNCATE = "truncate: prompts of vision-language models cannot be truncated."


class ChatPrompts:
    """Renders inputs as chat messages.

    Attributes:
        image_process: the process that prepares prompts with images.
    """

    def __init__(self, spec: CheckpointSpec, pair_prompts: TextPrompts | None) -> None:
        """Load the processor.

        Args:
            spec: the description of the checkpoint.
            pair_prompts: builds the messages for a query and a document; None if the model embeds.

        Raises:
            ModelError: the processor is missing or broken, or the checkpoint of a reranker has no
                chat template.
        """
        self._processor = ChatProcessor(spec.folder, spec.config)  # prepares prompts without images
        if pair_prompts is not None and not self._processor.has_template:
            raise ModelError(
                f"{spec.folder} has no chat template, which a vision-language reranker needs."
            )
        # Images need a separate process, because a damaged image can crash the image decoder.
        self.image_process = ImageWorkerHandle(_CHAT_IMAGE_WORKER, str(spec.folder))
        self._pair_prompts = pair_prompts
        # A checkpoint without a modules.json is an ordinary chat model, so its prompts end with the
        # beginning of an answer (the generation prompt). sentence-transformers adds a generation
        # prompt only if the files of a checkpoint set `add_generation_prompt`.
        self._variables = {"add_generation_prompt": not spec.has_modules, **spec.template_kwargs}

    def prepare(self, item: PoolingItem) -> ImagePrompt:
        """Convert an input to a prompt, and return the prompt.

        The input is a text, an image, a text with an image, or a pair of a query and a document.

        Raises:
            RequestError: the image or the text is invalid.
        """
        if item.pair is not None:
            # If the item has no instruction for the reranker, its prompt is used as the
            # instruction.
            return self._prepare_pair(item.pair, item.instruction or item.prompt)
        parts: list[dict[str, Any]] = []
        if item.image is not None:
            parts.append({"type": "image"})
        if item.text is not None:
            parts.append({"type": "text", "text": item.text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if item.prompt:
            system = [{"type": "text", "text": item.prompt}]
            messages.insert(0, {"role": "system", "content": system})
        return self._build_prompt(messages, item.image, self._variables)

    def _prepare_pair(self, pair: tuple[str, str | bytes], instruction: str | None) -> ImagePrompt:
        """Convert a pair of a query and a document to a prompt. The document may be an image."""
        assert self._pair_prompts is not None, "only requests to a reranker contain pairs"
        query, document = pair
        if isinstance(document, bytes):
            text, image = "", document
        else:
            text, image = document, None
        messages, variables = self._pair_prompts.pair_messages(query, text, instruction)
        messages_with_parts: list[dict[str, Any]] = [
            {**message, "content": _text_parts(message["content"])} for message in messages
        ]
        if image is not None:
            # `pair_messages` accepts only texts. The last message ends with the document, so the
            # image is added at the end.
            messages_with_parts[-1]["content"].append({"type": "image"})
        return self._build_prompt(messages_with_parts, image, variables)

    def _build_prompt(
        self, messages: list[dict[str, Any]], image: bytes | None, variables: dict[str, Any]
    ) -> ImagePrompt:
        """Render and tokenise messages. A separate process prepares the image, if there is one.

        Args:
            messages: the messages, with a placeholder for the image.
            image: the content of an image file; None if the messages contain no image.
            variables: the variables of the chat template.

        Raises:
            RequestError: the image or the text is invalid. The message begins with "image: " or
                "input: ".
        """
        with _errors_of_input():
            if image is None:
                return self._processor.prepare_with_media(messages, [], variables)
            text = self._processor.render(messages, variables)
        # The image process expects images in base64, because it also prepares the images of chat
        # requests, which clients send in base64.
        token_ids, images = prepare_images(self.image_process, text, [base64.b64encode(image)])
        return ImagePrompt(token_ids, images, text)


@contextmanager
def _errors_of_input() -> Iterator[None]:
    """Replace the name of the field in a RequestError that the `with` block raises.

    The client has sent the field `input`, not the field `messages`. Example: "messages: the
    template fails" becomes "input: the template fails".
    """
    try:
        yield
    except RequestError as error:
        raise RequestError(f"input: {str(error).removeprefix('messages: ')}") from error


class RetrievalPrompts:
    """Prepares queries and pages for a checkpoint such as ColPali.

    Attributes:
        image_process: the process that decodes and prepares pages.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        """Load the processor for queries.

        Raises:
            ModelError: the processor is missing or broken, or has no prompts for retrieval.
        """
        self.image_process = ImageWorkerHandle(IMAGE_WORKER, str(spec.folder))
        self._processor = load_page_processor(spec.folder, spec.config)

    def prepare(self, item: PoolingItem) -> ImagePrompt:
        """Convert an input to a prompt. The input is a query (a text) or a page (an image).

        The processor of the checkpoint adds the fixed prompt of queries or of pages.

        Raises:
            RequestError: the image is invalid, or the input has both a text and an image.
        """
        if item.image is not None and item.text is not None:
            raise RequestError(
                "input: this model embeds either a query (a text) or a page (an image), but the "
                "input has both. Send two inputs."
            )
        if item.prompt:
            raise RequestError(
                "prompt: this model has a fixed prompt for queries. Leave the field out."
            )
        if item.image is not None:
            # The text is empty, because the processor adds a fixed prompt to each page.
            token_ids, images = prepare_images(self.image_process, "", [item.image])
            return ImagePrompt(token_ids, images, text="")
        assert item.text is not None, "the checker requires a text or an image"
        outputs = run_processor(self._processor.process_queries, text=[item.text])
        token_ids, _no_images = split_outputs(outputs)
        return ImagePrompt(token_ids, images=None, text=item.text)


Prompts = ChatPrompts | RetrievalPrompts


def check_length(prompt: ImagePrompt, limit: int, *, truncate: bool) -> None:
    """Raise a RequestError if a prompt has more than `limit` tokens."""
    length = len(prompt.token_ids)
    if length > limit:
        remedy = f" {_TRUNCATE}" if truncate else ""
        raise RequestError(
            f"input: the input has {length} tokens, but the limit is {limit} (max_model_len). "
            f"Send a shorter text or a smaller image.{remedy}"
        )


def _text_parts(content: str) -> list[dict[str, str]]:
    """Convert the text of a message to content parts.

    Example: "Hi" returns [{"type": "text", "text": "Hi"}]. An empty text has no parts.
    """
    return [{"type": "text", "text": content}] if content else []
