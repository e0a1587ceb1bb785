"""Attacks in the body of a request to the OpenAI API."""

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from loadtest.hostile.attack import Attack, Outcome, Send, Target, call, chat, post

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_ROUTES: dict[str, dict[str, object]] = {
    _CHAT: chat(),
    _COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
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
    yield from _grammars()
    yield from _templates()
    yield from _addresses()
    yield from _identifiers()
    yield from _floods()


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
            ("/v1/embeddings", "input"),
            ("/v1/rerank", "query"),
        ):
            if megabytes == 40 and path in ("/v1/responses", "/v1/rerank"):
                continue
            value: object = [{"role": "user", "content": text}] if field == "messages" else text
            body = {field: value, "documents": ["d"]} if field == "query" else {field: value}
            allowed = (400, 413, 429) if path != "/tokenize" else (200, 400, 413, 429)
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
        "20,000 tools": (_CHAT, lambda: chat(tools=[_tool(f"f{i}") for i in range(20_000)])),
        "a tool name of 5 MB": (_CHAT, lambda: chat(tools=[_tool("f" * 5_000_000)])),
        "100,000 stop strings": (_CHAT, lambda: chat(stop=[f"s{i}" for i in range(100_000)])),
        "a stop string of 5 MB": (_CHAT, lambda: chat(stop="x" * 5_000_000)),
        "100,000 bad words": (_CHAT, lambda: chat(bad_words=[f"w{i}" for i in range(100_000)])),
        "200,000 biases": (_CHAT, lambda: chat(logit_bias={str(i): 1 for i in range(200_000)})),
        "a million allowed tokens": (_CHAT, lambda: chat(allowed_token_ids=list(range(10**6)))),
        "a million stop tokens": (_CHAT, lambda: chat(stop_token_ids=list(range(10**6)))),
        "n of 10**9": (_CHAT, lambda: chat(n=10**9)),
        "max_tokens of 10**18": (_CHAT, lambda: chat(max_tokens=10**18, timeout=1)),
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


def _tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def _schema(schema: object) -> dict[str, object]:
    return chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "strict": True, "schema": schema},
        }
    )


def _object(count: int, **kinds: object) -> dict[str, object]:
    properties = {f"property_{i}": {"type": "string", **kinds} for i in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _grammars() -> Iterator[Attack]:
    deep: object = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    cycle = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    }
    schemas: dict[str, object] = {
        "5,000 properties": _object(5_000),
        "9,000 properties": _object(9_000),
        "150 levels": deep,
        "a remote $ref": {"$ref": "http://127.0.0.1:{canary}/schema.json"},
        "a file as $ref": {"$ref": "file:///etc/passwd"},
        "a remote $id and $schema": {
            "$schema": "http://127.0.0.1:{canary}/s",
            "type": "string",
            "$id": "http://127.0.0.1:{canary}/i",
        },
        "a $ref to itself": {"$ref": "#"},
        "two $refs in a circle": cycle,
        "a $ref to nothing": {"$ref": "#/$defs/missing"},
        "a pattern that explodes": {"type": "string", "pattern": "^((a|a|a|a){1,900}){1,900}$"},
        "a pattern with backtracking": {"type": "string", "pattern": "^(a+)+(b|c*)*$"},
        "an invalid pattern": {"type": "string", "pattern": "([a-"},
        "maxLength of 10**9": {"type": "string", "minLength": 10**8, "maxLength": 10**9},
        "minItems of 10**9": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
        "an enum of 100,000": {"enum": [f"value {i}" for i in range(100_000)]},
        "a const of 1 MB": {"const": "c" * 10**6},
        "1,000 allOf": {"allOf": [_object(20) for _ in range(1_000)]},
        "2,000 anyOf": {"anyOf": [_object(5) for _ in range(2_000)]},
        "oneOf in oneOf": {"oneOf": [{"oneOf": [{"oneOf": [{"type": "string"}] * 40}] * 40}] * 20},
        "500 patternProperties": {
            "type": "object",
            "patternProperties": {f"^(a|b){{1,{i + 1}}}$": {"type": "string"} for i in range(500)},
        },
        "a number as schema": 7,
        "a list as schema": [],
        "an unknown type": {"type": "quaternion"},
        "properties is a list": {"type": "object", "properties": ["a"]},
        "exponents in bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    }
    for name, schema in schemas.items():
        yield Attack("grammar", f"schema: {name}", post(_CHAT, _schema(schema)))
    left_recursive = "root ::= root root | root"
    doubling = "\n".join([f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)])
    options = " | ".join(f'"option {i}"' for i in range(50_000))
    structured: dict[str, dict[str, object]] = {
        "regex: nested repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        "regex: any character 5,000 times": {"regex": "(.{0,5000}){0,5000}"},
        "regex: backtracking": {"regex": "^(a+)+$"},
        "regex: 2,000 groups": {"regex": "(" * 2_000 + "a" + ")" * 2_000},
        "regex: 1 MB": {"regex": "(a|b)*" * 170_000},
        "regex: lookahead": {"regex": "(?=.*a)(?!b)(?<=c)d"},
        "regex: back reference": {"regex": r"(a)\1+"},
        "regex: unicode classes": {"regex": r"[\p{L}\p{N}]{1,4000}"},
        "regex: empty": {"regex": ""},
        "regex: open bracket": {"regex": "[a-"},
        "regex: a number": {"regex": 7},
        "EBNF: left recursion": {"grammar": left_recursive},
        "EBNF: doubling 60 times": {"grammar": f'root ::= r0\n{doubling}\nr60 ::= "a"'},
        "EBNF: empty": {"grammar": ""},
        "EBNF: missing rule": {"grammar": "root ::= missing"},
        "EBNF: only empty text": {"grammar": 'root ::= ""'},
        "EBNF: 10,000 parentheses": {"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
        "EBNF: 50,000 options": {"grammar": f"root ::= {options}"},
        "EBNF: repeat of 10**9": {"grammar": 'root ::= "a"{1,1000000000}'},
        "EBNF: ambiguous repeats": {"grammar": 'root ::= (("a"*)*)*'},
        "choice: 100,000": {"choice": [f"choice {i}" for i in range(100_000)]},
        "choice: empty": {"choice": []},
        "choice: an empty text": {"choice": [""]},
        "choice: numbers": {"choice": [1, 2]},
        "structural tag: damaged": {"structural_tag": "{"},
        "structural tag: no format": {"structural_tag": json.dumps({"type": "structural_tag"})},
        "structural tag: deep": {"structural_tag": json.dumps(_deep_tag(200))},
        "two at once": {"regex": "a", "choice": ["b"]},
        "an unknown kind": {"pushdown": "a"},
    }
    for name, value in structured.items():
        body = chat(structured_outputs=value)
        yield Attack("grammar", f"structured_outputs {name}", post(_CHAT, body))
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "strict": True, "parameters": _object(3_000)},
        }
    ]
    yield Attack(
        "grammar",
        "strict tool with 3,000 properties",
        post(_CHAT, chat(tools=tools, tool_choice="required")),
    )
    yield Attack(
        "grammar",
        "500 tools with required",
        post(_CHAT, chat(tools=[_tool(f"f{i}") for i in range(500)], tool_choice="required")),
    )


