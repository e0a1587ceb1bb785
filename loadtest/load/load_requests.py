"""Requests of the load test, with one function for each endpoint and kind of request.

Every request is greedy, so that it has exactly one correct answer. The answer is either known in
advance, or it is the first answer that the server gave to the same request.
"""

import json
from dataclasses import replace

from loadtest.client import ask as asks
from loadtest.client.ask import Ask, Json
from loadtest.load.prompts import Question

_LLM = "llm"


def chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """Return a request for a streamed chat completion.

    With `ignore_eos=True`, the answer has exactly `max_tokens` tokens.
    """
    body = _chat_body(question, max_tokens, system) | _STREAMED | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def chat_at_once(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a request for a chat completion that is not streamed."""
    body = _chat_body(question, max_tokens) | fields
    return Ask("openai", "/v1/chat/completions", body, question.expected(max_tokens))


def completion(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a request for a streamed text completion."""
    body = {"prompt": question.text, **_limits(max_tokens), **_STREAMED, **fields}
    return Ask("openai", "/v1/completions", body, question.expected(max_tokens))


def generate_stream(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a request for a streamed text completion at the HTTP endpoint of the Triton server."""
    ask = asks.generate_stream(question.text, _limits(max_tokens) | fields)
    return replace(ask, expected=question.expected(max_tokens))


def grpc_chat(question: Question, max_tokens: int, *, system: str = "", **fields: object) -> Ask:
    """Return a request for a chat completion at the gRPC endpoint of the Triton server."""
    body = _chat_body(question, max_tokens, system) | fields
    inputs = {"chat_request": json.dumps(body)}
    return Ask("grpc", _LLM, inputs, question.expected(max_tokens))


def grpc_text(question: Question, max_tokens: int, **fields: object) -> Ask:
    """Return a request for a text completion at the gRPC endpoint of the Triton server."""
    ask = asks.grpc_stream(question.text, _limits(max_tokens) | fields)
    return replace(ask, expected=question.expected(max_tokens))


def embedding(model: str, texts: list[str]) -> Ask:
    """Return a request for the embeddings of some texts."""
    return Ask("openai", "/v1/embeddings", {"model": model, "input": texts})


def rerank(model: str, query: str, documents: list[str]) -> Ask:
    """Return a request for the scores of some documents."""
    body = {"model": model, "query": query, "documents": documents}
    return Ask("openai", "/v1/rerank", body)


def bad(ask: Ask, status: int = 400, **fields: object) -> Ask:
    """Return a request with invalid fields. The server must reject the request with `status`."""
    assert isinstance(ask.body, dict)
    return replace(ask, body=ask.body | fields, expected=None, refused_with=status)


_STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}


def _limits(max_tokens: int) -> Json:
    return {"max_tokens": max_tokens, "temperature": 0}


def _chat_body(question: Question, max_tokens: int, system: str = "") -> Json:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question.text})
    return {"messages": messages, **_limits(max_tokens)}
