# SPDX-License-Identifier: Apache-2.0
"""Validates and tokenises items. The weights of the model are not needed.

The sizes of texts and of lists of token ids are checked before anything is tokenised, because a
text of 5 MB would occupy the tokenizer for seconds and take hundreds of MB of memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError
from nereid_backend.pooling.inputs.check_item import ItemChecker
from nereid_backend.pooling.inputs.image_requests import TowerImages
from nereid_backend.pooling.inputs.query_expansion import TextRules
from nereid_backend.pooling.inputs.text_prompts import TextPrompts
from nereid_backend.pooling.inputs.text_size import TRUNCATE_REMEDY, TextLimit
from nereid_backend.pooling.inputs.vision_language_prompts import Prompts, check_length
from nereid_backend.pooling.loading.checkpoint_spec import CheckpointSpec
from nereid_backend.pooling.pooling_items import PoolingInfo, PoolingItem

# The index, the token ids and the type ids of one item. The index is the position of the item in
# its request. For the type ids, see Prepared.type_ids.
_Tokens = tuple[int, list[int], list[int] | None]
# The largest number of prompts whose lengths are cached.
_MAX_CACHED_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated and tokenised item.

    Attributes:
        item: the item, in which the kind and the prompt are filled in.
        token_ids: the tokens of the text. The list is empty if the item is an image for an image
            tower.
        type_ids: one number for each token. The number is 0 in the first text of a pair, and 1 in
            the second text. None means the model's default.
        prompt_len: the number of leading tokens that belong to the prompt and are not pooled.
        pixels: the pixels of an image for an image tower, [channels, height, width]; None for other
            items.
        images: the image in a prompt for a vision-language model; None if there is no such image.
        num_tokens: the number of tokens that count towards limits and usage.
        num_attended: for an expanded query, the number of tokens before the mask tokens. All tokens
            attend only to these tokens. None means that all tokens attend to all tokens.
        skips_words: whether tokens such as punctuation get no vector in the multi-vector output.
        offsets: the range of characters that belongs to each token (see PoolingResult.offsets).
    """

    item: PoolingItem
    token_ids: list[int]
    type_ids: list[int] | None = None
    prompt_len: int = 0
    pixels: Tensor | None = None
    images: ImageInputs | None = None
    num_tokens: int = 0
    num_attended: int | None = None
    skips_words: bool = True
    offsets: NDArray[np.int32] | None = None


