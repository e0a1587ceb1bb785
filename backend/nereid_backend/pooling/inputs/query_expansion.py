# SPDX-License-Identifier: Apache-2.0
"""Applies the rules of a model such as ColBERT to tokenised queries and documents."""

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ConfigError, ModelError, UnsupportedModelError
from nereid_backend.pooling.loading.late_interaction_files import (
    DOCUMENT,
    QUERY,
    LateInteraction,
    QueryExpansion,
)
from nereid_backend.pooling.pooling_items import PoolingItem


class ExpandedText(NamedTuple):
    """The tokens of a text, with mask tokens at the end if the text is a short query.

    Attributes:
        token_ids: the tokens.
        type_ids: the type ids of the tokens; None means the model's default.
        num_attended: the number of tokens to which all tokens attend (see Prepared.num_attended).
    """

    token_ids: list[int]
    type_ids: list[int] | None
    num_attended: int | None


@dataclass(frozen=True, slots=True)
class TextRules:
    """The rules by which a checkpoint treats queries and documents.

    A text with the prompt "query" is a query. Every other text is a document.

    Attributes:
        late: the rules in the files of the checkpoint.
        max_model_len: the length limit of all inputs in tokens.
        mask_id: the id of the token that is appended to short queries; None if nothing is appended.
    """

    late: LateInteraction
    max_model_len: int
    mask_id: int | None

    @classmethod
    def check_and_create(
        cls, late: LateInteraction, max_model_len: int, tokenizer: PreTrainedTokenizerBase
    ) -> "TextRules":
        """Create the rules for texts. If short queries are expanded, check that this is possible.

        A short query is expanded with mask tokens, until the query has a certain length, such as 32
        tokens.

        Args:
            late: the rules in the files of the checkpoint.
            max_model_len: the length limit of all inputs in tokens.
            tokenizer: the tokenizer of the checkpoint.

        Raises:
            ConfigError: `max_model_len` is smaller than the length of an expanded query.
            ModelError: the tokenizer has no token that can be appended to queries.
            UnsupportedModelError: the tokenizer pads at the beginning of a text.
        """
        expansion = late.expansion
        if expansion is None:
            return cls(late, max_model_len, None)
        if expansion.length > max_model_len:
            raise ConfigError(
                f"max_model_len: the checkpoint expands queries to {expansion.length} tokens "
                f"(query_expansion), but the limit is {max_model_len}. Raise max_model_len."
            )
        if tokenizer.padding_side != "right":
            raise UnsupportedModelError(
                "query_expansion requires a tokenizer that pads at the end of a text, but the "
                f"padding_side of this tokenizer is {tokenizer.padding_side}."
            )
        return cls(late, max_model_len, _mask_id(expansion, tokenizer))

    def limit(self, item: PoolingItem) -> tuple[int, str]:
        """Return the token limit for the text of an item, and the name of this limit."""
        role = _role_of(item)
        length = self.late.length(role)
        if length is None or length > self.max_model_len:
            return self.max_model_len, "max_model_len"
        return length, f"{role}_length"

    def skips_words(self, item: PoolingItem) -> bool:
        """Return whether the item's output omits the vectors of punctuation and similar tokens."""
        return _role_of(item) in self.late.skip_roles

    def expand(self, item: PoolingItem, ids: list[int], types: list[int] | None) -> ExpandedText:
        """Append mask tokens to a short query. Return any other text unchanged.

        Example: for a length of 5, the query [7, 8, 9] becomes [7, 8, 9, mask, mask], with
        num_attended=3, because tokens attend only to the first three tokens. If the checkpoint's
        rule is that tokens attend to the mask tokens, too, num_attended is None.

        Args:
            item: the item of the text.
            ids: the tokens of the text.
            types: the type ids of the tokens; None means the model's default.
        """
        unchanged = ExpandedText(ids, types, num_attended=None)
        expansion = self.late.expansion
        if expansion is None or self.mask_id is None or _role_of(item) != QUERY:
            return unchanged
        num_masks = expansion.length - len(ids)
        if num_masks <= 0:
            return unchanged
        return ExpandedText(
            token_ids=ids + [self.mask_id] * num_masks,
            type_ids=None if types is None else types + [0] * num_masks,
            num_attended=None if expansion.is_attended else len(ids),
        )


def _mask_id(expansion: QueryExpansion, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that is appended to short queries.

    The token is named in the checkpoint's files. Otherwise, it is the tokenizer's mask token, or
    the end-of-sequence token if the tokenizer has no mask token.

    Raises:
        ModelError: the vocabulary does not contain the token.
    """
    vocabulary = tokenizer.get_vocab()
    token = expansion.token or tokenizer.mask_token or tokenizer.eos_token
    if token not in vocabulary:
        raise ModelError(
            f"query_expansion appends the token {token!r} to queries, but the vocabulary of "
            "the tokenizer does not contain this token. Download the checkpoint again."
        )
    return int(vocabulary[token])


def _role_of(item: PoolingItem) -> str:
    """Return the role of an item's text: "query" or "document"."""
    return QUERY if item.prompt_name == QUERY else DOCUMENT
