"""Requests of all kinds, and an asynchronous client that compares answers with expected answers.

All requests use temperature 0, so each request has one correct answer. The tests send each request
once to an idle server. Every later answer to the request must be equal, even if other requests run
at the same time.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.client.ask import Ask, Json, generate_stream
from loadtest.client.grpc_client import GrpcEndpoint
from loadtest.client.http_client import HttpEndpoint
from loadtest.client.reply import TOLERANCE, Reply

Kind = Literal["ok", "cancelled", "refused", "failed", "lost", "wrong", "hung"]

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PET_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "turtle"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WEATHER_TOOL: Json = {
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
QUESTIONS = (
    "Hello! Who are you?",
    "Where does Hugo live?",
    "What is the weather in Paris?",
    "Tell me a story about a turtle.",
    "What is 3 + 4?",
    "Say the days of the week.",
)
_MAX_RUNNING_REQUESTS = 64


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request.

    Attributes:
        ask: the request.
        reply: the reply, as far as it was read.
        kind: `refused` for status 429 or 503, `failed` for another error, `lost` for a broken
            connection, and `wrong` for an answer that differs from the expected one.
        detail: a description of the error; empty if there is none.
    """

    ask: Ask
    reply: Reply
    kind: Kind
    detail: str = ""


class Asker:
    """A client that sends requests to one server. Each running request has a thread.

    Args:
        openai_url: the base URL of the frontend, without /v1.
        triton_url: the base URL of the Triton server's HTTP endpoint.
        grpc_url: host:port of the Triton server's gRPC endpoint, if any request needs it.
        limit_s: the time limit of a request in seconds.
    """

    def __init__(
        self, openai_url: str, triton_url: str, grpc_url: str = "", limit_s: float = 60.0
    ) -> None:
        self._grpc = GrpcEndpoint(grpc_url, limit_s)
        self._senders: dict[str, Callable[[Ask], Reply]] = {
            "openai": HttpEndpoint(openai_url, limit_s).send,
            "triton": HttpEndpoint(triton_url, limit_s).send,
            "grpc": self._grpc.send,
        }
        self._threads = ThreadPoolExecutor(_MAX_RUNNING_REQUESTS)

    async def hang_up(self) -> None:
        """Close the idle connections, because each of them is a file descriptor of the server."""
        await asyncio.to_thread(self._grpc.close)

    async def close(self) -> None:
        """Close the connections."""
        await self.hang_up()
        self._threads.shutdown(wait=False)

    async def ask(self, ask: Ask, expected: str | None = None) -> Outcome:
        """Send a request, and return its outcome.

        Args:
            ask: the request.
            expected: the correct answer in the form of `Reply.answer`, or None to accept any.
        """
        send = self._senders[ask.endpoint]
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, send, ask)
        return _outcome(ask, reply, expected)


def _outcome(ask: Ask, reply: Reply, expected: str | None) -> Outcome:
    """Return the outcome of a request by its reply and the correct answer, if that is known."""
    if reply.end in ("cancelled", "hung"):
        return Outcome(ask, reply, reply.end)
    if reply.end == "broken":
        return Outcome(ask, reply, "lost", reply.error)
    if reply.error or reply.status != 200:
        kind: Kind = "refused" if reply.is_refused else "failed"
        return Outcome(ask, reply, kind, f"{reply.status} {reply.error}")
    if reply.numbers is None and not reply.finish_reasons:
        return Outcome(ask, reply, "failed", "the stream ended without a finish reason")
    if expected is not None and not _is_same(json.loads(reply.answer), json.loads(expected)):
        detail = f"expected the answer {expected}, got {reply.answer}"
        return Outcome(ask, reply, "wrong", detail)
    return Outcome(ask, reply, "ok")


def _is_same(answer: Any, expected: Any) -> bool:  # noqa: ANN401 - text channels or numbers
    """Return whether two answers are equal, apart from the rounding of float32 numbers."""
    if not isinstance(answer, list):
        return bool(answer == expected)
    return len(answer) == len(expected) and all(
        abs(a - b) < TOLERANCE for a, b in zip(answer, expected, strict=True)
    )


def asks(rng: random.Random, model: str, pooling_models: Mapping[str, str]) -> list[Ask]:
    """Return a set of different requests, each of which has one correct answer.

    Args:
        rng: the source of the random lengths.
        model: the name of the language model.
        pooling_models: the names of the models for the kinds "embedding" and "rerank".
    """
    return [ask for question in QUESTIONS for ask in _asks(question, rng, model, pooling_models)]


def _asks(
    question: str, rng: random.Random, model: str, pooling_models: Mapping[str, str]
) -> Iterator[Ask]:
    """Yield requests of all kinds about one question; see `asks`."""
    messages = [{"role": "user", "content": question}]
    chat: Json = {"model": model, "messages": messages, "temperature": 0, "stream": True}
    long_answer = {"max_tokens": rng.choice((40, 80, 160)), "ignore_eos": True}
    yield _openai("chat", CHATS, chat | long_answer)
    yield _openai("whole chat", CHATS, chat | {"stream": False})
    completion = {"model": model, "prompt": question, "temperature": 0, "max_tokens": 32}
    yield _openai("completion", COMPLETIONS, completion | {"stream": True})
    yield _openai("structured", CHATS, chat | structured() | {"max_tokens": 80})
    tools = {"tools": [WEATHER_TOOL], "tool_choice": "required", "max_tokens": 80}
    yield _openai("tools", CHATS, chat | tools)
    fields = {"temperature": 0, "max_tokens": rng.choice((20, 60)), "ignore_eos": True}
    yield generate_stream(question, fields)
    if embedding_model := pooling_models.get("embedding"):
        texts = [question, question[::-1]]
        yield _openai("embedding", "/v1/embeddings", {"model": embedding_model, "input": texts})
    if rerank_model := pooling_models.get("rerank"):
        ranking = {"query": question, "documents": list(QUESTIONS[:3])}
        yield _openai("rerank", "/v1/rerank", {"model": rerank_model} | ranking)


def structured() -> Json:
    """Return the fields of a chat whose answer must match the schema of a pet."""
    schema = {"name": "pet", "schema": PET_SCHEMA, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _openai(kind: str, path: str, body: Json) -> Ask:
    return Ask("openai", path, body, kind=kind)
