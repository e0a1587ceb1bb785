# SPDX-License-Identifier: Apache-2.0
"""From items to token ids, with every check that needs no model."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import RequestError
from nereid_backend.pooling.checkpoint_spec import Recipe
from nereid_backend.pooling.generative_rerank import Judge
from nereid_backend.pooling.pooling_items import ACTIVATIONS, PoolingInfo, PoolingItem


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item that can go through the model.

    Attributes:
        item: what was asked, its kind filled in.
        token_ids: of the text; empty for an image.
        type_ids: which part of a pair each token is of, None: the model's default.
        prompt_len: tokens of the prompt at the start, special ones included.
        pixels: [channels, height, width] of an image.
        num_tokens: what it counts for.
    """

    item: PoolingItem
    token_ids: list[int]
    type_ids: list[int] | None = None
    prompt_len: int = 0
    pixels: Tensor | None = None
    num_tokens: int = 0


class Preparer:
    """Tokenises and checks items."""

    def __init__(
        self,
        recipe: Recipe,
        info: PoolingInfo,
        tokenizer: PreTrainedTokenizerBase,
        *,
        judge: Judge | None,
        images: tuple[Callable[[bytes], Tensor], int] | None,
    ) -> None:
        """Keep what the checks need.

        Args:
            recipe: what the checkpoint is.
            info: facts about the loaded model.
            tokenizer: of the checkpoint.
            judge: how a pair becomes one text, for a model that answers yes or no.
            images: from a file's bytes to pixels, and the tokens that an image counts for; None:
                the model takes no images.
        """
        self._recipe = recipe
        self._info = info
        self._tokenizer = tokenizer
        self._judge = judge
        self._images = images
        self._prompt_lens: dict[str, int] = {}
        # A tokenizer is asked to truncate by changing it, so one text at a time is in it.
        self._lock = threading.Lock()
        # Some tokenizers tell the parts of a pair apart for models that do not.
        kinds = getattr(recipe.config, "type_vocab_size", None)
        self._wants_types = kinds != 1 and "token_type_ids" in tokenizer.model_input_names

    def prepare(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        """Tokenise items, all their texts in one go.

        Raises:
            RequestError: an item is wrong; the message says which and why.
        """
        with self._lock:
            return self._prepare(items)

    def _prepare(self, items: Sequence[PoolingItem]) -> list[Prepared]:
        checked = []
        for index, item in enumerate(items):
            try:
                checked.append(self._check(item))
            except RequestError as error:
                raise _at(index, len(items), error) from error
        found: list[Prepared | None] = [None] * len(checked)
        texts: list[int] = []
        for index, item in enumerate(checked):
            if item.text is not None or item.pair is not None:
                texts.append(index)
                continue
            try:
                found[index] = self._without_text(item)
            except RequestError as error:
                raise _at(index, len(items), error) from error
        for index, ids, types in self._tokenise(checked, texts):
            try:
                found[index] = self._with_text(checked[index], ids, types)
            except RequestError as error:
                raise _at(index, len(items), error) from error
        return [one for one in found if one is not None]

    def _check(self, item: PoolingItem) -> PoolingItem:
        """The item with its kind and prompt filled in."""
        info = self._info
        kind = item.kind or info.kinds[0]
        if kind not in info.kinds:
            raise RequestError(
                f"kind: {info.architecture} gives {', '.join(info.kinds)} and not {kind}"
            )
        sources = (item.text, item.token_ids, item.pair, item.image)
        if sum(source is not None for source in sources) != 1:
            raise RequestError(
                "input: exactly one of a text, token ids, a pair and an image must be given; one "
                "vector stands for one of them"
            )
        self._check_options(item, kind)
        if kind == "score" and item.pair is None and item.token_ids is None:
            raise RequestError("input: scoring takes a pair of a query and a document")
        if item.pair is not None and kind not in ("score", "classify"):
            raise RequestError(f"input: {kind} takes one text and not a pair")
        if item.image is not None and not info.accepts_images:
            raise RequestError(f"image: {info.architecture} takes no images")
        prompt = self._prompt(item)
        fields = {name: getattr(item, name) for name in PoolingItem.__slots__}
        return PoolingItem(**{**fields, "kind": kind, "prompt": prompt, "prompt_name": None})

    def _check_options(self, item: PoolingItem, kind: str) -> None:
        if item.dimensions is not None:
            size, asked = self._info.dimension, item.dimensions
            if kind not in ("dense", "multi_vector"):
                raise RequestError(f"dimensions: is for dense vectors and not for {kind}")
            if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= size:
                raise RequestError(f"dimensions: must be from 1 to {size}, got {asked}")
        if item.activation is not None and item.activation not in ACTIVATIONS:
            raise RequestError(
                f"activation: must be one of {', '.join(ACTIVATIONS)}, got {item.activation!r}"
            )
        if item.instruction is not None and self._judge is None:
            raise RequestError(
                f"instruction: {self._info.architecture} is no judge that reads instructions"
            )

    def _prompt(self, item: PoolingItem) -> str | None:
        if item.prompt is not None and item.prompt_name is not None:
            raise RequestError("prompt: give prompt or prompt_name, not both")
        if item.token_ids is not None or item.image is not None:
            if item.prompt or item.prompt_name is not None:
                raise RequestError("prompt: can be put before a text only")
            return None
        name = item.prompt_name
        if name is None and item.prompt is None:
            name = self._recipe.default_prompt_name
        if name is None:
            return item.prompt or None
        if name in self._recipe.refused_prompts:
            raise RequestError(f"prompt_name: {name}: {self._recipe.refused_prompts[name]}")
        if name not in self._recipe.prompts:
            known = ", ".join(self._recipe.prompts) or "none"
            raise RequestError(f"prompt_name: the model has no prompt {name!r}; it has {known}")
        return self._recipe.prompts[name] or None

    def _without_text(self, item: PoolingItem) -> Prepared:
        if item.image is not None:
            assert self._images is not None
            read, num_tokens = self._images
            return Prepared(item, [], pixels=read(item.image), num_tokens=num_tokens)
        ids = item.token_ids
        assert ids is not None
        if not ids:
            raise RequestError("input: has no tokens")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"input: token ids must be integers, got {token_id!r}")
            if not 0 <= token_id < self._info.vocab_size:
                raise RequestError(
                    f"input: token id {token_id} is out of range; the vocabulary has "
                    f"{self._info.vocab_size} tokens"
                )
        if len(ids) > self._info.max_model_len:
            self._refuse_length(item, len(ids))
            ids = ids[: self._info.max_model_len]
        return Prepared(item, list(ids), num_tokens=len(ids))

    def _tokenise(
        self, items: list[PoolingItem], wanted: list[int]
    ) -> list[tuple[int, list[int], list[int] | None]]:
        """Ids and type ids of the items at these places."""
        found: list[tuple[int, list[int], list[int] | None]] = []
        single = [i for i in wanted if items[i].pair is None]
        paired = [i for i in wanted if items[i].pair is not None]
        if self._judge is not None:
            for index in wanted:
                pair = items[index].pair
                assert pair is not None
                limit = self._info.max_model_len if items[index].truncate else None
                instruction = items[index].instruction or items[index].prompt
                ids = self._judge.tokens(pair, instruction, limit)
                found.append((index, ids, None))
            return found
        if single:
            texts = [(items[i].prompt or "") + (items[i].text or "") for i in single]
            found += self._call(single, texts)
        if paired:
            pairs = [items[i].pair or ("", "") for i in paired]
            firsts = [
                (items[i].prompt or "") + query for i, (query, _) in zip(paired, pairs, strict=True)
            ]
            found += self._call(paired, firsts, [document for _, document in pairs])
        return found

    def _call(
        self, indices: list[int], *texts: list[str]
    ) -> list[tuple[int, list[int], list[int] | None]]:
        encoded: Any = self._tokenizer(
            *texts,
            return_attention_mask=False,
            return_token_type_ids=self._wants_types,
            verbose=False,
        )
        types = encoded.get("token_type_ids") or [None] * len(indices)
        return list(zip(indices, encoded["input_ids"], types, strict=True))

    def _with_text(self, item: PoolingItem, ids: list[int], types: list[int] | None) -> Prepared:
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
            ids, types = encoded["input_ids"], encoded.get("token_type_ids")
        if not ids:
            raise RequestError("input: has no tokens; the text is empty")
        prompt_len = 0
        if item.prompt and not self._recipe.include_prompt:
            prompt_len = min(self._prompt_len(item.prompt), len(ids) - 1)
        return Prepared(item, ids, types, prompt_len, num_tokens=len(ids))

    def _refuse_length(self, item: PoolingItem, length: int) -> None:
        if not item.truncate:
            raise RequestError(
                f"input: has {length} tokens; the limit is {self._info.max_model_len} "
                "(max_model_len); shorten it or ask for truncation"
            )

    def _prompt_len(self, prompt: str) -> int:
        """Tokens of a prompt alone, without the special one at its end."""
        length = self._prompt_lens.get(prompt)
        if length is None:
            encoded: Any = self._tokenizer(prompt, verbose=False)
            ids = encoded["input_ids"]
            length = len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)
            self._prompt_lens[prompt] = length
        return length


def _at(index: int, count: int, error: RequestError) -> RequestError:
    """The error, saying which of several inputs it is about."""
    return error if count == 1 else RequestError(f"input {index}: {error}")
