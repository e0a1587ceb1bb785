"""Convert the deltas of the postprocessor to text completion chunks, or to a whole completion.

A text completion may have several prompts. As in OpenAI's API, the choices are numbered across all
prompts: choice `prompt * n + i` is the i-th choice of a prompt.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from nereid_client.errors import FrontendError, to_api_error
from nereid_client.streaming import sse
from nereid_client.streaming.completion_frame import CompletionFrame, Json, total_usage
from nereid_client.streaming.deltas import Delta, Usage, unfinished_error
from nereid_client.streaming.openai_logprobs import CompletionLogprobs, joined, prompt_logprobs

PromptDelta = tuple[int, Delta]
"""The index of a prompt, and a delta of one of its choices."""


@dataclass(frozen=True)
class CompletionOptions:
    """The options of a request that decide what its choices contain.

    Attributes:
        echoes: for each prompt, the text that its choices start with ("" without `echo`).
        logprobs: whether choices have log-probabilities, those of an echoed prompt included.
        prompt_logprobs: whether choices have the field `prompt_logprobs`, in vLLM's format.
        token_ids: whether choices have token ids.
        only_prompt: whether generated tokens are dropped, because only the log-probabilities of
            the prompt are requested.
    """

    echoes: Sequence[str]
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    only_prompt: bool = False


@dataclass
class _StreamState:
    """The state of one stream: token counts, unfinished choices and log-probabilities."""

    frame: CompletionFrame
    options: CompletionOptions
    usages: list[list[Usage | None]] = field(init=False)
    unfinished: set[int] = field(init=False)
    logprobs: list[CompletionLogprobs] = field(init=False)

    def __post_init__(self) -> None:
        num_prompts, num_choices = len(self.options.echoes), self.frame.num_choices
        self.usages = [[None] * num_choices for _ in range(num_prompts)]
        self.unfinished = set(range(num_prompts * num_choices))
        self.logprobs = [
            CompletionLogprobs(self.frame.tokens_as_ids, echo)
            for echo in self.options.echoes
            for _ in range(num_choices)
        ]

    def chunk(self, index: int, choice: Json) -> Json:
        """Return a chunk with one choice, whose number across all prompts is `index`."""
        chunk = self.frame.with_choices("text_completion", [{"index": index, **choice}])
        if self.frame.include_usage:
            chunk["usage"] = total_usage(self.usages) if self.frame.continuous_usage else None
        return chunk

    def update(self, prompt: int, delta: Delta) -> Json | None:
        """Record a delta. Return its chunk, or None if the chunk would be empty."""
        at = delta.get("index", 0)
        index = prompt * self.frame.num_choices + at
        self.usages[prompt][at] = delta.get("usage", self.usages[prompt][at])
        if "finish_reason" in delta:
            self.unfinished.discard(index)
        if not any(delta.get(name) for name in _CHUNK_FIELDS):
            return None
        choice = _choice(delta.get("text", ""), delta)
        if self.options.logprobs:
            entries, is_last = delta.get("logprobs", ()), "finish_reason" in delta
            part = self.logprobs[index].add(delta.get("text", ""), entries, is_last)
            choice["logprobs"] = part if entries else None
        return self.chunk(index, choice | _token_ids(self.options, delta, delta))


_CHUNK_FIELDS = ("text", "finish_reason", "logprobs", "token_ids", "prompt_token_ids")
"""The fields of a delta that need a chunk."""


async def completion_events(
    frame: CompletionFrame,
    options: CompletionOptions,
    first: PromptDelta | None,
    rest: AsyncGenerator[PromptDelta],
) -> AsyncGenerator[bytes]:
    """Yield a text completion as server-sent events.

    The chunks of several choices are interleaved. Events that are ready at the same time are
    yielded together, because each yield costs a write to the socket. An error of the backend
    becomes the last event; [DONE] does not follow it.

    Args:
        frame: the fields that all chunks have in common.
        options: what the choices contain.
        first: the first delta, or None if there is none.
        rest: the deltas after the first one.
    """
    state = _StreamState(frame, options)
    unsent = [
        sse.event(state.chunk(prompt * frame.num_choices + at, _choice(echo, {})))
        for prompt, echo in enumerate(options.echoes)
        for at in range(frame.num_choices if echo else 0)
    ]
    item = first
    try:
        while item is not None:
            if chunk := state.update(*item):
                unsent.append(sse.event(chunk))
            if unsent and state.unfinished:  # the last chunks are sent together with [DONE]
                yield b"".join(unsent)
                unsent = []
            item = await anext(rest, None)
        if state.unfinished:
            raise unfinished_error()
    except FrontendError as error:
        yield b"".join([*unsent, sse.event(to_api_error(error).body())])
        return
    if frame.include_usage:
        last = frame.with_choices("text_completion", [])
        unsent.append(sse.event({**last, "usage": total_usage(state.usages)}))
    yield b"".join([*unsent, sse.DONE])


def completion(
    frame: CompletionFrame, options: CompletionOptions, totals: Sequence[Sequence[Delta]]
) -> Json:
    """Return a whole text completion.

    Args:
        frame: the fields that do not depend on the choices. If more than `frame.num_choices` were
            generated for a prompt, the best ones are returned, the best first.
        options: what the choices contain.
        totals: for each prompt, the sum of the deltas of each of its choices.
    """
    choices: list[Json] = []
    for prompt, of_prompt in enumerate(totals):
        for total in best(of_prompt, frame.num_choices):
            choice = _whole_choice(frame, options, prompt, of_prompt[0], total)
            choices.append({"index": len(choices), **choice})
    usages = [[_usage(options, total) for total in of_prompt] for of_prompt in totals]
    whole = frame.with_choices("text_completion", choices)
    return {**whole, "usage": total_usage(usages)}


def best(totals: Sequence[Delta], number: int) -> Sequence[Delta]:
    """Return the choices with the highest mean log-probability of a token, the best first.

    If there are not more than `number`, return all of them in their own order.
    """
    if len(totals) <= number:
        return totals
    return sorted(totals, key=_mean_logprob, reverse=True)[:number]


def _mean_logprob(total: Delta) -> float:
    usage = total.get("usage")
    num_tokens = usage["completion_tokens"] if usage else 0
    return total.get("cumulative_logprob", 0.0) / max(1, num_tokens)


def _whole_choice(
    frame: CompletionFrame, options: CompletionOptions, prompt: int, first: Delta, total: Delta
) -> Json:
    """Return one choice of a whole completion.

    Args:
        frame: the fields that all choices have in common.
        options: what the choice contains.
        prompt: the index of the prompt.
        first: the sum of the deltas of the prompt's first choice, which reports the tokens and
            log-probabilities of the prompt.
        total: the sum of the deltas of this choice.
    """
    echo = options.echoes[prompt]
    text = "" if options.only_prompt else total.get("text", "")
    choice = _choice(echo + text, total)
    if options.only_prompt:
        choice |= {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    if options.logprobs:
        logprobs = CompletionLogprobs(frame.tokens_as_ids, echo)
        parts = []
        if echo:
            token_ids = first.get("prompt_token_ids", ())
            parts.append(logprobs.prompt(token_ids, first.get("prompt_logprobs", [])))
        if not options.only_prompt:
            parts.append(logprobs.add(text, total.get("logprobs", ()), is_last=True))
        choice["logprobs"] = joined(parts)
    if options.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(first.get("prompt_logprobs", []))
    return choice | _token_ids(options, first, total)


def _usage(options: CompletionOptions, total: Delta) -> Usage | None:
    """Return the token counts of a choice, without the generated tokens if they are dropped."""
    usage = total.get("usage")
    if usage is None or not options.only_prompt:
        return usage
    prompt_usage: Usage = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 0}
    if "prompt_tokens_details" in usage:
        prompt_usage["prompt_tokens_details"] = usage["prompt_tokens_details"]
    return prompt_usage


def _token_ids(options: CompletionOptions, first: Delta, delta: Delta) -> Json:
    """Return the fields with token ids.

    Args:
        options: whether they are requested.
        first: the delta that reports the token ids of the prompt.
        delta: the delta with the generated token ids.
    """
    fields: Json = {}
    if options.token_ids and "token_ids" in delta:
        fields["token_ids"] = [] if options.only_prompt else delta["token_ids"]
    if options.token_ids and "prompt_token_ids" in first:
        fields["prompt_token_ids"] = first["prompt_token_ids"]
    return fields


def _choice(text: str, delta: Delta) -> Json:
    return {
        "text": text,
        "logprobs": None,
        "finish_reason": delta.get("finish_reason"),
        "stop_reason": delta.get("stop_reason"),
        "matched_stop": delta.get("stop_reason"),
    }
