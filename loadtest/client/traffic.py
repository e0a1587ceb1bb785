# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds, and a client that checks the answers, cancels requests, and reads slowly.

All requests use temperature 0, so each request has one correct answer. The tests send each request
once to an idle server. Every later answer must be equal, whatever other requests run.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from loadtest.client.cancellable_stream import GrpcEndpoint

Json = dict[str, Any]
Door = Literal["openai", "http", "grpc"]
Kind = Literal["ok", "cancelled", "refused", "failed", "lost", "wrong", "hung"]

_TOLERANCE = 1e-3
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "turtle"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Pinemark", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_QUESTIONS = (
    "Hello! Who are you?",
    "Where does Hugo live?",
    "What is the weather in Paris?",
    "Tell me a story about a turtle.",
    "What is 3 + 4?",
    "Say the days of the week.",
)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: the name in the report.
        path: the path of the URL; empty for gRPC.
        body: the JSON body. For gRPC, the body that `generate_stream` would accept.
        door: the endpoint: the frontend, or the HTTP or gRPC endpoint of the Triton server.
    """

    kind: str
    path: str
    body: Json
    door: Door = "openai"

    @property
    def is_direct(self) -> bool:
        """Whether the request goes to an endpoint of the Triton server."""
        return self.door != "openai"

    @property
    def key(self) -> str:
        """A text by which the expected answer is found. It is equal with and without streaming."""
        body = {k: v for k, v in self.body.items() if k not in ("stream", "stream_options")}
        return f"{self.path} {json.dumps(body, sort_keys=True)}"

    @property
    def is_stream(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.body.get("stream"))


@dataclass
class Outcome:
    """The outcome of a request. Times are from time.monotonic.

    Attributes:
        ask: the request.
        kind: `refused` for status 429 or 503, `failed` for another error, `lost` for a
            broken connection, and `wrong` for an answer that differs from the expected one.
        started: the time of sending.
        ended: the time of the end.
        detail: the error, as text.
        answer: the text of the answer.
        first: the seconds from the start to the first event, or None.
        gaps: the seconds between events.
        is_cut: whether the client cancelled the request after a number of events.
    """

    ask: Ask
    kind: Kind
    started: float
    ended: float
    detail: str = ""
    answer: str = ""
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    is_cut: bool = False


def asks(rng: random.Random, model: str, poolers: dict[str, str]) -> list[Ask]:
    """Return a set of different requests, each of which has one correct answer.

    Args:
        rng: the source of the random lengths.
        model: the name of the language model.
        poolers: the names of the models for the kinds "embedding" and "rerank".
    """
    made = []
    for question in _QUESTIONS:
        messages = [{"role": "user", "content": question}]
        chat = {"model": model, "messages": messages, "temperature": 0, "stream": True}
        long = {"max_tokens": rng.choice((40, 80, 160)), "ignore_eos": True}
        made.append(Ask("chat", "/v1/chat/completions", chat | long))
        made.append(Ask("whole chat", "/v1/chat/completions", chat | {"stream": False}))
        plain = {"model": model, "prompt": question, "temperature": 0, "max_tokens": 32}
        made.append(Ask("completion", "/v1/completions", plain | {"stream": True}))
        made.append(Ask("structured", "/v1/chat/completions", chat | _structured()))
        made.append(Ask("tools", "/v1/chat/completions", chat | _tools()))
        made.append(_direct(question, rng.choice((20, 60))))
        if "embedding" in poolers:
            body = {"model": poolers["embedding"], "input": [question, question[::-1]]}
            made.append(Ask("embedding", "/v1/embeddings", body))
        if "rerank" in poolers:
            texts = {"query": question, "documents": list(_QUESTIONS[:3])}
            made.append(Ask("rerank", "/v1/rerank", {"model": poolers["rerank"], **texts}))
    return made


def _structured() -> Json:
    schema = {"name": "pet", "schema": _SCHEMA, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 80}


def _tools() -> Json:
    return {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 80}


def _direct(question: str, max_tokens: int) -> Ask:
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return generate_stream("generate_stream", question, fields)


def generate_stream(kind: str, prompt: str, fields: Json) -> Ask:
    """Return a stream through the Triton server's HTTP endpoint."""
    path = "/v2/models/llm/generate_stream"
    return Ask(kind, path, _direct_body(prompt, fields), "http")


def grpc_stream(kind: str, prompt: str, fields: Json) -> Ask:
    """Return a stream through the Triton server's gRPC endpoint."""
    return Ask(kind, "", _direct_body(prompt, fields), "grpc")


def _direct_body(prompt: str, fields: Json) -> Json:
    return {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(fields)}


@dataclass(frozen=True)
class Manner:
    """The behaviour of a client.

    Attributes:
        cancel_after_s: the client cancels after this time, or never if None.
        cancel_after_events: the client cancels after this number of events, or never if None.
        pause_s: the client waits for this time after each event.
    """

    cancel_after_s: float | None = None
    cancel_after_events: int | None = None
    pause_s: float = 0.0


_PATIENT = Manner()


