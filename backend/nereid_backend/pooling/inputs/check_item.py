# SPDX-License-Identifier: Apache-2.0
"""Validates the fields of items before anything is tokenised."""

from dataclasses import replace

from nereid_backend.errors import RequestError
from nereid_backend.pooling.inputs.text_size import TRUNCATE_REMEDY, TextLimit
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.pooling_items import ACTIVATIONS, PoolingInfo, PoolingItem


class ItemChecker:
    """Validates the fields of items."""

    def __init__(
        self,
        spec: CheckpointSpec,
        info: PoolingInfo,
        text_limit: TextLimit,
        *,
        is_vision_language: bool,
        reads_instructions: bool,
    ) -> None:
        """Create the checker of a loaded model.

        Args:
            spec: the description of the checkpoint.
            info: the description of the loaded model.
            text_limit: the limit on the size of a text.
            is_vision_language: whether the model is a vision-language model, which accepts images.
            reads_instructions: whether the model is a reranker whose prompts contain an
                instruction.
        """
        self._spec = spec
        self._info = info
        self._text_limit = text_limit
        self._is_vision_language = is_vision_language
        self._reads_instructions = reads_instructions

    def check_and_complete(self, item: PoolingItem) -> PoolingItem:
        """Validate an item, and return a copy in which missing fields are filled in.

        The fields `kind`, `dimensions`, `prompt_name` and `prompt` are filled in with the defaults
        of the checkpoint. If the item permits truncation, texts that are too large are truncated.
        Example: if "query" is the default prompt of the checkpoint, and its text is "query: ", an
        item without a prompt gets the prompt_name "query" and the prompt "query: ".

        Raises:
            RequestError: the item is wrong.
        """
        kind = item.kind or self._info.kinds[0]
        self._check_kind(kind)
        self._check_sources(item, kind)
        self._check_options(item, kind)
        self._check_prompt_fields(item)
        prompt_name = self._prompt_name(item)
        prompt = item.prompt if prompt_name is None else self._spec.prompts[prompt_name]
        if prompt is not None:
            self._text_limit.check("prompt: the prompt", prompt)
        if item.instruction is not None:
            self._text_limit.check("instruction: the instruction", item.instruction)
        dimensions = item.dimensions
        if dimensions is None and kind == "dense":
            dimensions = self._spec.truncate_dim
        return replace(
            self._limit_texts(item),
            kind=kind,
            dimensions=dimensions,
            prompt=prompt or None,  # An empty prompt means that the client wants no prompt.
            prompt_name=prompt_name,
        )

    def _check_kind(self, kind: str) -> None:
        """Raise a RequestError if the model cannot compute outputs of the kind `kind`."""
        info = self._info
        if kind not in info.kinds:
            raise RequestError(
                f"kind: {info.architecture} supports {', '.join(info.kinds)}, but the request has "
                f"{kind}."
            )

    def _check_sources(self, item: PoolingItem, kind: str) -> None:
        """Raise a RequestError if an item's inputs do not fit the model or the output kind."""
        self._check_given_fields(item)
        if kind == "score" and item.pair is None and item.token_ids is None:
            raise RequestError("input: scoring requires a pair of a query and a document.")
        if item.pair is not None and kind not in ("score", "classify"):
            raise RequestError(
                f"input: the kind {kind} requires one text, but the request has a pair."
            )
        has_image_document = item.pair is not None and isinstance(item.pair[1], bytes)
        has_image = item.image is not None or has_image_document
        if has_image and not self._info.accepts_images:
            raise RequestError(f"image: {self._info.architecture} does not accept images.")

    def _check_given_fields(self, item: PoolingItem) -> None:
        """Raise a RequestError if an item has no input, or several inputs that exclude each other.

        Only a vision-language model accepts a text together with an image.
        """
        names = ("text", "token_ids", "pair", "image")
        given = [name for name in names if getattr(item, name) is not None]
        if len(given) == 1:
            return
        if self._is_vision_language and given == ["text", "image"]:
            return
        both = ", or both a text and an image" if self._is_vision_language else ""
        raise RequestError(
            "input: an input must contain exactly one of the following: text, token ids, a "
            f"pair of texts, or an image{both}."
        )

    def _check_options(self, item: PoolingItem, kind: str) -> None:
        """Raise a RequestError if an option of the item, such as `dimensions`, is not allowed."""
        if item.dimensions is not None:
            self._check_dimensions(item.dimensions, kind)
        if item.activation is not None and item.activation not in ACTIVATIONS:
            raise RequestError(
                f"activation: the value must be one of {', '.join(ACTIVATIONS)}, but the request "
                f"has {item.activation!r}."
            )
        if item.instruction is not None and not self._reads_instructions:
            raise RequestError(
                "instruction: this field requires a reranker whose prompts contain an instruction, "
                f"but this {self._info.architecture} has no such prompts. Leave the "
                "field out."
            )

    def _check_dimensions(self, dimensions: int, kind: str) -> None:
        """Raise a RequestError if vectors of `kind` cannot be truncated to `dimensions` numbers."""
        if kind not in ("dense", "multi_vector"):
            raise RequestError(
                f"dimensions: this field requires dense vectors, but the kind is {kind}."
            )
        largest = self._info.dimension
        is_integer = isinstance(dimensions, int) and not isinstance(dimensions, bool)
        if not is_integer or not 1 <= dimensions <= largest:
            raise RequestError(
                f"dimensions: the value must be an integer from 1 to {largest}, but the request "
                f"has {repr(dimensions)[:80]}."
            )

    def _check_prompt_fields(self, item: PoolingItem) -> None:
        """Raise a RequestError if an item has two prompts, or a prompt that cannot be used."""
        if item.prompt is not None and item.prompt_name is not None:
            raise RequestError(
                "prompt: the request has both prompt and prompt_name. Send only one of them."
            )
        # An empty `prompt` adds no text, so any input may have an empty prompt.
        has_prompt = bool(item.prompt) or item.prompt_name is not None
        if has_prompt and not self._can_have_prompt(item):
            raise RequestError(
                "prompt: a prompt can precede only a text or a pair of texts, but the input is a "
                "list of token ids or an image."
            )

    def _can_have_prompt(self, item: PoolingItem) -> bool:
        """Return whether a prompt can precede the input of an item.

        A prompt precedes a text or a pair of texts. For a vision-language model, a prompt becomes a
        system message, which can also precede an image.
        """
        return has_text(item) or (self._is_vision_language and item.image is not None)

    def _prompt_name(self, item: PoolingItem) -> str | None:
        """Choose the prompt that is prepended to the text of an item. Return the prompt's name.

        The name is the `prompt_name` of the item, or the default of the checkpoint. Return None if
        the item contains the text of a prompt (`prompt`), or if no prompt applies to the item.
        `_check_prompt_fields` must have accepted the item.

        Raises:
            RequestError: the checkpoint has no prompt with this name.
        """
        if item.prompt is not None or not self._can_have_prompt(item):
            return None
        name = item.prompt_name
        if name is None:
            name = self._spec.default_prompt_name
        if name is not None and name not in self._spec.prompts:
            known = ", ".join(self._spec.prompts) or "none"
            raise RequestError(
                f"prompt_name: the model has no prompt {name!r}. Its prompts are: {known}."
            )
        return name

    def _limit_texts(self, item: PoolingItem) -> PoolingItem:
        """Truncate the texts of an item to the size limit, and return the item.

        If a text exceeds the limit, but the item does not permit truncation, raise a RequestError.
        """
        if item.text is not None:
            return replace(item, text=self._limit_text(item.text, truncate=item.truncate))
        if item.pair is not None:
            query, document = item.pair
            query = self._limit_text(query, truncate=item.truncate)
            if isinstance(document, str):  # A document can also be an image.
                document = self._limit_text(document, truncate=item.truncate)
            return replace(item, pair=(query, document))
        return item

    def _limit_text(self, text: str, *, truncate: bool) -> str:
        """Return `text`. If `truncate` is True, first truncate the text to the size limit.

        Raises:
            RequestError: the text exceeds the limit, but `truncate` is False.
        """
        if truncate:
            return self._text_limit.truncate(text)
        self._text_limit.check("input: the input", text, TRUNCATE_REMEDY)
        return text


def has_text(item: PoolingItem) -> bool:
    """Return True if an item contains text: either a single text or a pair of texts."""
    return item.text is not None or item.pair is not None
