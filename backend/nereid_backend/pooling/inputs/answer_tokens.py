# SPDX-License-Identifier: Apache-2.0
"""Finds the tokens whose logits give the score of a generative reranker."""

from transformers import PreTrainedTokenizerBase

from nereid_backend.errors import ModelError
from nereid_backend.pooling.loading.checkpoint_spec import (
    CAUSAL,
    IMAGE_CAUSAL,
    AnswerTokens,
    CheckpointSpec,
)


def find_answer_tokens(
    spec: CheckpointSpec, tokenizer: PreTrainedTokenizerBase
) -> AnswerTokens | None:
    """Return the answer tokens of a generative reranker, or None for another model.

    The ids come from the files of a checkpoint for sentence-transformers. If a checkpoint has no
    such files, the ids of "yes" and "no" are looked up in the vocabulary.

    Raises:
        ModelError: the vocabulary has no token "yes" or no token "no".
    """
    if spec.loader not in (CAUSAL, IMAGE_CAUSAL):
        return None
    return spec.answer_tokens or AnswerTokens(
        yes=_token_id(tokenizer, "yes"), no=_token_id(tokenizer, "no")
    )


def _token_id(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    """Return the id of the token `word`. Raise a ModelError if there is no such token."""
    token_id = tokenizer.get_vocab().get(word)
    if token_id is None:
        raise ModelError(
            f'task: reranking with a generative checkpoint requires the token "{word}", but '
            "this tokenizer lacks it. Choose another checkpoint."
        )
    return int(token_id)
