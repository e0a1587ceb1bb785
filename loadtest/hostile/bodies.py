"""Attacks in the body of a request to the OpenAI API."""

import json
from collections.abc import Callable, Iterator

from loadtest.hostile.attack import Attack, make_attacks
from loadtest.hostile.grammars import tool
from loadtest.hostile.requests import CHATS, COMPLETIONS, chat, post, post_chat

_ROUTES = (
    *(CHATS, COMPLETIONS, "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings"),
    *("/v1/rerank", "/v1/score", "/classify", "/pooling"),
)
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
    damaged = [(path, name, body) for path in _ROUTES for name, body in _DAMAGED.items()]
    damaged += [(CHATS, name, body) for name, body in _ODD_BODIES.items()]
    sends = {f"{path}: {name}": post(path, body) for path, name, body in damaged}
    yield from make_attacks("damaged body", sends, allowed=(400, 413), limit_s=5)
    damaged_chats = {
        f"messages: {name}": post_chat(messages=messages)
        for name, messages in _damaged_messages().items()
    }
    yield from make_attacks("damaged body", damaged_chats, limit_s=5)
    many_messages = {
        f"{count:,} messages": post(CHATS, _chat_of(count)) for count in (20_000, 300_000, 500_000)
    }
    yield from make_attacks("size", many_messages, allowed=(400, 413, 429))
    yield from _long_texts()
    for path, bodies in _large_bodies().items():
        yield from make_attacks(
            "size", {f"{path}: {name}": post(path, bodies[name]) for name in bodies}
        )


def _damaged_messages() -> dict[str, list[dict[str, object]]]:
    """Return lists of messages with wrong types, deep values or unusual characters."""
    nested: object = "x"
    for _ in range(300):
        nested = [nested]
    function = {"name": "f", "arguments": "[" * 50_000}
    calls = [{"id": "1", "type": "function", "function": function}]
    part = {"type": "text", "text": nested}
    return {
        "arguments of 50,000 brackets": [{"role": "assistant", "tool_calls": calls}],
        "content nested 300 times": [{"role": "user", "content": [part]}],
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


def _chat_of(num_messages: int) -> Callable[[], bytes]:
    """Return a function that makes the body of a chat with `num_messages` messages."""
    message = b'{"role":"user","content":"a"}'
    return lambda: b'{"messages":[' + b",".join([message] * num_messages) + b"]}"


def _long_texts() -> Iterator[Attack]:
    """Yield requests with one text of several megabytes."""
    for megabytes in (5, 40):
        text = "word " * (megabytes * 200_000)
        messages: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
        bodies: dict[str, dict[str, object]] = {
            CHATS: messages,
            COMPLETIONS: {"prompt": text},
            "/tokenize": {"prompt": text},
            "/v1/messages": messages,
            "/v1/embeddings": {"input": text},
        }
        if megabytes == 5:
            bodies["/v1/responses"] = {"input": text}
            bodies["/v1/rerank"] = {"query": text, "documents": ["d"]}
        for path, body in bodies.items():
            # The tokenizer also accepts texts that are too long for the model.
            answered = (200,) if path == "/tokenize" else ()
            name = f"{path}: {megabytes} MB of text"
            yield Attack("size", name, post(path, body), allowed=(400, 408, 413, 429, *answered))


def _large_bodies() -> dict[str, dict[str, Callable[[], object]]]:
    """Return functions that make large or extreme bodies, by path and name."""
    return {
        COMPLETIONS: {
            "3 million token ids": lambda: {"prompt": [5] * 3_000_000},
            "token ids below 0": lambda: {"prompt": [-1]},
            "token ids above 2**63": lambda: {"prompt": [2**70]},
            "100,000 prompts": lambda: {"prompt": ["a"] * 100_000},
            "one character, 10 MB": lambda: {"prompt": "a" * 10_000_000},
            "best_of of 10**6": lambda: {"prompt": "a", "best_of": 10**6},
            "logprobs of 10**6": lambda: {"prompt": "a", "logprobs": 10**6},
        },
        CHATS: {
            "blanks, 10 MB": lambda: chat(messages=[{"role": "user", "content": " " * 10**7}]),
            "100,000 content parts": lambda: chat(
                messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]
            ),
            "20,000 tools": lambda: chat(tools=[tool(f"f{i}") for i in range(20_000)]),
            "a tool name of 5 MB": lambda: chat(tools=[tool("f" * 5_000_000)]),
            "100,000 stop strings": lambda: chat(stop=[f"s{i}" for i in range(100_000)]),
            "a stop string of 5 MB": lambda: chat(stop="x" * 5_000_000),
            "100,000 bad words": lambda: chat(bad_words=[f"w{i}" for i in range(100_000)]),
            "200,000 biases": lambda: chat(logit_bias={str(i): 1 for i in range(200_000)}),
            "a million allowed tokens": lambda: chat(allowed_token_ids=list(range(10**6))),
            "a million stop tokens": lambda: chat(stop_token_ids=list(range(10**6))),
            "n of 10**9": lambda: chat(n=10**9),
            "max_tokens of 10**18": lambda: chat(max_tokens=10**18, stop=list("aeiou")),
            "seed of 2**70": lambda: chat(seed=2**70),
            "temperature of 1e308": lambda: chat(temperature=1e308),
            "a cache salt of 5 MB": lambda: chat(cache_salt="s" * 5_000_000),
            "a user of 5 MB": lambda: chat(user="u" * 5_000_000),
            "metadata with 100,000 keys": lambda: chat(
                metadata={str(i): "x" for i in range(100_000)}
            ),
            "65 MiB": lambda: b" " * (65 * 2**20),
            "63 MiB of blanks": lambda: b" " * (63 * 2**20),
            "10 million numbers": lambda: b'{"messages":[' + b"1," * 10**7 + b"1]}",
            "2 million empty objects": lambda: b'{"messages":[' + b"{}," * 2 * 10**6 + b"{}]}",
        },
        "/v1/embeddings": {
            "100,000 texts to embed": lambda: {"input": ["a"] * 100_000},
            "a million token ids to embed": lambda: {"input": [[5] * 10**6]},
            "dimensions of 10**9": lambda: {"input": "a", "dimensions": 10**9},
        },
        "/v1/rerank": {
            "100,000 documents": lambda: {"query": "q", "documents": ["d"] * 100_000},
            "documents of 10 MB": lambda: {"query": "q", "documents": ["d" * 10**7]},
            "top_n of -1": lambda: {"query": "q", "documents": ["d"], "top_n": -1},
        },
        "/v1/responses": {
            "a million numbers": lambda: {"input": [7] * 10**6},
            "100,000 input items": lambda: {"input": [{"role": "user", "content": "a"}] * 100_000},
        },
    }
