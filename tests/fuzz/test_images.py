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
    *("type", "image_url", "url", "detail", "text", "source", "data", "image", "input_audio", "x"),
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
    value = rng.choice((url(rng), {"url": url(rng), "detail": "low"}, {"data": url(rng)}))
    valid_part = {"type": kind, kind: value}
    return mutated(rng, valid_part, _NAMES) if rng.random() < 0.5 else valid_part


def is_text(part):
    """Return whether a part is a text. A mutation can change the type of a part to text."""
    return isinstance(part, dict) and part.get("type") in ("text", "refusal")


def post(server, path, data):
    """Send a request, and return the status and the JSON of the response."""
    with httpx.Client(timeout=120, trust_env=False) as client:
        address = f"http://127.0.0.1:{server.openai_port}{path}"
        answer = client.post(address, content=data, headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()


def random_chat(rng, parts):
    """Return a chat request with the parts and a question."""
    parts.insert(rng.randrange(len(parts) + 1), {"type": "text", "text": "What is this?"})
    message = {"role": rng.choice(("user", "user", "system", "tool")), "content": parts}
    return {"messages": [message], "max_tokens": 2, "stream": rng.random() < 0.3}


def test_an_image_in_a_chat_is_refused_in_every_form(
    server, random_cases, errors_with_case, check_server
):
    for number, rng in random_cases("image", default_number=80):
        parts = [part(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        if any(map(is_text, parts)):
            continue  # the mutated parts may be a valid request
        body = random_chat(rng, parts)
        with errors_with_case(number, body):
            status, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
            assert status == 400, answer
            assert "messages" in answer["error"]["message"], answer
    check_server()


# The routes of the pooling models, and functions that return the body for a part.
POOLING_REQUESTS = (
    ("/v1/embeddings", lambda part: {"input": [{"content": [part]}]}),
    ("/v1/embeddings", lambda part: {"input": [part]}),
    ("/v1/embeddings", lambda part: {"messages": [{"role": "user", "content": [part]}]}),
    ("/v1/rerank", lambda part: {"query": "Hugo?", "documents": [part]}),
    ("/v1/rerank", lambda part: {"query": {"content": [part]}, "documents": ["Hugo"]}),
    ("/score", lambda part: {"text_1": {"content": [part]}, "text_2": ["Hugo"]}),
    ("/classify", lambda part: {"input": [part]}),
)


def test_an_image_to_embed_or_rank_is_refused_in_every_form(
    server, random_cases, errors_with_case, check_server
):
    for number, rng in random_cases("pooled image", default_number=60):
        image = part(rng)
        path, body_with = rng.choice(POOLING_REQUESTS)
        if is_text(image) or (isinstance(image, dict) and isinstance(image.get("text"), str)):
            continue  # the mutated part may be a valid input
        body = body_with(image)
        with errors_with_case(number, (path, body)):
            status, answer = post(server, path, json_bytes(rng, body))
            assert 400 <= status < 500, answer
            assert answer["error"]["message"], answer
    check_server()
