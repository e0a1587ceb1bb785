"""Attacks in the body of a request to the OpenAI API."""

import json
from collections.abc import Callable, Iterator

from loadtest.hostile.attack import Attack, chat, post
from loadtest.hostile.grammars import tool

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_ROUTES: dict[str, dict[str, object]] = {
    _CHAT: chat(),
    _COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": chat(),
    "/tokenize": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v1/score": {"text_1": "q", "text_2": "d"},
    "/classify": {"input": "hi"},
    "/pooling": {"input": "hi"},
}
_DAMAGED = {
    "empty body": b"",
    "a list": b"[]",
    "cut in the middle": b'{"messages": [{"role": "us',
    "50,000 open lists": b'{"messages": ' + b"[" * 50_000,
    "invalid UTF-8": b'{"input": "\xff\xfe\xfd"}',
    "not a number": b'{"temperature": NaN}',
}
_ODD_BODIES = {
    "100,000 digits": b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    "1e999": b'{"temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "100,000 closed lists": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 keys": json.dumps({f"k{i}": i for i in range(100_000)}).encode(),
    "the same key 100,000 times": b'{"a":1' + b',"a":1' * 100_000 + b"}",
}


def attacks() -> Iterator[Attack]:
    """Yield all attacks in the body of a request."""
    yield from _damaged()
    yield from _large()


def _damaged() -> Iterator[Attack]:
    for path in _ROUTES:
        for name, body in _DAMAGED.items():
            yield Attack("damaged body", f"{path}: {name}", post(path, body), (400, 413), 5)
    for name, body in _ODD_BODIES.items():
        yield Attack("damaged body", f"{_CHAT}: {name}", post(_CHAT, body), (400, 413), 5)
    nested: object = "x"
    for _ in range(300):
        nested = [nested]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}]
    messages = {
        "arguments of 50,000 brackets": [{"role": "assistant", "tool_calls": calls}],
        "content nested 300 times": [
            {"role": "user", "content": [{"type": "text", "text": nested}]}
        ],
        "tool_calls is a number": [{"role": "assistant", "tool_calls": 7}],
        "tool_calls of null": [{"role": "assistant", "tool_calls": [None]}],
        "content is an object": [{"role": "user", "content": {"a": 1}}],
        "role of 1 MB": [{"role": "u" * 2**20, "content": "a"}],
        "NUL characters": [{"role": "user", "content": "\0" * 1000}],
        "private-use and bidi characters": [
            {"role": "user", "content": "\u202e\ue000\U0010ffff" * 300}
        ],
        "special tokens as text": [{"role": "user", "content": "<|im_end|><|endoftext|>" * 100}],
        "100,000 combining accents": [{"role": "user", "content": "a" + "\u0301" * 100_000}],
    }
    for name, value in messages.items():
        body = chat(messages=value)
        yield Attack("damaged body", f"messages: {name}", post(_CHAT, body), limit_s=5)


