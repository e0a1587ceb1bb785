# SPDX-License-Identifier: Apache-2.0
"""Requests of the load test, with one function for each endpoint and kind of request.

Every request is greedy, so that it has exactly one correct answer. The answer is either known in
advance, or it is the first answer that the server gave to the same request.
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
        door: the endpoint: the OpenAI API, or the HTTP or gRPC endpoint of the Triton server.
        path: the path of the URL. For gRPC, the name of the model.
        body: the JSON body. For gRPC, the inputs by name. A string is sent as it is.
        expected: the expected answer of numbered tokens, if it is known.
        refused_with: the HTTP status with which the server must reject the request, or None.
        cancel_after_s: the client cancels the request after this time, or never if None.
        pause_s: the client waits for this time after each chunk that it reads.
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
        """Whether the answer is streamed."""
        return self.door != "openai" or (isinstance(self.body, dict) and "stream" in self.body)

    @property
    def key(self) -> str:
        """A text that is equal for two requests that must have the same answer."""
        return f"{self.door} {self.path} {json.dumps(self.body, sort_keys=True)}"

    def cancelled(self, after_s: float) -> "Ask":
        """Return this request from a client that cancels it after `after_s` seconds."""
        return replace(self, cancel_after_s=after_s)

    def read_slowly(self, pause_s: float) -> "Ask":
        """Return this request from a client that waits `pause_s` seconds after each chunk."""
        return replace(self, pause_s=pause_s)


def chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """Return a streamed chat completion; `ignore_eos=True` makes it exactly `max_tokens` long."""
    body = _chat_body(question, max_tokens, system) | _STREAMED | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def chat_at_once(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a chat completion that is not streamed."""
    body = _chat_body(question, max_tokens) | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def completion(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a streamed text completion."""
    body = {"prompt": question.text, **_limits(max_tokens), **_STREAMED, **fields}
    return Ask("openai", "/v1/completions", body, question.expected(max_tokens))


def generate_stream(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a streamed text completion through the HTTP endpoint of the Triton server."""
    body = {
        "text_input": question.text,
        "stream": True,
        "sampling_parameters": json.dumps(_limits(max_tokens) | fields),
    }
    path = f"/v2/models/{_LLM}/generate_stream"
    return Ask("triton", path, body, question.expected(max_tokens))


def grpc_chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """Return a chat completion through the gRPC endpoint of the Triton server."""
    body = _chat_body(question, max_tokens, system) | fields
    inputs = {"chat_request": json.dumps(body)}
    return Ask("grpc", _LLM, inputs, question.expected(max_tokens))


def grpc_text(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a text completion through the gRPC endpoint of the Triton server."""
    sampling = json.dumps(_limits(max_tokens) | fields)
    inputs = {"text_input": question.text, "sampling_parameters": sampling}
    return Ask("grpc", _LLM, inputs, question.expected(max_tokens))


def embedding(model: str, texts: list[str]) -> Ask:
    """Return a request for the embeddings of some texts."""
    return Ask("openai", "/v1/embeddings", {"model": model, "input": texts})


def rerank(model: str, query: str, documents: list[str]) -> Ask:
    """Return a request for the scores of some documents."""
    body = {"model": model, "query": query, "documents": documents}
    return Ask("openai", "/v1/rerank", body)


def bad(ask: Ask, status: int = 400, **fields: object) -> Ask:
    """Return a request with invalid fields, which the server must reject with `status`."""
    assert isinstance(ask.body, dict)
    return replace(ask, body=ask.body | fields, expected=None, refused_with=status)


_STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}


def _limits(max_tokens: int) -> Json:
    return {"max_tokens": max_tokens, "temperature": 0}


def _chat_body(question: Question, max_tokens: int, system: str = "") -> Json:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question.text})
    return {"messages": messages, **_limits(max_tokens)}