def _deep_tag(depth: int) -> dict[str, object]:
    tag: dict[str, object] = {"type": "const_string", "value": "a"}
    for _ in range(depth):
        tag = {"type": "sequence", "elements": [tag, tag] if depth < 10 else [tag]}
    return {"type": "structural_tag", "format": tag}


def _templates() -> Iterator[Attack]:
    kwargs: dict[str, object] = {
        "add_generation_prompt": True,
        "tools": [],
        "messages": "x",
        "raise_exception": 1,
        "self": 1,
        "__class__": 1,
        "range": 1,
        "loop": {"index": 10**9},
        "continue_final_message": True,
        "conversation": [],
        "chat_template": "{{ 1 }}",
        "tokenizer": 1,
        "documents": "x" * 10**6,
        "enable_thinking": {"a": {"b": []}},
        "": 1,
        "1 2": 1,
    }
    for name, value in kwargs.items():
        body = chat(chat_template_kwargs={name: value})
        yield Attack("template", f"chat_template_kwargs {name!r}", post(_CHAT, body), limit_s=5)
    programs = {
        "an endless loop": "{% for i in range(10**9) %}" * 2 + "{% endfor %}" * 2,
        "an attribute of a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "a text of 10**10 characters": "{{ 'a' * 10**10 }}",
        "10,000 nested lists": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    }
    for name, program in programs.items():
        body = chat(chat_template=program)
        yield Attack("template", f"chat_template with {name}", post(_CHAT, body), limit_s=5)


def _addresses() -> Iterator[Attack]:
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    pixels = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\1\0\0" * 2 + b"\x08\2\0\0\0" + b"\0" * 4
    png = base64.b64encode(pixels + bomb).decode()
    addresses = {
        "of this machine": "http://127.0.0.1:{canary}/image.png",
        "of a file": "file:///etc/passwd",
        "of a cloud's metadata": "http://169.254.169.254/latest/meta-data",
        "with a newline": "http://127.0.0.1:{canary}/\r\nX: y",
        "of a bomb": f"data:image/png;base64,{png}",
        "without content": "data:image/png;base64,",
        "that is not base64": "data:image/png;base64,@@@@",
        "of 5 MB": "data:image/png;base64," + "A" * 5_000_000,
    }
    for name, address in addresses.items():
        part = {"type": "image_url", "image_url": {"url": address}}
        body = chat(messages=[{"role": "user", "content": [part]}])
        yield Attack("address", f"image address {name}", post(_CHAT, body), (400, 413), 5)
    for kind in ("input_audio", "file", "video_url", "input_image"):
        part = {"type": kind, kind: {"url": "http://127.0.0.1:{canary}/x", "file_id": "f"}}
        body = chat(messages=[{"role": "user", "content": [part]}])
        yield Attack("address", f"a part of type {kind}", post(_CHAT, body), (400, 413), 5)
    item = {"type": "input_file", "file_url": "http://127.0.0.1:{canary}/f"}
    body = {"input": [{"role": "user", "content": [item]}]}
    yield Attack("address", "a file address in responses", post("/v1/responses", body), (400,), 5)


