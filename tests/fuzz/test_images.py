"""Tests that the demo models, which accept no images, refuse each form of an image."""

import base64
import json

import httpx
import pytest
from fuzz.values import json_bytes, mutated, odd

pytestmark = pytest.mark.triton

_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_NAMES = (
    "type",
    "image_url",
    "url",
    "detail",
    "text",
    "source",
    "data",
    "image",
    "input_audio",
    "x",
)


def url(rng):
    """Return a random URL of an image. Many of the URLs are invalid."""
    data = rng.choice((_PIXEL, _PIXEL[:20], b"", b"GIF89a", rng.randbytes(200)))
    text = base64.b64encode(data).decode()
    return rng.choice(
        (
            f"data:image/png;base64,{text}",
            f"data:image/png;base64,{text[:-3]}!",
            f"data:;base64,{text}",
            "data:image/svg+xml,<svg/>",
            "http://127.0.0.1:9/image.png",
            "file:///etc/passwd",
            "",
            odd(rng),
        )
    )


def part(rng):
    """Return a random part of a message with an image, a sound, a video or a file."""
    kind = rng.choice(("image_url", "input_image", "image", "input_audio", "video_url", "file"))
    made = {
        "type": kind,
        kind: rng.choice((url(rng), {"url": url(rng), "detail": "low"}, {"data": url(rng)})),
    }
    return mutated(rng, made, _NAMES) if rng.random() < 0.5 else made


def is_text(one):
    """Return whether a part is a text. A mutation can change the type of a part to text."""
    return isinstance(one, dict) and one.get("type") in ("text", "refusal")


def post(server, path, data):
    """Send a request, and return the status and the JSON of the response."""
    with httpx.Client(timeout=120, trust_env=False) as client:
        address = f"http://127.0.0.1:{server.openai_port}{path}"
        answer = client.post(address, content=data, headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()


def test_an_image_in_a_chat_is_refused_in_every_form(server, rounds, case, goes_on):
    for number, rng in rounds("image", 80):
        parts = [part(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        if any(map(is_text, parts)):
            continue
        parts.insert(rng.randrange(len(parts) + 1), {"type": "text", "text": "What is this?"})
        message = {"role": rng.choice(("user", "user", "system", "tool")), "content": parts}
        body = {"messages": [message], "max_tokens": 2, "stream": rng.random() < 0.3}
        with case(number, body):
            status, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
            assert status == 400, answer
            assert "messages" in answer["error"]["message"], answer
    goes_on()


def test_an_image_to_embed_or_rank_is_refused_in_every_form(server, rounds, case, goes_on):
    forms = (
        ("/v1/embeddings", lambda one: {"input": [{"content": [one]}]}),
        ("/v1/embeddings", lambda one: {"input": [one]}),
        ("/v1/embeddings", lambda one: {"messages": [{"role": "user", "content": [one]}]}),
        ("/v1/rerank", lambda one: {"query": "Hugo?", "documents": [one]}),
        ("/v1/rerank", lambda one: {"query": {"content": [one]}, "documents": ["Hugo"]}),
        ("/score", lambda one: {"text_1": {"content": [one]}, "text_2": ["Hugo"]}),
        ("/classify", lambda one: {"input": [one]}),
    )
    for number, rng in rounds("pooled image", 60):
        one = part(rng)
        path, form = rng.choice(forms)
        body = form(one)
        if is_text(one) or (isinstance(one, dict) and isinstance(one.get("text"), str)):
            continue
        with case(number, (path, body)):
            status, answer = post(server, path, json_bytes(rng, body))
            assert 400 <= status < 500, answer
            assert answer["error"]["message"], answer
    goes_on()