class Asker:
    """A client that sends requests to one server.

    Args:
        openai_url: the base URL of the frontend, without /v1.
        triton_url: the base URL of the Triton server's HTTP endpoint.
        limit_s: the time limit of a request in seconds.
        make_grpc: a function that creates a client of the gRPC endpoint, if requests need one.
    """

    def __init__(
        self,
        openai_url: str,
        triton_url: str,
        limit_s: float = 60.0,
        make_grpc: Callable[[], GrpcEndpoint] | None = None,
    ) -> None:
        self._urls = {"openai": openai_url, "http": triton_url}
        self._make_grpc = make_grpc
        self._limit_s = limit_s
        self._client = _http_client()
        self._grpc: GrpcEndpoint | None = None

    async def hang_up(self) -> None:
        """Close the idle connections, because each of them is a file descriptor of the server."""
        await self.close()
        self._client = _http_client()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if self._grpc is not None:
            await self._grpc.close()
        self._grpc = None

    async def ask(
        self, ask: Ask, manner: Manner = _PATIENT, expected: str | None = None
    ) -> Outcome:
        """Send a request and return its outcome; an answer other than `expected` is wrong."""
        outcome = Outcome(ask, "ok", time.monotonic(), 0.0)
        limit_s = min(self._limit_s, manner.cancel_after_s or self._limit_s)
        try:
            async with asyncio.timeout(limit_s) as running:
                await self._run(outcome, manner)
        except TimeoutError:
            if not running.expired():
                raise
            outcome.kind = "hung" if manner.cancel_after_s is None else "cancelled"
        except (httpx.HTTPError, ConnectionError) as error:
            outcome.kind, outcome.detail = "lost", f"{error} ({_chain(error)})"
        outcome.ended = time.monotonic()
        if outcome.is_cut:
            outcome.kind = "cancelled"
        elif outcome.kind == "ok" and expected is not None and not _same(outcome, expected):
            outcome.kind = "wrong"
            outcome.detail = f"expected the answer {expected!r}, got {outcome.answer!r}"
        return outcome

    async def _run(self, outcome: Outcome, manner: Manner) -> None:
        ask = outcome.ask
        if ask.door == "grpc":
            if self._grpc is None:
                assert self._make_grpc is not None
                self._grpc = self._make_grpc()
            async with aclosing(self._grpc.events(ask.body)) as events:
                await _read(outcome, events, manner)
            return
        url = self._urls[ask.door] + ask.path
        async with self._client.stream("POST", url, json=ask.body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.kind = "refused" if response.status_code in (429, 503) else "failed"
                outcome.detail = f"{response.status_code} {response.text[:300]}"
                return
            if not ask.is_stream:
                await response.aread()
                outcome.first = time.monotonic() - outcome.started
                outcome.answer = _whole(ask, response.json())
                return
            await _read(outcome, _events(response), manner)


def _chain(error: BaseException) -> str:
    """Return the types of an error and its causes; the last one shows which side disconnected."""
    names = []
    at: BaseException | None = error
    while at is not None:
        names.append(type(at).__name__)
        at = at.__cause__ or at.__context__
    return " from ".join(names)


def _http_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


async def _read(outcome: Outcome, events: AsyncIterator[Json], manner: Manner) -> None:
    text = _StreamText()
    last = outcome.started
    count = 0
    async for event in events:
        now = time.monotonic()
        if outcome.first is None:
            outcome.first = now - outcome.started
        else:
            outcome.gaps.append(now - last)
        last = now
        if "error" in event:
            outcome.kind, outcome.detail = "failed", json.dumps(event["error"])[:300]
            return
        text.add(event)
        count += 1
        if manner.cancel_after_events == count and not text.has_ended:
            outcome.is_cut = True
            return
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
    outcome.answer = text.text()
    if not text.has_ended and not outcome.ask.is_direct:
        outcome.kind, outcome.detail = "failed", "the stream ended without a finish reason"


def _same(outcome: Outcome, expected: str) -> bool:
    """Return whether the answer is the expected one, apart from rounding of float32 numbers."""
    if outcome.ask.kind not in ("embedding", "rerank"):
        return outcome.answer == expected
    numbers, others = json.loads(outcome.answer), json.loads(expected)
    return len(numbers) == len(others) and all(
        abs(a - b) < _TOLERANCE for a, b in zip(numbers, others, strict=True)
    )


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


class _StreamText:
    """The text that a stream has sent so far, for each choice."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self.has_ended = False

    def add(self, event: Json) -> None:
        if "text_output" in event:
            self._choice(0).content.append(event["text_output"])
            return
        for choice in event["choices"]:
            one = self._choice(choice.get("index", 0))
            delta = choice.get("delta", choice)
            one.content.append(delta.get("content") or delta.get("text") or "")
            one.reasoning.append(delta.get("reasoning") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                pieces = one.calls.setdefault(call["index"], [])
                pieces += [function.get("name", ""), function.get("arguments", "")]
            self.has_ended |= bool(choice.get("finish_reason"))

    def text(self) -> str:
        return "\x1e".join(self._choices[index].text() for index in sorted(self._choices))

    def _choice(self, index: int) -> "_Choice":
        return self._choices.setdefault(index, _Choice())


@dataclass
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        calls = ["".join(self.calls[index]) for index in sorted(self.calls)]
        return "\x1f".join(["".join(self.reasoning), "".join(self.content), *calls])


def _whole(ask: Ask, answer: Json) -> str:
    """Return the text of an answer that is not streamed, in the same form as that of a stream."""
    if ask.kind == "embedding":
        return json.dumps([number for row in answer["data"] for number in row["embedding"]])
    if ask.kind == "rerank":
        rows = sorted(answer["results"], key=lambda row: row["index"])
        return json.dumps([row["relevance_score"] for row in rows])
    text = _StreamText()
    for choice in answer["choices"]:
        message = choice.get("message") or {"text": choice["text"]}
        calls = [dict(call, index=at) for at, call in enumerate(message.get("tool_calls") or ())]
        text.add(
            {"choices": [{"index": choice["index"], "delta": message | {"tool_calls": calls}}]}
        )
    return text.text()