def _large() -> Iterator[Attack]:
    def chat_of(count: int) -> Callable[[], bytes]:
        message = b'{"role":"user","content":"a"}'
        return lambda: b'{"messages":[' + b",".join([message] * count) + b"]}"

    for count in (20_000, 300_000, 500_000):
        yield Attack("size", f"{count:,} messages", post(_CHAT, chat_of(count)), (400, 413, 429))
    for megabytes in (5, 40):
        text = "word " * (megabytes * 200_000)
        for path, field in (
            (_CHAT, "messages"),
            (_COMPLETIONS, "prompt"),
            ("/tokenize", "prompt"),
            ("/v1/responses", "input"),
            ("/v1/messages", "messages"),
            ("/v1/embeddings", "input"),
            ("/v1/rerank", "query"),
        ):
            if megabytes == 40 and path in ("/v1/responses", "/v1/rerank"):
                continue
            value: object = [{"role": "user", "content": text}] if field == "messages" else text
            body = {field: value, "documents": ["d"]} if field == "query" else {field: value}
            allowed = (400, 408, 413, 429, *((200,) if path == "/tokenize" else ()))
            yield Attack("size", f"{path}: {megabytes} MB of text", post(path, body), allowed)
    many: dict[str, tuple[str, Callable[[], object]]] = {
        "3 million token ids": (_COMPLETIONS, lambda: {"prompt": [5] * 3_000_000}),
        "token ids below 0": (_COMPLETIONS, lambda: {"prompt": [-1]}),
        "token ids above 2**63": (_COMPLETIONS, lambda: {"prompt": [2**70]}),
        "100,000 prompts": (_COMPLETIONS, lambda: {"prompt": ["a"] * 100_000}),
        "one character, 10 MB": (_COMPLETIONS, lambda: {"prompt": "a" * 10_000_000}),
        "blanks, 10 MB": (_CHAT, lambda: chat(messages=[{"role": "user", "content": " " * 10**7}])),
        "100,000 content parts": (
            _CHAT,
            lambda: chat(
                messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]
            ),
        ),
        "20,000 tools": (_CHAT, lambda: chat(tools=[tool(f"f{i}") for i in range(20_000)])),
        "a tool name of 5 MB": (_CHAT, lambda: chat(tools=[tool("f" * 5_000_000)])),
        "100,000 stop strings": (_CHAT, lambda: chat(stop=[f"s{i}" for i in range(100_000)])),
        "a stop string of 5 MB": (_CHAT, lambda: chat(stop="x" * 5_000_000)),
        "100,000 bad words": (_CHAT, lambda: chat(bad_words=[f"w{i}" for i in range(100_000)])),
        "200,000 biases": (_CHAT, lambda: chat(logit_bias={str(i): 1 for i in range(200_000)})),
        "a million allowed tokens": (_CHAT, lambda: chat(allowed_token_ids=list(range(10**6)))),
        "a million stop tokens": (_CHAT, lambda: chat(stop_token_ids=list(range(10**6)))),
        "n of 10**9": (_CHAT, lambda: chat(n=10**9)),
        "max_tokens of 10**18": (_CHAT, lambda: chat(max_tokens=10**18, stop=list("aeiou"))),
        "best_of of 10**6": (_COMPLETIONS, lambda: {"prompt": "a", "best_of": 10**6}),
        "seed of 2**70": (_CHAT, lambda: chat(seed=2**70)),
        "temperature of 1e308": (_CHAT, lambda: chat(temperature=1e308)),
        "logprobs of 10**6": (_COMPLETIONS, lambda: {"prompt": "a", "logprobs": 10**6}),
        "a cache salt of 5 MB": (_CHAT, lambda: chat(cache_salt="s" * 5_000_000)),
        "a user of 5 MB": (_CHAT, lambda: chat(user="u" * 5_000_000)),
        "metadata with 100,000 keys": (
            _CHAT,
            lambda: chat(metadata={str(i): "x" for i in range(100_000)}),
        ),
        "100,000 texts to embed": ("/v1/embeddings", lambda: {"input": ["a"] * 100_000}),
        "a million token ids to embed": ("/v1/embeddings", lambda: {"input": [[5] * 10**6]}),
        "dimensions of 10**9": ("/v1/embeddings", lambda: {"input": "a", "dimensions": 10**9}),
        "100,000 documents": ("/v1/rerank", lambda: {"query": "q", "documents": ["d"] * 100_000}),
        "documents of 10 MB": ("/v1/rerank", lambda: {"query": "q", "documents": ["d" * 10**7]}),
        "top_n of -1": ("/v1/rerank", lambda: {"query": "q", "documents": ["d"], "top_n": -1}),
        "a million numbers": ("/v1/responses", lambda: {"input": [7] * 10**6}),
        "100,000 input items": (
            "/v1/responses",
            lambda: {"input": [{"role": "user", "content": "a"}] * 100_000},
        ),
        "65 MiB": (_CHAT, lambda: b" " * (65 * 2**20)),
        "63 MiB of blanks": (_CHAT, lambda: b" " * (63 * 2**20)),
        "10 million numbers": (_CHAT, lambda: b'{"messages":[' + b"1," * 10**7 + b"1]}"),
        "2 million empty objects": (_CHAT, lambda: b'{"messages":[' + b"{}," * 2 * 10**6 + b"{}]}"),
    }
    for name, (path, body) in many.items():
        yield Attack("size", f"{path}: {name}", post(path, body))
