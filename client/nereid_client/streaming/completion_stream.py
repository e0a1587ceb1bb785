"""Convert the postprocessor's deltas to text completion chunks, or to a whole text completion.

A text completion may have several prompts. As in OpenAI's API, the choices are numbered across all
prompts: the choice with the number `prompt * n + i` is the i-th choice of the prompt `prompt`.

Example: with n=1, the delta {"text": "Hello"} of the second prompt becomes a chunk whose field
`choices` is [{"index": 1, "text": "Hello", "logprobs": null, "finish_reason": null, ...}].
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from nereid_client.streaming.chunk_events import ChunkBuilder, chunk_events
from nereid_client.streaming.completion_frame import CompletionFrame, Json, total_usage
from nereid_client.streaming.deltas import Delta, Usage
from nereid_client.streaming.openai_logprobs import (
    CompletionLogprobs,
    join_logprobs,
    prompt_logprobs,
)

PromptDelta = tuple[int, Delta]
"""The index of a prompt, and a delta for one of the choices of this prompt."""


@dataclass(frozen=True)
class CompletionOptions:
    """The options of a completion request that determine what a choice contains.

    Attributes:
        echoed_prompts: for each prompt, the text at the start of its choices: the prompt if the
            request sets `echo`, and else "".
        logprobs: whether choices have log-probabilities. If the prompt is echoed, the tokens of the
            prompt also have log-probabilities.
        prompt_logprobs: whether choices have the field `prompt_logprobs`, in vLLM's format.
        token_ids: whether choices have token ids.
        only_prompt: whether generated tokens are dropped, because the request has max_tokens=0. The
            response then contains only the prompt and its log-probabilities.
    """

    echoed_prompts: Sequence[str]
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    only_prompt: bool = False


def completion_events(
    frame: CompletionFrame,
    options: CompletionOptions,
    first: PromptDelta | None,
    rest: AsyncGenerator[PromptDelta],
) -> AsyncGenerator[bytes]:
    """Yield a text completion as server-sent events, as described by `chunk_events`.

    Args:
        frame: the fields that all chunks have in common.
        options: the options that decide what the choices contain.
        first: the first delta, or None if there is none.
        rest: the deltas after the first one.
    """
    return chunk_events(_CompletionChunks(frame, options), first, rest)


class _CompletionChunks(ChunkBuilder[PromptDelta]):
    """Builds the chunks of a text completion."""

    def __init__(self, frame: CompletionFrame, options: CompletionOptions) -> None:
        super().__init__(frame, "text_completion", len(options.echoed_prompts))
        self._options = options
        self._logprobs = [
            CompletionLogprobs(tokens_as_ids=frame.tokens_as_ids, echoed_prompt=echoed_prompt)
            for echoed_prompt in options.echoed_prompts
            for _ in range(frame.num_choices)
        ]

    def opening(self) -> list[Json]:
        """If the request sets `echo`, return one chunk for each choice. It contains the prompt."""
        num_choices = self.frame.num_choices
        texts = [text for text in self._options.echoed_prompts for _ in range(num_choices)]
        return [
            self.chunk({"index": number, **_choice(text, {})})
            for number, text in enumerate(texts)
            if text  # without `echo`, the text is ""
        ]

    def add(self, item: PromptDelta) -> list[Json]:
        """Return a list with the chunk for a delta. Return an empty list for an empty chunk.

        Also record the usage and the finish reason that the delta contains, because the end of the
        stream depends on them.
        `item` contains the index of a prompt, and the next delta for one of the prompt's choices.
        """
        prompt, delta = item
        self.record_usage_and_end(prompt, delta)
        number = self.choice_number_of(prompt, delta)
        if not any(delta.get(name) for name in _CHUNK_FIELDS):
            return []
        choice = _choice(delta.get("text", ""), delta)
        if self._options.logprobs:
            choice["logprobs"] = self._logprobs_of(number, delta)
        choice |= _token_ids(self._options, generated=delta, prompt=delta)
        return [self.chunk({"index": number, **choice})]

    def _logprobs_of(self, number: int, delta: Delta) -> Json | None:
        """Return the field `logprobs` of a chunk, or None if the delta has no log-probabilities.

        Args:
            number: the number of the choice. Its builder receives the text of every delta, because
                the log-probabilities of this text may arrive with another delta.
            delta: the delta of the chunk.
        """
        entries = delta.get("logprobs", ())
        is_last = "finish_reason" in delta
        part = self._logprobs[number].add(delta.get("text", ""), entries, is_last=is_last)
        return part if entries else None


_CHUNK_FIELDS = ("text", "finish_reason", "logprobs", "token_ids", "prompt_token_ids")
"""A delta with one of these fields needs a chunk."""


def completion(
    frame: CompletionFrame, options: CompletionOptions, totals: Sequence[Sequence[Delta]]
) -> Json:
    """Return a whole text completion.

    If more than `frame.num_choices` choices were generated for a prompt (`best_of`), only the best
    choices are returned. The best choice is first.

    Args:
        frame: the fields that do not depend on the choices.
        options: the options that decide what the choices contain.
        totals: for each prompt, a list with the sum of the deltas of each choice.
    """
    choices: list[Json] = []
    for echoed_prompt, choice_totals in zip(options.echoed_prompts, totals, strict=True):
        # The backend reports the tokens and log-probabilities of the prompt only with the first
        # generated choice. They are copied to every returned choice, because the first choice may
        # not be returned.
        prompt_total = choice_totals[0]
        for total in best(choice_totals, frame.num_choices):
            choice = _whole_choice(frame, options, echoed_prompt, prompt_total, total)
            choices.append({"index": len(choices), **choice})
    usages = [
        [_usage_without_dropped_tokens(options, total) for total in choice_totals]
        for choice_totals in totals
    ]
    return {**frame.with_choices("text_completion", choices), "usage": total_usage(usages)}


def best(totals: Sequence[Delta], number: int) -> Sequence[Delta]:
    """Return the choices with the highest mean log-probability of their tokens.

    The best choice is first. If there are at most `number` choices, return all of them in their
    original order.

    Args:
        totals: the sum of the deltas of each choice.
        number: the number of choices to return.
    """
    if len(totals) <= number:
        return totals
    return sorted(totals, key=_mean_logprob, reverse=True)[:number]


def _mean_logprob(total: Delta) -> float:
    """Return the mean log-probability of a choice's tokens, or 0 if the choice has no tokens."""
    usage = total.get("usage")
    num_tokens = usage["completion_tokens"] if usage else 0
    return total.get("cumulative_logprob", 0.0) / max(1, num_tokens)