class ItemPreparer:
    """Validates and tokenises items."""

    def __init__(
        self,
        spec: CheckpointSpec,
        info: PoolingInfo,
        tokenizer: PreTrainedTokenizerBase,
        *,
        text_prompts: TextPrompts | None,
        images: TowerImages | None,
        prompts: Prompts | None = None,
    ) -> None:
        """Store the arguments. Check that the model supports the checkpoint's query expansion.

        Args:
            spec: the description of the checkpoint.
            info: the description of the loaded model.
            tokenizer: the tokenizer of the checkpoint.
            text_prompts: converts texts and pairs to prompts; None if they are tokenised directly.
            images: prepares images for an image tower; None if the model has no image tower.
            prompts: prepares texts and images for a vision-language model; None for other models.

        Raises:
            ConfigError, ModelError: the model cannot follow the checkpoint's rules for queries (see
                TextRules.check_and_create).
        """
        self._spec = spec
        self._info = info
        self._tokenizer = tokenizer
        self._text_prompts = text_prompts
        self._images = images
        self._prompts = prompts
        # The process that decodes images; None if the model accepts no images.
        image_source = images or prompts
        self._image_process = image_source.image_process if image_source is not None else None
        # The object that validates an item, and fills in the missing fields of the item.
        truncation_side = (text_prompts or tokenizer).truncation_side
        text_limit = TextLimit(info.max_model_len, info.max_token_bytes, truncation_side)
        self._checker = ItemChecker(
            spec,
            info,
            text_limit,
            is_vision_language=prompts is not None,
            reads_instructions=text_prompts is not None and text_prompts.reads_instructions,
        )
        # The length limits of queries and documents, and the expansion of short queries.
        self._rules = TextRules.check_and_create(
            spec.late_interaction, info.max_model_len, tokenizer
        )
        # The results of the method `_prompt_len`. The keys are prompts, and the values are the
        # lengths of the prompts in tokens.
        self._prompt_lens: dict[str, int] = {}
        # Whether the tokenizer returns type ids that the model uses. Some tokenizers return type
        # ids although the model has no embeddings for type ids.
        num_types = getattr(spec.config, "type_vocab_size", None)
        self._wants_types = num_types != 1 and "token_type_ids" in tokenizer.model_input_names

    def start_image_process(self) -> None:
        """Start the process that decodes images, and wait until the process is ready.

        Do nothing if the model accepts no images. Without this call, the first image waits until
        the process is ready.
        """
        if self._image_process is not None:
            self._image_process.warm_up()

    def close(self) -> None:
        """End the process that decodes images."""
        if self._image_process is not None:
            self._image_process.close()

    def prepare(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        """Validate and tokenise items. All texts are tokenised in one call.

        Raises:
            RequestError: an item is wrong. If there are several items, the message contains the
                index of the wrong item.
        """
        checked = self._check_all(items)
        # Items such as images are prepared one by one. All other items are collected in `texts`,
        # because one call of the tokenizer for many texts is faster than many calls. The keys of
        # `prepared` and `texts` are the indices of the items.
        prepared: dict[int, Prepared] = {}
        texts: dict[int, PoolingItem] = {}  # the items that are tokenised in one call
        for index, item in enumerate(checked):
            with _error_index(index, len(items)):
                prepared_alone = self._prepare_alone(item)
            if prepared_alone is None:
                texts[index] = item
            else:
                prepared[index] = prepared_alone
        for index, ids, types in self._tokenise(texts):
            with _error_index(index, len(items)):
                prepared[index] = self._prepare_text(texts[index], ids, types)
        return [prepared[index] for index in range(len(items))]

    def _check_all(self, items: Sequence[PoolingItem]) -> list[PoolingItem]:
        """Validate all items, and fill in their missing fields.

        A check is fast, but the preparation of an item can be slow. All items are checked before
        the first item is prepared, so that no time is wasted if a later item is wrong.
        """
        checked: list[PoolingItem] = []
        for index, item in enumerate(items):
            with _error_index(index, len(items)):
                checked.append(self._checker.check_and_complete(item))
        return checked

    def _prepare_alone(self, item: PoolingItem) -> Prepared | None:
        """Prepare an item that cannot be tokenised together with others, such as an image.

        Return None for a text or a pair that is tokenised together with other texts.
        """
        if item.token_ids is not None:
            return self._with_token_ids(item, item.token_ids)
        if self._prompts is not None:
            # The processor of a vision-language model prepares one text or image at a time.
            return self._with_prompt(self._prompts, item)
        if self._images is not None and item.image is not None:
            pixels = self._images.pixels(item.image)
            return Prepared(item, [], pixels=pixels, num_tokens=self._images.num_tokens)
        return None

    def _with_prompt(self, prompts: Prompts, item: PoolingItem) -> Prepared:
        """Convert an input of a vision-language model to a prompt, and prepare the prompt."""
        prompt = prompts.prepare(item)
        check_length(prompt, self._info.max_model_len, truncate=item.truncate)
        ids = prompt.token_ids
        return Prepared(item, ids, images=prompt.images, num_tokens=len(ids))

    def _with_token_ids(self, item: PoolingItem, ids: Sequence[int]) -> Prepared:
        """Prepare an item that is a list of token ids.

        A list that is too long is truncated if the item permits this.

        Raises:
            RequestError: a token id is wrong, or the list is too long and must not be truncated.
        """
        if not ids:
            raise RequestError("input: the list of token ids is empty. Send at least one token id.")
        limit = self._info.max_model_len
        if len(ids) > limit:
            self._check_truncation(item, len(ids), limit)
            ids = ids[:limit]
        self._check_token_ids(ids)
        # `offsets` contains the range of characters of each token. The input consists of token ids
        # without a text, so all ranges are empty.
        offsets = np.zeros((len(ids), 2), dtype=np.int32)
        return Prepared(item, list(ids), num_tokens=len(ids), offsets=offsets)

    def _check_token_ids(self, ids: Sequence[int]) -> None:
        """Raise a RequestError if a token id is not an integer, or is outside the vocabulary."""
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

    def _tokenise(self, items: Mapping[int, PoolingItem]) -> Iterator[_Tokens]:
        """Tokenise texts and pairs, and yield the tokens of each item.

        Args:
            items: the items by their index in the request. Each item has a text or a pair.
        """
        if self._text_prompts is not None:
            yield from self._prompt_tokens(self._text_prompts, items)
            return
        # In one call, the tokenizer accepts either single texts or pairs. If the request contains
        # both, two calls are necessary.
        single_texts = {index: item for index, item in items.items() if item.pair is None}
        pairs = {index: item for index, item in items.items() if item.pair is not None}
        for uniform_items in (single_texts, pairs):
            if uniform_items:
                yield from self._tokenise_uniform(uniform_items)

    def _tokenise_uniform(self, items: Mapping[int, PoolingItem]) -> Iterator[_Tokens]:
        """Tokenise items in one call. Yield the index, the token ids and the type ids of each item.

        Args:
            items: the items by their index in the request. All items are single texts, or all items
                are pairs. There is at least one item.
        """
        texts_of_items = [_texts_of(item) for item in items.values()]
        first_texts = [texts[0] for texts in texts_of_items]
        second_texts = [texts[1] for texts in texts_of_items if len(texts) > 1]  # only for pairs
        encoded: Any = self._tokenizer(
            first_texts,
            second_texts or None,
            return_attention_mask=False,
            return_token_type_ids=self._wants_types,
            verbose=False,
        )
        types = encoded.get("token_type_ids") or [None] * len(items)
        yield from zip(items.keys(), encoded["input_ids"], types, strict=True)

    def _prompt_tokens(
        self, prompts: TextPrompts, items: Mapping[int, PoolingItem]
    ) -> Iterator[_Tokens]:
        """Convert texts and pairs to prompts. Yield the index and the tokens of each item.

        The tokens are those of chat messages. The messages of a pair contain an instruction, the
        query and the document. If an item has no instruction, `item.prompt` is the instruction.

        Args:
            prompts: builds the chat messages.
            items: the items by their index in the request. Each item has a text or a pair.
        """
        for index, item in items.items():
            # If an item must not be truncated, a message that is too long is refused later.
            limit = self._info.max_model_len if item.truncate else None
            if item.pair is None:
                token_ids = prompts.text_tokens(
                    item.text or "", item.prompt, item.prompt_name, limit
                )
            else:
                instruction = item.instruction or item.prompt
                token_ids = prompts.pair_tokens(_text_pair(item), instruction, limit)
            type_ids = None  # The message is one text, so all tokens have the default type.
            yield index, token_ids, type_ids

    def _prepare_text(self, item: PoolingItem, ids: list[int], types: list[int] | None) -> Prepared:
        """Prepare an item that is a text or a pair.

        A text that is too long is truncated. If the item is a short query of a model such as
        ColBERT, mask tokens are then appended (see TextRules.expand).

        Args:
            item: the item.
            ids: the tokens of the text.
            types: the type ids of the tokens (see Prepared.type_ids).

        Raises:
            RequestError: the text has no tokens, is too long and must not be truncated, or contains
                a token without an embedding.
        """
        kept_ids, kept_types = self._limit_tokens(item, ids, types)
        if not kept_ids:
            raise RequestError(
                "input: the text is empty and has no tokens. Send at least one character."
            )
        expanded = self._rules.expand(item, kept_ids, kept_types)
        self._check_embeddings(expanded.token_ids)
        needs_offsets = item.kind == "token_classify"
        return Prepared(
            item,
            token_ids=expanded.token_ids,
            type_ids=expanded.type_ids,
            prompt_len=self._num_unpooled_tokens(item, len(kept_ids)),
            num_tokens=len(expanded.token_ids),
            num_attended=expanded.num_attended,
            skips_words=self._rules.skips_words(item),
            offsets=self._offsets(item) if needs_offsets else None,
        )

    def _check_embeddings(self, ids: Sequence[int]) -> None:
        """Raise a RequestError if the model has no embedding for one of a text's tokens.

        In some checkpoints, tokens were added to the tokenizer, but not to the model.
        """
        largest_id = max(ids)
        if largest_id >= self._info.vocab_size:
            token = self._tokenizer.convert_ids_to_tokens(largest_id)
            raise RequestError(
                f"input: the tokenizer converts {token!r} to the token id {largest_id}, but the "
                f"model has embeddings only for the ids 0 to {self._info.vocab_size - 1}. Remove "
                f"{token!r} from the text. If the tokenizer itself adds this token to texts, its "
                "files do not belong to the model."
            )

    def _num_unpooled_tokens(self, item: PoolingItem, num_tokens: int) -> int:
        """Return the number of the prompt's tokens that are left out of the pooling.

        At least one of the `num_tokens` tokens of the item must be pooled. If the prompt is a chat
        message, all tokens are pooled, as in sentence-transformers.
        """
        if not item.prompt or self._spec.include_prompt or self._text_prompts is not None:
            return 0
        return min(self._prompt_len(item.prompt), num_tokens - 1)

    def _limit_tokens(
        self, item: PoolingItem, ids: list[int], types: list[int] | None
    ) -> tuple[list[int], list[int] | None]:
        """Truncate the tokens of an item to the item's limit. Return the tokens and their type ids.

        Queries and documents can have different limits. If the item is a pair, the tokenizer
        truncates the longer text.
        """
        limit, limit_name = self._rules.limit(item)
        if len(ids) <= limit:
            return ids, types
        self._check_truncation(item, len(ids), limit, limit_name)
        # Tokenise again, because cutting the list of ids would remove the special token at the end.
        # The tokenizer gets a batch with one item, because it would ignore an empty second text
        # outside a batch. A batch consists of a list of first texts and a list of second texts.
        batch = [[text] for text in _texts_of(item)]
        encoded: Any = self._tokenizer(
            *batch,
            truncation="longest_first",
            max_length=limit,
            return_token_type_ids=self._wants_types,
            verbose=False,
        )
        (kept_ids,) = encoded["input_ids"]  # the token ids of the only item
        if not encoded.get("token_type_ids"):
            return kept_ids, None
        (kept_types,) = encoded["token_type_ids"]
        return kept_ids, kept_types

    def _offsets(self, item: PoolingItem) -> NDArray[np.int32]:
        """Return the range of characters for each token of a text (see PoolingResult.offsets).

        The ranges are truncated like the tokens.
        """
        limit, _ = self._rules.limit(item)
        encoded: Any = self._tokenizer(
            item.text, truncation=True, max_length=limit, return_offsets_mapping=True, verbose=False
        )
        return np.array(encoded["offset_mapping"], dtype=np.int32).reshape(-1, 2)

    @staticmethod
    def _check_truncation(
        item: PoolingItem, length: int, limit: int, limit_name: str = "max_model_len"
    ) -> None:
        """Raise a RequestError if truncation is turned off for an item that is too long.

        The item has `length` tokens, which is more than `limit`.
        """
        if not item.truncate:
            raise RequestError(
                f"input: the input has {length} tokens, but the limit is {limit} ({limit_name}). "
                f"{TRUNCATE_REMEDY}"
            )

    def _prompt_len(self, prompt: str) -> int:
        """Return the length of a prompt in tokens. Do not count the special token at the end.

        The special token is not counted, because the text follows the prompt without this token.
        """
        length = self._prompt_lens.get(prompt)
        if length is None:
            encoded: Any = self._tokenizer(prompt, verbose=False)
            ids = encoded["input_ids"]
            length = len(ids)
            if ids and ids[-1] in self._tokenizer.all_special_ids:
                length -= 1
            if len(self._prompt_lens) >= _MAX_CACHED_PROMPTS:
                self._prompt_lens.clear()
            self._prompt_lens[prompt] = length
        return length


@contextmanager
def _error_index(index: int, count: int) -> Iterator[None]:
    """Add the index of an input to the message of a RequestError that the `with` block raises.

    Example: with several inputs, "input: the text is empty" becomes "input 3: input: the text is
    empty". With one input, the message does not change.
    """
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"input {index}: {error}") from error


def _texts_of(item: PoolingItem) -> tuple[str, ...]:
    """Return the text of an item, or the two texts of a pair. Prepend the prompt to the first text.

    Example: the prompt "query: " and the pair ("a", "b") return ("query: a", "b").
    """
    fields = (item.text or "",) if item.pair is None else item.pair
    first, *rest = (field for field in fields if isinstance(field, str))
    prompt = item.prompt or ""
    return (prompt + first, *rest)


def _text_pair(item: PoolingItem) -> tuple[str, str]:
    """Return the query and the document of a pair whose document is a text."""
    assert item.pair is not None, "the caller has checked that the item is a pair"
    query, document = item.pair
    assert isinstance(document, str), "only vision-language models accept images as documents"
    return query, document
