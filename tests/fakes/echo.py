"""The echo model: a fake language model that repeats its prompt (or a chat's last message).

The model streams its output word by word. The responses have the format of Nereid's ensemble: they
are deltas with cumulative usage, and the last delta of each choice contains a finish reason. The
model supports `max_tokens`, stop strings, reasoning, tool calls, `n`, log-probabilities, token ids,
and errors with a code. Markup in the prompt controls the output:

    <think>why</think>                             send `why` as reasoning
    <tool_call>{"name": "f", "arguments": {}}</tool_call>
    <hold>one two</hold>                           send the text of all words with the last word
    <pause 0.05>                                   wait for this number of seconds
    <until /a/file>                                wait until this file exists
    <fail UNAVAILABLE the queue is full>           end with this error
    <vanish>                                       end without a finish reason

Each word is a token. The last word of choice i is " #i" (except for choice 0), and the tokens of
choice i have the log-probability `logprob_of(i)`.
"""

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MARKUP = re.compile(
    r"<think>(?P<think>.*?)</think>|<tool_call>(?P<call>.*?)</tool_call>|<hold>(?P<hold>.*?)</hold>"
    r"|<pause (?P<pause>[\d.]+)>|<until (?P<file>[^>]+)>"
    r"|<fail (?P<code>[A-Z_]+) (?P<message>[^>]*)>|(?P<vanish><vanish>)"
    r"|(?P<word>\s*[^\s<]+\s?|\s+|<)",
    re.DOTALL,
)
_WORD = re.compile(r"\s*\S+\s?|\s+")
VOCABULARY_SIZE = 50_000
_TOKEN_LIMIT = 1_000_000


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Failure:
    """An error that ends a request. The attribute `code` is the name of a gRPC status code."""

    code: str
    message: str


Deltas = list[dict[str, Any]]
"""One response of the model: at most one delta for each choice."""

Step = Deltas | Pause | Failure


def echo(
    *,
    text_input: str | None = None,
    input_ids: list[int] | None = None,
    chat_request: str | None = None,
    sampling_parameters: str | None = None,
) -> Iterator[Step]:
    """Yield the responses and pauses. If the request fails, the last item is a `Failure`.

    Each delta contains the raw text of the model as `text`.
    """
    if chat_request is not None:
        parameters = json.loads(chat_request)
        prompt = _text_of_last_message(parameters)
    else:
        parameters = json.loads(sampling_parameters or "{}")
        prompt = text_input if text_input is not None else " ".join(map(str, input_ids or ()))
    max_tokens = int(
        parameters.get("max_completion_tokens") or parameters.get("max_tokens") or _TOKEN_LIMIT
    )
    if max_tokens > _TOKEN_LIMIT:
        message = f"max_tokens: must be at most {_TOKEN_LIMIT}, got {max_tokens}"
        yield Failure("INVALID_ARGUMENT", message)
        return

    num_choices = parameters.get("n", 1)
    running = [Choice(prompt, max_tokens, parameters, i).steps() for i in range(num_choices)]
    while running:
        deltas: Deltas = []
        for choice in list(running):
            step = next(choice, None)
            if isinstance(step, Failure):
                yield step
                return
            if step is None:
                running.remove(choice)
            elif not isinstance(step, Pause):
                deltas.append(step)
            elif choice is running[0]:  # all choices pause at the same time, so wait only once
                yield step
        if deltas:
            yield deltas


def tokenize(text_input: str | None, chat_request: str | None) -> list[int]:
    """Return the token ids of a text, or of the last message of a chat."""
    text = _text_of_last_message(json.loads(chat_request)) if chat_request else text_input or ""
    return [token_id_of(word) for word in _WORD.findall(text)]


def token_id_of(word: str) -> int:
    return zlib.crc32(word.encode()) % VOCABULARY_SIZE


def logprob_of(index: int) -> float:
    """Return the log-probability of each token of a choice.

    Sorted from the most to the least likely, the first five choices are 0, 3, 1, 4, 2.
    """
    return -0.1 * (index * 2 % 5 + 1)