def _whole_choice(
    frame: CompletionFrame,
    options: CompletionOptions,
    echoed_prompt: str,
    prompt_total: Delta,
    total: Delta,
) -> Json:
    """Return one choice of a whole completion.

    Args:
        frame: the fields that all choices have in common.
        options: the options that decide what the choice contains.
        echoed_prompt: the text of the prompt if the choice begins with this text, and else "".
        prompt_total: the delta that reports the tokens and log-probabilities of the prompt.
        total: the sum of the deltas of this choice.
    """
    if options.only_prompt:
        # The request has max_tokens=0. This limit is reached at once, so the finish reason is
        # "length".
        choice = _choice(echoed_prompt, {"finish_reason": "length"})
    else:
        choice = _choice(echoed_prompt + total.get("text", ""), total)
    if options.logprobs:
        choice["logprobs"] = _whole_logprobs(frame, options, echoed_prompt, prompt_total, total)
    if options.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(prompt_total.get("prompt_logprobs", []))
    return choice | _token_ids(options, generated=total, prompt=prompt_total)


def _whole_logprobs(
    frame: CompletionFrame,
    options: CompletionOptions,
    echoed_prompt: str,
    prompt_total: Delta,
    total: Delta,
) -> Json:
    """Return the field `logprobs` of a whole choice.

    The field describes the tokens of the text: first the tokens of the prompt, if the text begins
    with the prompt, and then the generated tokens, unless only the prompt is requested.
    """
    builder = CompletionLogprobs(tokens_as_ids=frame.tokens_as_ids, echoed_prompt=echoed_prompt)
    parts = []
    if echoed_prompt:
        token_ids = prompt_total.get("prompt_token_ids", ())
        parts.append(builder.add_prompt(token_ids, prompt_total.get("prompt_logprobs", [])))
    if not options.only_prompt:
        entries = total.get("logprobs", ())
        # If the choice begins with the prompt, the text offsets of the generated tokens start at
        # the end of the prompt.
        parts.append(builder.add(total.get("text", ""), entries, is_last=True))
    return join_logprobs(parts)  # without parts, a field with empty lists


def _usage_without_dropped_tokens(options: CompletionOptions, total: Delta) -> Usage | None:
    """Return the token counts of one choice, or None if the backend has not reported the counts.

    If only the prompt is requested, the generated tokens are dropped and do not count.
    """
    usage = total.get("usage")
    if usage is None or not options.only_prompt:
        return usage
    prompt_usage: Usage = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 0}
    if "prompt_tokens_details" in usage:
        prompt_usage["prompt_tokens_details"] = usage["prompt_tokens_details"]
    if "completion_tokens_details" in usage:
        prompt_usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    return prompt_usage


def _token_ids(options: CompletionOptions, *, generated: Delta, prompt: Delta) -> Json:
    """Return the fields with token ids. If the request does not ask for token ids, return {}.

    Args:
        options: the options that decide what the choice contains.
        generated: the delta that contains the generated token ids, if there are any.
        prompt: the delta that contains the token ids of the prompt, if they are reported. In a
            stream, both deltas are the same object.
    """
    if not options.token_ids:
        return {}
    fields: Json = {}
    if "token_ids" in generated:
        # If only the prompt is requested (max_tokens=0), the backend still generates one token in
        # order to compute the log-probabilities of the prompt. This token is dropped.
        fields["token_ids"] = [] if options.only_prompt else generated["token_ids"]
    if "prompt_token_ids" in prompt:
        fields["prompt_token_ids"] = prompt["prompt_token_ids"]
    return fields


def _choice(text: str, delta: Delta) -> Json:
    """Return a choice with the given text. Copy the finish reason and `stop_reason` from the delta.

    The stop string or stop token has two names: `stop_reason` (vLLM) and `matched_stop` (SGLang).
    """
    return {
        "text": text,
        "logprobs": None,
        "finish_reason": delta.get("finish_reason"),
        "stop_reason": delta.get("stop_reason"),
        "matched_stop": delta.get("stop_reason"),
    }
