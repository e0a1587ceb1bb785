# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as clients see them: entries of the OpenAI API, vLLM's mapping by token id."""

from collections.abc import Sequence
from typing import Any

from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.text.token_text import TokenText

# JSON has no infinity. The OpenAI API gives this for tokens that are all but impossible.
LOWEST = -9999.0


def openai_entry(row: Sequence[Any], texts: TokenText) -> dict[str, Any]:
    """One token as an entry of a delta's `logprobs` (docs/contract.md).

    Args:
        row: the fields of TokenLogprobs.
        texts: of single tokens.
    """
    token_ids, logprobs, rank = TokenLogprobs(*row)
    top = zip(token_ids[1:], logprobs[1:], strict=True)
    return {
        **_token(token_ids[0], logprobs[0], texts),
        "rank": rank,
        "top_logprobs": [_token(token_id, logprob, texts) for token_id, logprob in top],
    }


def vllm_entry(row: Sequence[Any], texts: TokenText) -> dict[str, dict[str, Any]]:
    """One token as vLLM gives it: the chosen token first, then the likeliest ones, by their ids."""
    token_ids, logprobs, rank = TokenLogprobs(*row)
    ranks = [rank, *range(1, len(token_ids))]
    found: dict[str, dict[str, Any]] = {}
    for token_id, logprob, place in zip(token_ids, logprobs, ranks, strict=True):
        found.setdefault(
            str(token_id),
            {
                "logprob": max(logprob, LOWEST),
                "rank": place,
                "decoded_token": texts.text(token_id),
            },
        )
    return found


def prompt_entries(
    rows: Sequence[Sequence[Any] | None], texts: TokenText
) -> list[dict[str, dict[str, Any]] | None]:
    """A prompt's tokens as vLLM gives them; None for the first, which nothing predicts."""
    return [None if row is None else vllm_entry(row, texts) for row in rows]


def _token(token_id: int, logprob: float, texts: TokenText) -> dict[str, Any]:
    return {
        "token": texts.text(token_id),
        "token_id": token_id,
        "logprob": max(logprob, LOWEST),
        "bytes": list(texts.data(token_id)),
    }
