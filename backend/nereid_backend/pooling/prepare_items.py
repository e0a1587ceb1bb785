# SPDX-License-Identifier: Apache-2.0
"""Validates items and tokenises them. The model itself is not needed."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import RequestError
from nereid_backend.pooling.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.generative_rerank import GenerativeReranker
from nereid_backend.pooling.pooling_items import ACTIVATIONS, PoolingInfo, PoolingItem


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated and tokenised item.

    Attributes:
        item: the item with its kind and its prompt filled in.
        token_ids: the tokens of the text; empty for an image.
        type_ids: for each token 0 for the first text of a pair and 1 for the second one. None means
            the model's default.
        prompt_len: the number of the prompt's tokens at the beginning that are not pooled.
        pixels: the pixels of an image, [channels, height, width]; None for a text.
        num_tokens: the number of tokens that count towards limits and usage.
    """

    item: PoolingItem
    token_ids: list[int]
    type_ids: list[int] | None = None
    prompt_len: int = 0
    pixels: Tensor | None = None
    num_tokens: int = 0


class ItemPreparer:
    """Validates and tokenises items. Several threads may use it."""

    def __init__(
        self,
        spec: CheckpointSpec,
        info: PoolingInfo,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reranker: GenerativeReranker | None,
        images: tuple[Callable[[bytes], Tensor], int] | None,
    ) -> None:
        """Store the arguments.

        Args:
            spec: the description of the checkpoint.
            info: the description of the loaded model.
            tokenizer: the tokenizer of the checkpoint.
            reranker: builds the tokens of a pair for a generative reranker; None for other models.
            images: a function that decodes an image file to pixels, and the number of tokens that
                an image counts as. None if the model does not accept images.
        """
        self._spec = spec
        self._info = info
        self._tokenizer = tokenizer
        self._reranker = reranker
        self._images = images
        self._prompt_lens: dict[str, int] = {}
        # Truncation changes the state of the tokenizer, so only one thread may call it at a time.
        self._lock = threading.Lock()
        # Some tokenizers return type ids although the model has no embedding for them.
        kinds = getattr(spec.config, "type_vocab_size", None)
        self._wants_types = kinds != 1 and "token_type_ids" in tokenizer.model_input_names

    def prepare(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        """Validate and tokenise items. All texts are tokenised in one call.

        Raises:
            RequestError: an item is wrong. The message names its index.
        """
        with self._lock:
            return self._prepare(items)

    def _prepare(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        """Prepare items; see `prepare`. The caller has the lock."""
        checked = []
        for index, item in enumerate(items):
            try:
                checked.append(self._check(item))
            except RequestError as error:
                raise _at(index, len(items), error) from error
        prepared: list[Prepared | None] = [None] * len(checked)
        texts: list[int] = []
        for index, item in enumerate(checked):
            if item.text is not None or item.pair is not None:
                texts.append(index)
                continue
            try:
                prepared[index] = self._without_text(item)
            except RequestError as error:
                raise _at(index, len(items), error) from error
        for index, ids, types in self._tokenise(checked, texts):
            try:
                prepared[index] = self._with_text(checked[index], ids, types)
            except RequestError as error:
                raise _at(index, len(items), error) from error
        return [one for one in prepared if one is not None]

    def _check(self, item: PoolingItem) -> PoolingItem:
        """Validate an item, and return it with its kind and its prompt filled in."""
        info = self._info
        kind = item.kind or info.kinds[0]
        if kind not in info.kinds:
            raise RequestError(
                f"kind: {info.architecture} supports {', '.join(info.kinds)}, but the request has "
                f"{kind}."
            )
        sources = (item.text, item.token_ids, item.pair, item.image)
        if sum(source is not None for source in sources) != 1:
            raise RequestError(
                "input: an input must have exactly one of a text, token ids, a pair of texts and "
                "an image."
            )
        self._check_options(item, kind)
        if kind == "score" and item.pair is None and item.token_ids is None:
            raise RequestError("input: scoring requires a pair of a query and a document.")
        if item.pair is not None and kind not in ("score", "classify"):
            raise RequestError(
                f"input: the kind {kind} requires one text, but the request has a pair."
            )
        if item.image is not None and not info.accepts_images:
            raise RequestError(f"image: {info.architecture} does not accept images.")
        prompt = self._prompt(item)
        fields = {name: getattr(item, name) for name in PoolingItem.__slots__}
        return PoolingItem(**{**fields, "kind": kind, "prompt": prompt, "prompt_name": None})

    def _check_options(self, item: PoolingItem, kind: str) -> None:
        """Raise RequestError if an option of an item is wrong or does not fit the model."""
        if item.dimensions is not None:
            size = self._info.dimension
            requested = item.dimensions
            if kind not in ("dense", "multi_vector"):
                raise RequestError(
                    f"dimensions: this field requires dense vectors, but the kind is {kind}."
                )
            is_integer = isinstance(requested, int) and not isinstance(requested, bool)
            if not is_integer or not 1 <= requested <= size:
                raise RequestError(
                    f"dimensions: the value must be an integer from 1 to {size}, but the request "
                    f"has {requested!r}."
                )
        if item.activation is not None and item.activation not in ACTIVATIONS:
            raise RequestError(
                f"activation: the value must be one of {', '.join(ACTIVATIONS)}, but the request "
                f"has {item.activation!r}."
            )
        if item.instruction is not None and self._reranker is None:
            raise RequestError(
                f"instruction: this field requires a generative reranker, but the model is "
                f"{self._info.architecture}. Leave the field out."
            )

    def _prompt(self, item: PoolingItem) -> str | None:
        """Return the text that precedes the item's text; None without a prompt."""
        if item.prompt is not None and item.prompt_name is not None:
            raise RequestError(
                "prompt: the request has both prompt and prompt_name. Send only one of them."
            )
        if item.token_ids is not None or item.image is not None:
            if item.prompt or item.prompt_name is not None:
                raise RequestError(
                    "prompt: a prompt requires a text or a pair, but the input is token ids or an "
                    "image."
                )
            return None
        name = item.prompt_name
        if name is None and item.prompt is None:
            name = self._spec.default_prompt_name
        if name is None:
            return item.prompt or None
        if name in self._spec.refused_prompts:
            raise RequestError(
                f"prompt_name: the prompt {name!r} is not supported, because "
                f"{self._spec.refused_prompts[name]}."
            )
        if name not in self._spec.prompts:
            known = ", ".join(self._spec.prompts) or "none"
            raise RequestError(
                f"prompt_name: the model has no prompt {name!r}. Its prompts are: {known}."
            )
        return self._spec.prompts[name] or None

    def _without_text(self, item: PoolingItem) -> Prepared:
        """Validate an image or token ids."""
        if item.image is not None:
            assert self._images is not None
            read, num_tokens = self._images
            return Prepared(item, [], pixels=read(item.image), num_tokens=num_tokens)
        ids = item.token_ids
        assert ids is not None
        if not ids:
            raise RequestError("input: the list of token ids is empty. Send at least one token id.")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(
                    f"input: each token id must be an integer, but one is {token_id!r}."
                )
            if not 0 <= token_id < self._info.vocab_size:
                raise RequestError(
                    f"input: each token id must be from 0 to {self._info.vocab_size - 1}, but one "
                    f"is {token_id}."
                )
        if len(ids) > self._info.max_model_len:
            self._refuse_length(item, len(ids))
            ids = ids[: self._info.max_model_len]
        return Prepared(item, list(ids), num_tokens=len(ids))

    def _tokenise(
        self, items: list[PoolingItem], wanted: list[int]
    ) -> list[tuple[int, list[int], list[int] | None]]:
        """Return (index, token ids, type ids) of the items at the indices `wanted`."""
        tokenised: list[tuple[int, list[int], list[int] | None]] = []
        single = [i for i in wanted if items[i].pair is None]
        paired = [i for i in wanted if items[i].pair is not None]
        if self._reranker is not None:
            for index in wanted:
                pair = items[index].pair
                assert pair is not None
                limit = self._info.max_model_len if items[index].truncate else None
                instruction = items[index].instruction or items[index].prompt
                ids = self._reranker.tokens(pair, instruction, limit)
                tokenised.append((index, ids, None))
            return tokenised
        if single:
            texts = [(items[i].prompt or "") + (items[i].text or "") for i in single]
            tokenised += self._call(single, texts)
        if paired:
            pairs = [items[i].pair or ("", "") for i in paired]
            firsts = [
                (items[i].prompt or "") + query for i, (query, _) in zip(paired, pairs, strict=True)
            ]
            tokenised += self._call(paired, firsts, [document for _, document in pairs])
        return tokenised

    def _call(
        self, indices: list[int], *texts: list[str]
    ) -> list[tuple[int, list[int], list[int] | None]]:
        """Tokenise texts, or pairs if two lists are given, and return (index, ids, type ids)."""
        encoded: Any = self._tokenizer(
            *texts,
            return_attention_mask=False,
            return_token_type_ids=self._wants_types,
            verbose=False,
        )
        types = encoded.get("token_type_ids") or [None] * len(indices)
        return list(zip(indices, encoded["input_ids"], types, strict=True))

    def _with_text(self, item: PoolingItem, ids: list[int], types: list[int] | None) -> Prepared:
        """Truncate or refuse a text that is too long, and return the prepared item."""
        limit = self._info.max_model_len
        if len(ids) > limit:
            self._refuse_length(item, len(ids))
            texts = [item.text or ""] if item.pair is None else list(item.pair)
            texts[0] = (item.prompt or "") + texts[0]
            encoded: Any = self._tokenizer(
                *texts,
                truncation="longest_first",
                max_length=limit,
                return_token_type_ids=self._wants_types,
                verbose=False,
            )
            ids = encoded["input_ids"]
            types = encoded.get("token_type_ids")
        if not ids:
            raise RequestError(
                "input: the text is empty and has no tokens. Send at least one character."
            )
        prompt_len = 0
        if item.prompt and not self._spec.include_prompt:
            prompt_len = min(self._prompt_len(item.prompt), len(ids) - 1)
        return Prepared(item, ids, types, prompt_len, num_tokens=len(ids))

    def _refuse_length(self, item: PoolingItem, length: int) -> None:
        """Raise a RequestError for an input that is too long, unless it may be truncated."""
        if not item.truncate:
            raise RequestError(
                f"input: the input has {length} tokens, but the limit is "
                f"{self._info.max_model_len} (max_model_len). Shorten the input, or send "
                "truncate=true."
            )

    def _prompt_len(self, prompt: str) -> int:
        """Return the number of tokens of a prompt alone, without the special token at its end."""
        length = self._prompt_lens.get(prompt)
        if length is None:
            encoded: Any = self._tokenizer(prompt, verbose=False)
            ids = encoded["input_ids"]
            length = len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)
            self._prompt_lens[prompt] = length
        return length


def _at(index: int, count: int, error: RequestError) -> RequestError:
    """Return the error with the index of the input, if there are several inputs.

    Example: "input: the text is empty" becomes "input 3: input: the text is empty".
    """
    return error if count == 1 else RequestError(f"input {index}: {error}")
