"""Attacks with chat templates, with addresses inside a request, and with identifiers."""

import base64
import struct
import zlib
from collections.abc import Iterator

from loadtest.hostile.attack import Attack, make_attacks
from loadtest.hostile.requests import CHATS, call, chat, post, post_chat


def attacks() -> Iterator[Attack]:
    """Yield all attacks with templates, addresses and identifiers."""
    yield from _templates()
    yield from _addresses()
    yield from _missing()
    yield from _identifiers()


def _templates() -> Iterator[Attack]:
    """Yield chat templates, and variables for the server's chat template."""
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
    sends = {
        f"chat_template_kwargs {name!r}": post_chat(chat_template_kwargs={name: value})
        for name, value in kwargs.items()
    }
    programs = {
        "an endless loop": "{% for i in range(10**9) %}" * 2 + "{% endfor %}" * 2,
        "an attribute of a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "a text of 10**10 characters": "{{ 'a' * 10**10 }}",
        "10,000 nested lists": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    }
    for name, program in programs.items():
        sends[f"chat_template with {name}"] = post_chat(chat_template=program)
    yield from make_attacks("template", sends, limit_s=5)


def _addresses() -> Iterator[Attack]:
    """Yield messages with images and files whose addresses the server must not open."""
    parts: dict[str, dict[str, object]] = {
        f"image address {name}": {"type": "image_url", "image_url": {"url": address}}
        for name, address in _image_addresses().items()
    }
    for kind in ("input_audio", "file", "video_url", "input_image"):
        content = {"url": "http://127.0.0.1:{canary}/x", "file_id": "f"}
        parts[f"a part of type {kind}"] = {"type": kind, kind: content}
    sends = {
        name: post_chat(messages=[{"role": "user", "content": [part]}])
        for name, part in parts.items()
    }
    yield from make_attacks("address", sends, allowed=(400, 413), limit_s=5)
    item = {"type": "input_file", "file_url": "http://127.0.0.1:{canary}/f"}
    send = post("/v1/responses", {"input": [{"role": "user", "content": [item]}]})
    yield Attack("address", "a file address in responses", send, allowed=(400,), limit_s=5)


def _image_addresses() -> dict[str, str]:
    return {
        "of this machine": "http://127.0.0.1:{canary}/image.png",
        "of a file": "file:///etc/passwd",
        "of a cloud's metadata": "http://169.254.169.254/latest/meta-data",
        "with a newline": "http://127.0.0.1:{canary}/\r\nX: y",
        "of a bomb": f"data:image/png;base64,{_png_bomb()}",
        "without content": "data:image/png;base64,",
        "that is not base64": "data:image/png;base64,@@@@",
        "of 5 MB": "data:image/png;base64," + "A" * 5_000_000,
    }


def _png_bomb() -> str:
    """Return a PNG file of 65,536 x 65,536 pixels as base64, with damage after the header."""
    size = struct.pack(">II", 65536, 65536)
    header = b"\0\0\0\rIHDR" + size + b"\x08\2\0\0\0" + b"\0" * 4
    pixels = zlib.compress(b"\0" * 50_000_000, level=9)
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + pixels).decode()


def _missing() -> Iterator[Attack]:
    """Yield requests for another client's response, or for a model outside the repository."""
    response = "/v1/responses/{foreign}"
    body = {"input": "hi", "previous_response_id": "{foreign}"}
    sends = {
        "GET another client's response": call("GET", response),
        "GET another client's response/input_items": call("GET", f"{response}/input_items"),
        "POST another client's response/cancel": call("POST", f"{response}/cancel"),
        "DELETE another client's response": call("DELETE", response),
        "another client's previous response": post("/v1/responses", body),
        "a model with a path": post_chat(model="../../etc/passwd"),
    }
    yield from make_attacks("identifier", sends, allowed=(404,), limit_s=5)


def _identifiers() -> Iterator[Attack]:
    """Yield hostile identifiers in paths, and hostile time limits and keys in headers."""
    response_ids = {
        "of 60,000 characters": "a" * 60_000,
        "with a path": "..%2f..%2fetc%2fpasswd",
        "with NUL": "resp_%00",
        "with quotes": "%22%27--",
    }
    paths = {
        f"a response id {name}": call("GET", f"/v1/responses/{response_id}")
        for name, response_id in response_ids.items()
    }
    paths["a model name of 60,000 characters"] = call("GET", "/v1/models/" + "m" * 60_000)
    yield from make_attacks("identifier", paths, allowed=(400, 404, 414), limit_s=5)
    times = {"nan": "nan", "below 0": "-1", "infinite": "1e999", "of 1 MB": "9" * 60_000}
    timeouts = {
        f"a request timeout {name}": post(CHATS, chat(), {"X-Request-Timeout": seconds})
        for name, seconds in times.items()
    }
    yield from make_attacks("identifier", timeouts, allowed=(400, 431), limit_s=5)
    keys = {
        "no key": "",
        "a wrong key": "Bearer x",
        "a key in Latin-1": "Bearer \xe9",
        "a key of 60,000 characters": "Bearer " + "k" * 60_000,
    }
    logins = {name: post(CHATS, chat(), {"Authorization": key}) for name, key in keys.items()}
    yield from make_attacks("identifier", logins, allowed=(401, 431), limit_s=5)
