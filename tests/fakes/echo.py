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
        body = json.loads(chat_request)
        prompt = _text(body["messages"][-1].get("content") or "")
        parameters = body
    else:
        prompt = text_input if text_input is not None else " ".join(map(str, input_ids or ()))
        parameters = json.loads(sampling_parameters or "{}")
    limit = int(
        parameters.get("max_completion_tokens") or parameters.get("max_tokens") or 1_000_000
    )
    if limit > 1_000_000:
        yield Failure("INVALID_ARGUMENT", f"max_tokens: must be at most 1000000, got {limit}")
        return
    answers = [
        Answer(prompt, limit, parameters, index).steps() for index in range(parameters.get("n", 1))
    ]
    while answers:
        responses: Deltas = []
        for answer in list(answers):
            step = next(answer, None)
            if isinstance(step, Failure):
                yield step
                return
            if step is None:
                answers.remove(answer)
            elif not isinstance(step, Pause):
                responses.append(step)
            elif answer is answers[0]:
                yield step
        if responses:
            yield responses


def tokenize(text_input: str | None, chat_request: str | None) -> list[int]:
    """Return the token ids of a text, or of the last message of a chat."""
    text = text_input or ""
    if chat_request is not None:
        text = _text(json.loads(chat_request)["messages"][-1].get("content") or "")
    return [token_id_of(word) for word in _WORD.findall(text)]


def token_id_of(word: str) -> int:
    return zlib.crc32(word.encode()) % 50_000


def logprob_of(index: int) -> float:
    """Return the log-probability of each token of a choice.

    Sorted from the most to the least likely, the first five choices are 0, 3, 1, 4, 2.
    """
    return -0.1 * (index * 2 % 5 + 1)


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type", "text") == "text")


@dataclass
class Answer:
    """One choice of a response, whose deltas are generated step by step."""

    prompt: str
    limit: int
    parameters: dict[str, Any]
    index: int
    num_tokens: int = 0
    num_reasoning: int = 0
    said: str = ""
    news: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = max(1, len(self.prompt.split()))

    def steps(self) -> Iterator[dict[str, Any] | Pause | Failure]:
        self._open()
        ending: dict[str, Any] = {"finish_reason": "stop"}
        for step in self._walk(ending):
            yield self._delta(step) if isinstance(step, dict) else step
        if ending:
            yield self._delta({**ending, "cumulative_logprob": self._logprob * self.num_tokens})

    @property
    def stops(self) -> list[str]:
        stops: str | list[str] = self.parameters.get("stop") or []
        return [stops] if isinstance(stops, str) else stops

    @property
    def _logprob(self) -> float:
        return logprob_of(self.index)

    def _walk(self, ending: dict[str, Any]) -> Iterator[dict[str, Any] | Pause | Failure]:
        calls = 0
        own = f" #{self.index}" if self.index else ""
        for match in _MARKUP.finditer(self.prompt + own):
            if match["pause"]:
                yield Pause(float(match["pause"]))
            elif match["file"]:
                while not Path(match["file"]).exists():
                    yield Pause(0.02)
            elif match["code"]:
                yield Failure(match["code"], match["message"])
                ending.clear()
                return
            elif match["vanish"]:
                ending.clear()
                return
            elif match["call"]:
                yield from _call(match["call"], calls)
                calls += 1
                ending["finish_reason"] = "tool_calls"
            else:
                kind = "reasoning" if match["think"] else "content"
                text = match["think"] or match["hold"] or match["word"]
                yield from self._words(text, kind, bool(match["hold"]), ending)
                if "stop_reason" in ending or ending["finish_reason"] == "length":
                    return

    def _words(
        self, text: str, kind: str, is_held: bool, ending: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        words = _WORD.findall(text)
        for at, word in enumerate(words):
            self._token(word, kind)
            for stop in self.stops:
                if stop in self.said:
                    ending["stop_reason"] = stop
                    return
            if kind == "reasoning" and self.parameters.get("include_reasoning") is False:
                yield {"text": word}
            elif not is_held:
                yield {kind: word, "text": word}
            elif at == len(words) - 1:
                yield {kind: text, "text": text}
            else:
                yield {}
            if self.num_tokens >= self.limit:
                ending["finish_reason"] = "length"
                return

    def _token(self, word: str, kind: str) -> None:
        self.num_tokens += 1
        self.num_reasoning += kind == "reasoning"
        if self.stops:
            self.said += word
        wanted = self.parameters.get("logprobs")
        if wanted is not None and wanted is not False:
            number = self.parameters.get("top_logprobs", 0) if wanted is True else wanted
            tops = [_entry(word, self._logprob), *(_entry(f"o{n}", -n) for n in range(1, 21))]
            entry = {**_entry(word, self._logprob), "rank": 1, "top_logprobs": tops[:number]}
            self.news.setdefault("logprobs", []).append(entry)
        if self.parameters.get("return_token_ids"):
            self.news.setdefault("token_ids", []).append(token_id_of(word))

    def _open(self) -> None:
        """Add the token ids and log-probabilities of the prompt to the first delta of choice 0."""
        if self.index:
            return
        words = _WORD.findall(self.prompt)
        ids = [token_id_of(word) for word in words]
        if self.parameters.get("return_token_ids"):
            self.news["prompt_token_ids"] = ids
        if self.parameters.get("prompt_logprobs") is not None:
            facts = [
                {str(i): {"logprob": -0.5, "rank": 1, "decoded_token": word}}
                for i, word in zip(ids, words, strict=True)
            ]
            self.news["prompt_logprobs"] = [None, *facts[1:]]

    def _delta(self, step: dict[str, Any]) -> dict[str, Any]:
        news, self.news = self.news, {}
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }
        index = {"index": self.index} if self.index else {}
        return {**index, **step, **news, "usage": usage}


def _entry(word: str, logprob: float) -> dict[str, Any]:
    return {
        "token": word,
        "token_id": token_id_of(word),
        "logprob": logprob,
        "bytes": list(word.encode()),
    }


def _call(text: str, index: int) -> Iterator[dict[str, Any]]:
    call = json.loads(text)
    arguments = json.dumps(call["arguments"])
    middle = len(arguments) // 2
    opened = {"index": index, "id": f"call_{index}", "name": call["name"], "arguments": ""}
    yield {"tool_calls": [opened], "text": text}
    for piece in (arguments[:middle], arguments[middle:]):
        yield {"tool_calls": [{"index": index, "arguments": piece}]}
