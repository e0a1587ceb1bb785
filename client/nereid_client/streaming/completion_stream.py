"""Deltas -> OpenAI text completion, several prompts at once: its chunks, or the whole answer.

Choice `prompt * n + i` is the i-th answer to a prompt, as in OpenAI's API.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from nereid_client.errors import FrontendError, to_api_error
from nereid_client.streaming import sse
from nereid_client.streaming.completion_frame import Json, Reply, usage_of
from nereid_client.streaming.deltas import Delta, Usage, unfinished
from nereid_client.streaming.openai_logprobs import CompletionLogprobs, joined, prompt_logprobs

Indexed = tuple[int, Delta]


@dataclass(frozen=True)
class Wishes:
    """What a text completion's choices are to hold.

    Attributes:
        echoes: per prompt, the text that comes before its answers.
        logprobs: whether tokens come with their log-probabilities; with an echo, the prompt's too.
        prompt_logprobs: whether the prompt's come by themselves, in vLLM's shape.
        token_ids: whether token ids come.
        only_prompt: drop what was generated: it was asked for only to have the prompt scored.
    """

    echoes: Sequence[str]
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    only_prompt: bool = False


@dataclass
class _Progress:
    """How far the choices of a stream have come."""

    reply: Reply
    wishes: Wishes
    usages: list[list[Usage | None]] = field(init=False)
    running: set[int] = field(init=False)
    scores: list[CompletionLogprobs] = field(init=False)

    def __post_init__(self) -> None:
        num_prompts, num_choices = len(self.wishes.echoes), self.reply.num_choices
        self.usages = [[None] * num_choices for _ in range(num_prompts)]
        self.running = set(range(num_prompts * num_choices))
        self.scores = [
            CompletionLogprobs(self.reply.tokens_as_ids, echo)
            for echo in self.wishes.echoes
            for _ in range(num_choices)
        ]

    def chunk(self, index: int, choice: Json) -> Json:
        chunk = self.reply.frame("text_completion", [{"index": index, **choice}])
        if self.reply.include_usage:
            chunk["usage"] = usage_of(self.usages) if self.reply.continuous_usage else None
        return chunk

    def take(self, prompt: int, delta: Delta) -> Json | None:
        """The chunk of one delta, if it needs one."""
        at = delta.get("index", 0)
        index = prompt * self.reply.num_choices + at
        self.usages[prompt][at] = delta.get("usage", self.usages[prompt][at])
        if "finish_reason" in delta:
            self.running.discard(index)
        if not any(delta.get(name) for name in _SAYS_SOMETHING):
            return None
        choice = _choice(delta.get("text", ""), delta)
        if self.wishes.logprobs:
            entries, is_last = delta.get("logprobs", ()), "finish_reason" in delta
            part = self.scores[index].add(delta.get("text", ""), entries, is_last)
            choice["logprobs"] = part if entries else None
        return self.chunk(index, choice | _ids(self.wishes, delta, delta))


_SAYS_SOMETHING = ("text", "finish_reason", "logprobs", "token_ids", "prompt_token_ids")


async def completion_events(
    reply: Reply, wishes: Wishes, first: Indexed | None, rest: AsyncGenerator[Indexed]
) -> AsyncGenerator[bytes]:
    """The answers as server-sent events, their choices interleaved; what is due at once together.

    An error of the backend becomes an event of its own and ends the stream, without [DONE].

    Args:
        reply: what all chunks repeat.
        wishes: what they hold.
        first: the first delta and its prompt's index, read already.
        rest: the others.
    """
    progress = _Progress(reply, wishes)
    told = [
        sse.event(progress.chunk(prompt * reply.num_choices + at, _choice(echo, {})))
        for prompt, echo in enumerate(wishes.echoes)
        for at in range(reply.num_choices if echo else 0)
    ]
    item = first
    try:
        while item is not None:
            if chunk := progress.take(*item):
                told.append(sse.event(chunk))
            if told and progress.running:  # the end is sent with what follows it at once
                yield b"".join(told)
                told = []
            item = await anext(rest, None)
        if progress.running:
            raise unfinished()
    except FrontendError as error:
        yield b"".join([*told, sse.event(to_api_error(error).body())])
        return
    if reply.include_usage:
        last = reply.frame("text_completion", [])
        told.append(sse.event({**last, "usage": usage_of(progress.usages)}))
    yield b"".join([*told, sse.DONE])


def completion(reply: Reply, wishes: Wishes, answers: Sequence[Sequence[Delta]]) -> Json:
    """The whole answer.

    Args:
        reply: what it repeats; of more answers to a prompt than its `num_choices` the best are
            given, best first.
        wishes: what it holds.
        answers: for each prompt, what each of its answers adds up to.
    """
    choices: list[Json] = []
    for prompt, totals in enumerate(answers):
        for total in best(totals, reply.num_choices):
            choice = _whole_choice(reply, wishes, prompt, totals[0], total)
            choices.append({"index": len(choices), **choice})
    usages = [[_usage(wishes, total) for total in totals] for totals in answers]
    return {**reply.frame("text_completion", choices), "usage": usage_of(usages)}


def best(totals: Sequence[Delta], number: int) -> Sequence[Delta]:
    """So many answers: all in their order, or those with the likeliest tokens on average."""
    if len(totals) <= number:
        return totals
    return sorted(totals, key=_mean_logprob, reverse=True)[:number]


def _mean_logprob(total: Delta) -> float:
    usage = total.get("usage")
    num_tokens = usage["completion_tokens"] if usage else 0
    return total.get("cumulative_logprob", 0.0) / max(1, num_tokens)


def _whole_choice(reply: Reply, wishes: Wishes, prompt: int, first: Delta, total: Delta) -> Json:
    """One choice; `first` is the prompt's first answer, which holds what is known of the prompt."""
    echo = wishes.echoes[prompt]
    text = "" if wishes.only_prompt else total.get("text", "")
    choice = _choice(echo + text, total)
    if wishes.only_prompt:
        choice |= {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    if wishes.logprobs:
        scores = CompletionLogprobs(reply.tokens_as_ids, echo)
        parts = []
        if echo:
            known = first.get("prompt_token_ids", ()), first.get("prompt_logprobs", [])
            parts.append(scores.prompt(*known))
        if not wishes.only_prompt:
            parts.append(scores.add(text, total.get("logprobs", ()), is_last=True))
        choice["logprobs"] = joined(parts)
    if wishes.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(first.get("prompt_logprobs", []))
    return choice | _ids(wishes, first, total)


def _usage(wishes: Wishes, total: Delta) -> Usage | None:
    usage = total.get("usage")
    if usage is None or not wishes.only_prompt:
        return usage
    only: Usage = {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 0}
    if "prompt_tokens_details" in usage:
        only["prompt_tokens_details"] = usage["prompt_tokens_details"]
    return only


def _ids(wishes: Wishes, of_prompt: Delta, delta: Delta) -> Json:
    given: Json = {}
    if wishes.token_ids and "token_ids" in delta:
        given["token_ids"] = [] if wishes.only_prompt else delta["token_ids"]
    if wishes.token_ids and "prompt_token_ids" in of_prompt:
        given["prompt_token_ids"] = of_prompt["prompt_token_ids"]
    return given


def _choice(text: str, delta: Delta) -> Json:
    return {
        "text": text,
        "logprobs": None,
        "finish_reason": delta.get("finish_reason"),
        "stop_reason": delta.get("stop_reason"),
        "matched_stop": delta.get("stop_reason"),
    }
