# SPDX-License-Identifier: Apache-2.0
"""Requests, one function for each door and kind.

Every request is greedy, so that it has one right answer: the one its question knows, or else the
first one that was given to it.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from loadtest.load.prompts import Expected, Question

Json = dict[str, Any]
Door = Literal["openai", "triton", "grpc"]

_LLM = "llm"


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        door: where it goes: the OpenAI API, the Triton server's HTTP door, or its gRPC door.
        path: of the URL; over gRPC the model's name.
        body: JSON; over gRPC the inputs by name, see grpc_door. A string is sent as it is.
        expected: the answer, where it is known; numbered tokens.
        refused_with: the status of the refusal that it must get; None for an answer.
        cancel_after_s: its client goes away then; None stays to the end.
        pause_s: its client waits so long after each piece that it reads.
    """

    door: Door
    path: str
    body: Json | str
    expected: Expected | None = None
    refused_with: int | None = None
    cancel_after_s: float | None = None
    pause_s: float = 0.0

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.door != "openai" or (isinstance(self.body, dict) and "stream" in self.body)

    @property
    def key(self) -> str:
        """The same for two requests of which the answers must be the same."""
        return f"{self.door} {self.path} {json.dumps(self.body, sort_keys=True)}"

    def cancelled(self, after_s: float) -> "Ask":
        """The same from a client that goes away."""
        return replace(self, cancel_after_s=after_s)

    def read_slowly(self, pause_s: float) -> "Ask":
        """The same from a client that takes its time."""
        return replace(self, pause_s=pause_s)


def chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """A chat completion, streamed; `ignore_eos=True` makes it exactly `max_tokens` long."""
    body = _chat_body(question, max_tokens, system) | _STREAMED | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def chat_at_once(question: Question, max_tokens: int, **fields: object) -> Ask:
    """A chat completion in one piece."""
    body = _chat_body(question, max_tokens) | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def completion(question: Question, max_tokens: int, **fields: object) -> Ask:
    """A text that is continued, streamed."""
    body = {"prompt": question.text, **_limits(max_tokens), **_STREAMED, **fields}
    return Ask("openai", "/v1/completions", body, question.expected(max_tokens))


def generate_stream(question: Question, max_tokens: int, **fields: object) -> Ask:
    """The same at the Triton server's HTTP door."""
    body = {
        "text_input": question.text,
        "stream": True,
        "sampling_parameters": json.dumps(_limits(max_tokens) | fields),
    }
    path = f"/v2/models/{_LLM}/generate_stream"
    return Ask("triton", path, body, question.expected(max_tokens))


def grpc_chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """A chat on the ensemble, over gRPC."""
    body = _chat_body(question, max_tokens, system) | fields
    inputs = {"chat_request": json.dumps(body)}
    return Ask("grpc", _LLM, inputs, question.expected(max_tokens))


def grpc_text(question: Question, max_tokens: int, **fields: object) -> Ask:
    """A text that the ensemble continues, over gRPC."""
    sampling = json.dumps(_limits(max_tokens) | fields)
    inputs = {"text_input": question.text, "sampling_parameters": sampling}
    return Ask("grpc", _LLM, inputs, question.expected(max_tokens))


def embedding(model: str, texts: list[str]) -> Ask:
    """A vector for each text."""
    return Ask("openai", "/v1/embeddings", {"model": model, "input": texts})


def rerank(model: str, query: str, documents: list[str]) -> Ask:
    """A score for each document."""
    body = {"model": model, "query": query, "documents": documents}
    return Ask("openai", "/v1/rerank", body)


def bad(ask: Ask, status: int = 400, **fields: object) -> Ask:
    """An ask with fields that must be refused."""
    assert isinstance(ask.body, dict)
    return replace(ask, body=ask.body | fields, expected=None, refused_with=status)


_STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}


def _limits(max_tokens: int) -> Json:
    return {"max_tokens": max_tokens, "temperature": 0}


def _chat_body(question: Question, max_tokens: int, system: str = "") -> Json:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question.text})
    return {"messages": messages, **_limits(max_tokens)}
