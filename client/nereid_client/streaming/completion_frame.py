"""What chat and text completions have in common: the frame of every answer, and its usage."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nereid_client.streaming.deltas import Usage

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What every chunk and every answer of one request repeats.

    Attributes:
        num_choices: choices of each prompt.
        include_usage: whether a last chunk reports the usage.
        continuous_usage: whether every chunk does.
        tokens_as_ids: whether tokens of log-probabilities are written `token_id:17`.
        service_tier: what served it, where the request asked for a tier.
    """

    id: str
    model: str
    created: int
    num_choices: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False
    service_tier: str | None = None

    def frame(self, kind: str, choices: list[Json]) -> Json:
        """An answer or a chunk of this `object` with these choices."""
        frame = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return frame if self.service_tier is None else frame | {"service_tier": self.service_tier}


def usage_of(prompts: Iterable[Iterable[Usage | None]]) -> Json:
    """OpenAI's usage object of a whole request.

    A prompt counts once, however many choices share it; what was generated counts for each choice.
    Details are there where the backend gives them.

    Args:
        prompts: for each prompt the usage of its choices, None where nothing is known yet.
    """
    given = [[usage for usage in choices if usage] for choices in prompts]
    of_prompts = [choices[0] for choices in given if choices]
    of_choices = [usage for choices in given for usage in choices]
    counts: Json = {
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in of_prompts),
        "completion_tokens": sum(usage["completion_tokens"] for usage in of_choices),
    }
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    if any("prompt_tokens_details" in usage for usage in of_choices):
        cached = (max(map(_cached, choices)) for choices in given if choices)
        counts["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    if any("completion_tokens_details" in usage for usage in of_choices):
        reasoning = sum(map(_reasoning, of_choices))
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def _cached(usage: Usage) -> int:
    return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


def _reasoning(usage: Usage) -> int:
    return usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
