"""The fields that all chunks of a completion have in common, and the total token counts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import nereid_client
from nereid_client.streaming.deltas import Usage

Json = dict[str, Any]

_FINGERPRINT = f"nereid-{nereid_client.__version__}"
"""The field `system_fingerprint` of each chunk. The libraries of OpenRouter and Cerebras require
the field, and the latter requires a string."""


@dataclass(frozen=True)
class CompletionFrame:
    """The fields that all chunks of a completion share, and the options that affect all chunks.

    Attributes:
        id: the id of the completion.
        model: the name of the served model.
        created: the Unix time in seconds.
        num_choices: the number of choices of each prompt.
        include_usage: whether a stream ends with a chunk that contains the token counts.
        continuous_usage: whether each chunk contains the token counts so far.
        tokens_as_ids: whether log-probabilities name a token as "token_id:17".
        service_tier: the service tier in the response. None if the response has no such field.
    """

    id: str
    model: str
    created: int
    num_choices: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False
    service_tier: str | None = None

    def with_choices(self, kind: str, choices: list[Json]) -> Json:
        """Return a chunk or a whole completion that contains the given choices.

        Args:
            kind: the value of the field `object`, such as "chat.completion.chunk".
            choices: the value of the field `choices`.
        """
        chunk = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }
        return chunk if self.service_tier is None else chunk | {"service_tier": self.service_tier}


def total_usage(prompts: Iterable[Iterable[Usage | None]]) -> Json:
    """Return a usage object in OpenAI's format, with the total token counts of a request.

    The tokens of a prompt are counted once, although all choices of the prompt report them. The
    generated tokens of all choices are added. The details are present if the backend reports them.

    Example: the only prompt has 5 tokens, and its two choices have 2 and 3 generated tokens. The
    result is {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}.

    Args:
        prompts: for each prompt, a list with the usage of each choice. None means no usage so far.
    """
    num_prompt = 0
    num_cached = 0
    all_usages: list[Usage] = []
    for choices in prompts:
        usages = [usage for usage in choices if usage]
        if usages:
            num_prompt += usages[0]["prompt_tokens"]
            # All choices of a prompt share its cached tokens, so the tokens are counted once. The
            # maximum is used, because a choice that has not started yet reports 0.
            num_cached += max(map(_cached_tokens, usages))
            all_usages += usages
    num_generated = sum(usage["completion_tokens"] for usage in all_usages)
    counts: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if any("prompt_tokens_details" in usage for usage in all_usages):
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    if any("completion_tokens_details" in usage for usage in all_usages):
        num_reasoning = sum(map(_reasoning_tokens, all_usages))
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def _cached_tokens(usage: Usage) -> int:
    return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


def _reasoning_tokens(usage: Usage) -> int:
    return usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