def _text_of_last_message(chat_request: dict[str, Any]) -> str:
    content: str | list[dict[str, Any]] = chat_request["messages"][-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type", "text") == "text")


@dataclass
class Choice:
    """One choice of a response, whose deltas are generated step by step.

    Attributes:
        num_tokens, num_reasoning_tokens: the numbers of tokens so far.
        text: the text so far, if it must be searched for stop strings.
        pending: the fields with token ids and log-probabilities that the next delta will contain.
        ending: the fields of the last delta. Without fields, there is no last delta.
    """

    prompt: str
    max_tokens: int
    parameters: dict[str, Any]
    index: int
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    text: str = ""
    pending: dict[str, Any] = field(default_factory=dict)
    ending: dict[str, Any] = field(default_factory=lambda: {"finish_reason": "stop"})

    def __post_init__(self) -> None:
        self.num_prompt_tokens = max(1, len(self.prompt.split()))
        stop = self.parameters.get("stop") or []
        self.stops: list[str] = [stop] if isinstance(stop, str) else stop

    def steps(self) -> Iterator[dict[str, Any] | Pause | Failure]:
        """Yield the deltas and pauses of the choice. If the choice fails, end with a `Failure`."""
        if self.index == 0:
            self._add_prompt_fields()
        for step in self._repeat_prompt():
            yield self._complete(step) if isinstance(step, dict) else step
        if self.ending:
            cumulative_logprob = logprob_of(self.index) * self.num_tokens
            yield self._complete({**self.ending, "cumulative_logprob": cumulative_logprob})

    def _repeat_prompt(self) -> Iterator[dict[str, Any] | Pause | Failure]:
        """Yield the prompt as deltas without `usage`, and do what its markup asks for."""
        num_calls = 0
        last_word = f" #{self.index}" if self.index else ""
        for match in _MARKUP.finditer(self.prompt + last_word):
            if match["pause"]:
                yield Pause(float(match["pause"]))
            elif match["file"]:
                while not Path(match["file"]).exists():
                    yield Pause(0.02)
            elif match["code"]:
                yield Failure(match["code"], match["message"])
                self.ending.clear()
                return
            elif match["vanish"]:
                self.ending.clear()
                return
            elif match["call"]:
                yield from _tool_call_deltas(match["call"], num_calls)
                num_calls += 1
                self.ending["finish_reason"] = "tool_calls"
            else:
                kind = "reasoning" if match["think"] else "content"
                text = match["think"] or match["hold"] or match["word"]
                yield from self._word_deltas(text, kind, is_held=bool(match["hold"]))
                if "stop_reason" in self.ending or self.ending["finish_reason"] == "length":
                    return

    def _word_deltas(self, text: str, kind: str, is_held: bool) -> Iterator[dict[str, Any]]:
        """Yield one delta for each word, until a stop string or the token limit is reached.

        `kind` is "content" or "reasoning". If `is_held` is true, the delta of the last word
        contains the whole text, and the other deltas contain no text.
        """
        words = _WORD.findall(text)
        for at, word in enumerate(words):
            self._record_token(word, kind)
            for stop in self.stops:
                if stop in self.text:
                    self.ending["stop_reason"] = stop
                    return
            if kind == "reasoning" and self.parameters.get("include_reasoning") is False:
                yield {"text": word}
            elif not is_held:
                yield {kind: word, "text": word}
            elif at == len(words) - 1:
                yield {kind: text, "text": text}
            else:
                yield {}
            if self.num_tokens >= self.max_tokens:
                self.ending["finish_reason"] = "length"
                return

    def _record_token(self, word: str, kind: str) -> None:
        """Count a token, and add its id and log-probabilities to the next delta if requested."""
        self.num_tokens += 1
        self.num_reasoning_tokens += kind == "reasoning"
        if self.stops:
            self.text += word
        # A chat has `logprobs: true` and `top_logprobs: 3`, a completion only `logprobs: 3`.
        logprobs = self.parameters.get("logprobs")
        if logprobs is not None and logprobs is not False:
            num_tops = self.parameters.get("top_logprobs", 0) if logprobs is True else logprobs
            chosen = _logprob_entry(word, logprob_of(self.index))
            others = [_logprob_entry(f"o{n}", -n) for n in range(1, 21)]
            entry = {**chosen, "rank": 1, "top_logprobs": [chosen, *others][:num_tops]}
            self.pending.setdefault("logprobs", []).append(entry)
        if self.parameters.get("return_token_ids"):
            self.pending.setdefault("token_ids", []).append(token_id_of(word))

    def _add_prompt_fields(self) -> None:
        """Add the token ids and log-probabilities of the prompt to the first delta."""
        words = _WORD.findall(self.prompt)
        if self.parameters.get("return_token_ids"):
            self.pending["prompt_token_ids"] = [token_id_of(word) for word in words]
        if self.parameters.get("prompt_logprobs") is not None:
            entries = [
                {str(token_id_of(word)): {"logprob": -0.5, "rank": 1, "decoded_token": word}}
                for word in words
            ]
            # The first token of a prompt has no log-probability.
            self.pending["prompt_logprobs"] = [None, *entries[1:]]

    def _complete(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a delta with the pending fields, the cumulative usage and the choice's index."""
        pending, self.pending = self.pending, {}
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }
        index = {"index": self.index} if self.index else {}
        return {**index, **delta, **pending, "usage": usage}


def _logprob_entry(word: str, logprob: float) -> dict[str, Any]:
    return {
        "token": word,
        "token_id": token_id_of(word),
        "logprob": logprob,
        "bytes": list(word.encode()),
    }


def _tool_call_deltas(text: str, index: int) -> Iterator[dict[str, Any]]:
    """Yield a delta with the name of a tool call, and two deltas with its arguments."""
    call = json.loads(text)
    arguments = json.dumps(call["arguments"])
    middle = len(arguments) // 2
    opened = {"index": index, "id": f"call_{index}", "name": call["name"], "arguments": ""}
    yield {"tool_calls": [opened], "text": text}
    for piece in (arguments[:middle], arguments[middle:]):
        yield {"tool_calls": [{"index": index, "arguments": piece}]}
