# SPDX-License-Identifier: Apache-2.0
"""Converts log-probabilities to the formats of the OpenAI API and of vLLM."""

from collections.abc import Sequence
from typing import Any

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.text.token_text import TokenText

# The lowest log-probability that answers contain. JSON has no infinity, so the OpenAI API uses this
# number for tokens that are almost impossible.
LOWEST = -9999.0


def openai_entry(row: Sequence[Any], texts: TokenText) -> dict[str, Any]:
    """Return the log-probabilities of one position in the format of the OpenAI API.

    Example: {"token": "a", "token_id": 5, "logprob": -0.1, "bytes": [97], "rank": 1,
    "top_logprobs": [...]}.

    Args:
        row: the fields of a TokenLogprobs: the token ids, their log-probabilities, and the rank of
            the first token among all tokens of the vocabulary. The first token is the token in the
            text. The others are the most likely tokens at this position.
        texts: the texts of single tokens.
    """
    token_ids, logprobs, rank = TokenLogprobs(*row)
    chosen_token, *top_logprobs = [
        _token(token_id, logprob, texts)
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return {**chosen_token, "rank": rank, "top_logprobs": top_logprobs}


def vllm_entry(row: Sequence[Any], texts: TokenText) -> dict[str, dict[str, Any]]:
    """Return the log-probabilities of one position in the format of vLLM.

    The token of the text comes first, followed by the most likely tokens. Example:
    {"5": {"logprob": -0.1, "rank": 1, "decoded_token": "a"}}.

    Args:
        row: the token ids, their log-probabilities, and the rank of the first token.
        texts: the texts of single tokens.
    """
    token_ids, logprobs, chosen_rank = TokenLogprobs(*row)
    # The first token is the one that the text contains. The other tokens are the most likely
    # tokens, with the ranks 1, 2, 3, ...
    ranks = [chosen_rank, *range(1, len(token_ids))]
    entry: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
        key = str(token_id)
        if key in entry:
            # `token_id` occurs twice: as the token in the text, and as one of the most likely
            # tokens. Keep only the entry that was added first.
            continue
        entry[key] = {
            "logprob": max(logprob, LOWEST),  # JSON has no minus infinity.
            "rank": rank,
            "decoded_token": texts.text(token_id),
        }
    return entry


def prompt_entries(
    rows: Sequence[Sequence[Any] | None], texts: TokenText
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the log-probabilities of all tokens of a prompt in the format of vLLM.

    The entry of the first token is None, because the model does not predict it.
    """
    return [None if row is None else vllm_entry(row, texts) for row in rows]


def _token(token_id: int, logprob: float, texts: TokenText) -> dict[str, Any]:
    """Return the fields that describe one token in the format of the OpenAI API."""
    return {
        "token": texts.text(token_id),
        "token_id": token_id,
        "logprob": max(logprob, LOWEST),
        "bytes": list(texts.data(token_id)),
    }
