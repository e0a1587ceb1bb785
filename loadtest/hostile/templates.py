"""Attacks with chat templates, with addresses inside a request, and with identifiers."""

import base64
import zlib
from collections.abc import Iterator

from loadtest.hostile.attack import Attack, call, chat, post

_CHAT = "/v1/chat/completions"


def attacks() -> Iterator[Attack]:
    """Yield all attacks with templates, addresses and identifiers."""
    yield from _templates()
    yield from _addresses()
    yield from _identifiers()


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