def _identifiers() -> Iterator[Attack]:
    path = "/v1/responses/"
    for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        send = call(method, path + "{foreign}" + end)
        yield Attack("identifier", f"{method} another client's response{end}", send, (404,), 5)
    body = {"input": "hi", "previous_response_id": "{foreign}"}
    yield Attack(
        "identifier", "another client's previous response", post("/v1/responses", body), (404,), 5
    )
    for name, text in {
        "of 60,000 characters": "a" * 60_000,
        "with a path": "..%2f..%2fetc%2fpasswd",
        "with NUL": "resp_%00",
        "with quotes": "%22%27--",
    }.items():
        yield Attack(
            "identifier", f"a response id {name}", call("GET", path + text), (400, 404, 414), 5
        )
    yield Attack(
        "identifier",
        "a model name of 60,000 characters",
        call("GET", "/v1/models/" + "m" * 60_000),
        (400, 404, 414),
        5,
    )
    yield Attack(
        "identifier", "a model with a path", post(_CHAT, chat(model="../../etc/passwd")), (404,), 5
    )
    for name, value in {
        "nan": "nan",
        "below 0": "-1",
        "infinite": "1e999",
        "of 1 MB": "9" * 60_000,
    }.items():
        headers = {"X-Request-Timeout": value}
        yield Attack(
            "identifier", f"a request timeout {name}", post(_CHAT, chat(), headers), (400, 431), 5
        )
    for name, key in {
        "no key": "",
        "a wrong key": "Bearer x",
        "a key in Latin-1": "Bearer \xe9",
        "a key of 60,000 characters": "Bearer " + "k" * 60_000,
    }.items():
        headers = {"Authorization": key}
        yield Attack("identifier", name, post(_CHAT, chat(), headers), (401, 431), 5)


def _floods() -> Iterator[Attack]:
    """Yield attacks of several requests at the same time, most of which are abandoned."""
    long_prompt = {"prompt": "word " * 3_000, "max_tokens": 900, "ignore_eos": True}
    schema = _schema(_object(5_000, pattern="^[a-z]{1,40}$"))
    yield Attack(
        "flood",
        "4 schemas of 5,000 properties, abandoned",
        _together(4, post(_CHAT, schema, leave_after_s=0.5)),
    )
    yield Attack(
        "flood",
        "200 long requests, abandoned after 2 s",
        _together(200, post(_COMPLETIONS, long_prompt, leave_after_s=2)),
    )
    ids = {"prompt": [5] * 2_000, "max_tokens": 900, "ignore_eos": True, "stream": True}
    yield Attack(
        "flood",
        "200 streams, abandoned after 1 s",
        _together(200, post(_COMPLETIONS, ids, leave_after_s=1)),
    )
    text = {"prompt": "word " * 10**6}
    yield Attack(
        "flood",
        "8 prompts of 5 MB, abandoned",
        _together(8, post(_COMPLETIONS, text, leave_after_s=0.3)),
    )
    huge = {"prompt": "word " * 8 * 10**6}
    yield Attack(
        "flood", "8 prompts of 40 MB", _together(8, post(_COMPLETIONS, huge)), (400, 413, 429)
    )
    mixed = [
        post(_COMPLETIONS, text, leave_after_s=0.4),
        post(_CHAT, schema, leave_after_s=0.4),
        post(_COMPLETIONS, {"prompt": [5] * 3_000_000}, leave_after_s=0.4),
    ]
    yield Attack("flood", "a mixture, abandoned", _together(12, *mixed))
    background = {"input": "hi", "background": True, "max_output_tokens": 500}
    yield Attack(
        "flood",
        "100 responses in the background",
        _together(100, post("/v1/responses", background)),
    )
    yield Attack(
        "flood",
        "64 choices with logprobs, 16 times",
        _together(
            16,
            post(_CHAT, chat(n=64, logprobs=True, top_logprobs=20, max_tokens=40), leave_after_s=3),
        ),
    )
    yield Attack(
        "flood",
        "rerank 64 times",
        _together(
            64,
            post(
                "/v1/rerank",
                {"query": "q", "documents": ["some words " * 40] * 50},
                leave_after_s=3,
            ),
        ),
    )


def _together(count: int, *sends: Send) -> Send:
    """Return a function that runs `count` requests at the same time, and returns the worst."""

    def send(target: Target, limit_s: float) -> Outcome:
        with ThreadPoolExecutor(count) as pool:
            chosen = [sends[index % len(sends)] for index in range(count)]
            outcomes = pool.map(lambda one: one(target, limit_s), chosen)
        return max(outcomes, key=_badness)

    return send


def _badness(outcome: Outcome) -> tuple[bool, int]:
    status = outcome.status
    return status == "hung", status if isinstance(status, int) else 0
