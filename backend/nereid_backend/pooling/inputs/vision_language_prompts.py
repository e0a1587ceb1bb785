# SPDX-License-Identifier: Apache-2.0
"""Converts texts and images to the inputs of a vision-language model that embeds or reranks.

The checkpoint's own processor prepares the inputs. There are two kinds of checkpoints. One kind
renders a text, an image or both as a chat message. The other kind, such as ColPali, has one fixed
prompt for pages (images) and one for queries (texts).
"""

from typing import Any

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import ModelError, RequestError, first_line
from nereid_backend.pooling.inputs.generative_rerank import GenerativeReranker
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.pooling_items import PoolingItem
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt
from nereid_backend.vision.load_processor import load_processor
from nereid_backend.vision.messages import FoundImage
from nereid_backend.vision.read_image import ImageLimits, decode_image

# A text that no query contains. It marks the place of a document that is an image.
_IMAGE_MARK = "mark7image7mark"
# Outputs of a processor that are no arguments for images. The labels are for training.
_NOT_FOR_IMAGES = ("input_ids", "attention_mask", "labels")
_TRUNCATE = "truncate: prompts of vision-language models cannot be truncated."


class ChatPrompts:
    """Renders inputs as chat messages."""

    def __init__(self, spec: CheckpointSpec, reranker: GenerativeReranker | None) -> None:
        """Load the processor.

        Raises:
            ModelError: the processor is missing or broken, or a reranker has no chat template.
        """
        self._processor = ChatProcessor(spec.folder, spec.config)
        self._reranker = reranker
        # sentence-transformers adds the beginning of an answer only if its files say so.
        self._variables = {"add_generation_prompt": not spec.has_modules, **spec.template_kwargs}
        if reranker is not None and not self._processor.has_template:
            raise ModelError(
                f"{spec.folder} has no chat template, which a vision-language reranker needs."
            )

    def prepare(self, item: PoolingItem) -> ImagePrompt:
        """Return the prompt of a text, of an image, of both, or of a query and a document.

        Raises:
            RequestError: the image or the text is invalid.
        """
        if item.pair is not None:
            return self._prepare_pair(item.pair, item.instruction or item.prompt)
        parts: list[dict[str, Any]] = []
        found = []
        if item.image is not None:
            parts.append({"type": "image"})
            found.append(FoundImage("image", item.image))
        if item.text is not None:
            parts.append({"type": "text", "text": item.text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if item.prompt:
            system = [{"type": "text", "text": item.prompt}]
            messages.insert(0, {"role": "system", "content": system})
        return self._processor.prepare_split(messages, found, self._variables)

    def _prepare_pair(self, pair: tuple[str, str | bytes], instruction: str | None) -> ImagePrompt:
        """Return the prompt of a query and a document, which may be an image."""
        assert self._reranker is not None
        query, document = pair
        found = []
        if isinstance(document, bytes):
            found.append(FoundImage("image", document))
            document = _IMAGE_MARK
        messages, variables = self._reranker.messages(query, document, instruction)
        split = [{**message, "content": _parts(message["content"])} for message in messages]
        return self._processor.prepare_split(split, found, variables)


class RetrievalPrompts:
    """Prepares queries and pages for a checkpoint with one vector for each token."""

    def __init__(self, spec: CheckpointSpec) -> None:
        """Load the processor.

        Raises:
            ModelError: the processor is missing or broken, or has no prompts for retrieval.
        """
        self._processor: Any = load_processor(spec.folder, spec.config)
        for name in ("process_images", "process_queries"):
            if not hasattr(self._processor, name):
                raise ModelError(
                    f"the processor {type(self._processor).__name__} in {spec.folder} has no "
                    f"method {name}, which {spec.architecture} needs."
                )

    def prepare(self, item: PoolingItem) -> ImagePrompt:
        """Return the prompt of a query (a text) or of a page (an image).

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
        image = None
        if item.image is not None:
            image = decode_image(item.image, "image", ImageLimits())
        try:
            if image is not None:
                outputs = dict(self._processor.process_images(images=[image]))
            else:
                outputs = dict(self._processor.process_queries(text=[item.text]))
        except Exception as error:
            # A processor can raise any exception. Only the request with this input ends.
            raise RequestError(
                f"input: the checkpoint's processor cannot prepare the input: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        token_ids = [int(token) for token in outputs["input_ids"][0]]
        arguments = {name: value for name, value in outputs.items() if name not in _NOT_FOR_IMAGES}
        images = ImageInputs(arguments, b"", 0) if image is not None else None
        return ImagePrompt(token_ids, images, item.text or "")


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


def _parts(content: str) -> list[dict[str, str]]:
    """Return the content of a message as parts, with an image in place of the mark.

    Example: "<Document>: mark7image7mark" returns [{"type": "text", "text": "<Document>: "},
    {"type": "image"}].
    """
    before, mark, after = content.partition(_IMAGE_MARK)
    texts = [{"type": "text", "text": text} if text else None for text in (before, after)]
    parts = [texts[0], {"type": "image"} if mark else None, texts[1]]
    return [part for part in parts if part is not None]
