"""Tests of chats with images, videos and audio on a real server with a tiny multimodal model."""

import base64
import io
import json
import time

import httpx
import numpy as np
import pytest
from backend.vision import image_types
from backend.vision.image_archs import picture
from backend.vision.test_audio import wav
from e2e.gauges_page import gauge_of
from fakes.live_frontend import wait_for
from PIL import Image
from transformers.utils import is_torchvision_available

from loadtest.server.served import ALONE, Served

pytestmark = pytest.mark.triton

# The chat template prints one placeholder for each image, video and audio file. It prints functions
# and function calls in the format of the Hermes models.
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions: <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer with <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<image_token>
{%- elif part.type == 'video' %}<video_token>
{%- elif part.type == 'audio' %}<audio_token>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def png(seed: int) -> str:
    """Return a PNG file of random pixels, encoded in base64."""
    file = io.BytesIO()
    picture(seed, 60, 40).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(seed: int) -> str:
    return f"data:image/png;base64,{png(seed)}"


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def question(*urls: str) -> list[dict]:
    """Return a list of one user message, which contains images and a question."""
    parts = [*map(image_part, urls), {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder from which the server may read images that a request names by a file URL."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory, fork_server):
    """A server with a small random model that accepts images, videos and audio."""
    model = image_types.save("qwen2_5_omni_thinker", tmp_path_factory.mktemp("checkpoint"), "small")
    (model / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    # Constrained decoding requires a token that ends the answer.
    (model / "generation_config.json").write_text('{"eos_token_id": 2}', encoding="utf-8")
    environment = {
        "NEREID_KV_CACHE_MEMORY": "64MiB",
        "NEREID_MAX_MODEL_LEN": "2048",
        "NEREID_IMAGE_FOLDER": str(folder),
        **fork_server,
    }
    arguments = [*ALONE, "--served-model-name=tiny"]
    with Served(model=model, environment=environment, arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def post(server):
    """A function that sends a request, and returns the HTTP status and the JSON response."""

    def send(path, **body):
        body = {"model": "tiny", "temperature": 0, **body}
        answer = httpx.post(f"{server.openai_url}{path}", json=body, timeout=60)
        return answer.status_code, answer.json()

    return send


@pytest.fixture(scope="module")
def ask(post):
    """A function that sends a chat completion, and returns its choice and its usage."""

    def send(messages, **body):
        body = {"max_tokens": 8, "messages": messages, **body}
        status, answer = post("/chat/completions", **body)
        assert status == 200, answer
        return answer["choices"][0], answer["usage"]

    return send


def num_cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_second_use_of_an_image_runs_no_encoder(server, ask):
    gauge = gauge_of(server.metrics_port)
    # Wait for the request that `nereid serve` sends at its start. Otherwise, the tokens of this
    # request might be counted after `num_tokens_before` is read.
    wait_for(lambda: gauge("prompt_tokens_total") > 0)
    num_tokens_before = gauge("prompt_tokens_total")

    first, first_usage = ask(question(data_url(21)))
    second, second_usage = ask(question(data_url(21)))
    _, other_usage = ask(question(data_url(22)))

    assert second["message"] == first["message"]
    assert num_cached(second_usage) > first_usage["prompt_tokens"] // 2
    usages = (first_usage, second_usage, other_usage)
    num_tokens = sum(usage["prompt_tokens"] for usage in usages)
    wait_for(lambda: gauge("prompt_tokens_total") == num_tokens_before + num_tokens)
    wait_for(lambda: gauge("image_encodings_total") >= 2)
    assert gauge("image_encodings_total") == 2


def video_part(url: str) -> dict:
    return {"type": "video_url", "video_url": {"url": url}}


def video(seed: int) -> list[dict]:
    """Return a list of one user message, which contains the frames of a video and a question."""
    frames = ",".join(png(seed + number) for number in range(4))
    text = {"type": "text", "text": "What happens?"}
    return [{"role": "user", "content": [video_part(f"data:video/jpeg;base64,{frames}"), text]}]


HAS_TORCHVISION = is_torchvision_available()
MP4_ERROR = "frame 0: the file is not" if HAS_TORCHVISION else "needs the package torchvision"


@pytest.mark.skipif(not HAS_TORCHVISION, reason="needs the package torchvision")
def test_the_frames_of_a_video_are_answered(ask):
    first, first_usage = ask(video(50))
    second, second_usage = ask(video(50))
    _, other_usage = ask(video(60))

    assert first_usage["prompt_tokens"] > 12  # a token represents two by two patches of two frames
    assert second["message"] == first["message"]
    assert num_cached(second_usage) > 0
    assert other_usage["prompt_tokens"] == first_usage["prompt_tokens"]
    assert num_cached(other_usage) < first_usage["prompt_tokens"] - 1


@pytest.mark.skipif(HAS_TORCHVISION, reason="tests the error without torchvision")
def test_without_torchvision_a_video_is_refused(post):
    status, answer = post("/chat/completions", messages=video(50), max_tokens=8)
    assert status == 400
    assert "needs the package torchvision" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:video/mp4;base64,AAAA", MP4_ERROR),
        ("https://example.org/a.mp4", "decodes no video files. Send the frames"),
    ],
)
def test_a_video_file_is_refused_by_name(post, url, message):
    messages = [{"role": "user", "content": [video_part(url)]}]
    status, answer = post("/chat/completions", messages=messages, max_tokens=8)
    assert status == 400
    assert message in answer["error"]["message"]


def test_audio_is_answered_alone_and_beside_an_image(ask):
    def spoken(seed: int, *image_urls: str, rate: int = 16_000) -> list[dict]:
        """Return one user message with half a second of noise, images and a question."""
        rng = np.random.default_rng(seed)
        content = wav(rng.integers(-9000, 9000, rate // 2, "<i2").tobytes(), rate=rate)
        audio = {"data": base64.b64encode(content).decode(), "format": "wav"}
        part = {"type": "input_audio", "input_audio": audio}
        text = {"type": "text", "text": "What is said?"}
        return [{"role": "user", "content": [part, *map(image_part, image_urls), text]}]

    first, first_usage = ask(spoken(1))
    second, second_usage = ask(spoken(1))
    assert second["message"] == first["message"]
    assert num_cached(second_usage) > 0

    num_tokens = first_usage["prompt_tokens"]
    _, other_usage = ask(spoken(2))
    assert other_usage["prompt_tokens"] == num_tokens
    assert num_cached(other_usage) < num_tokens - 1
    _, usage_at_another_rate = ask(spoken(3, rate=44_100))
    assert usage_at_another_rate["prompt_tokens"] == num_tokens
    _, usage_with_image = ask(spoken(1, data_url(8)))
    assert usage_with_image["prompt_tokens"] > num_tokens + 3


# Name of the case -> an audio file and a part of the error message.
HOSTILE = {
    "truncated": (wav(bytes(64))[:-10], "Send the complete file"),
    "a huge chunk": (wav(bytes(64)).replace(b"data@\0\0\0", b"data\xff\xff\xfe\x7f"), "2147418111"),
    "no samples": (wav(b""), "has no samples"),
    "NaN": (wav(np.full(99, np.nan, "<f4").tobytes(), 3, 32), "not a finite number"),
    "a sampling rate of 1 Hz": (wav(bytes(64), rate=1), "between 4000 and 192000 Hz"),
    "MP3": (b"ID3" + bytes(64), "not a WAV file. Send WAV"),
    "1,000 seconds": (wav(bytes(8_000_000), num_bits=8, rate=8_000), "the limit is 600 seconds"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_audio_is_refused(post, content, message):
    url = f"data:audio/wav;base64,{base64.b64encode(content).decode()}"
    messages = [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": url}}]}]
    started = time.monotonic()
    status, answer = post("/chat/completions", messages=messages, max_tokens=8)
    assert status == 400, answer
    assert message in answer["error"]["message"]
    # On an idle machine, such a request takes less than a second.
    assert time.monotonic() - started < 5


def test_the_three_apis_give_the_same_answer(post, ask):
    choice, usage = ask(question(data_url(1)))
    text = choice["message"]["content"]
    assert text

    source = {"type": "base64", "media_type": "image/png", "data": png(1)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": blocks}]
    status, answer = post("/messages", max_tokens=8, messages=messages)
    assert status == 200, answer
    assert answer["content"][0]["text"] == text

    items = [
        {"type": "input_image", "image_url": data_url(1)},
        {"type": "input_text", "text": "What is this?"},
    ]
    messages = [{"role": "user", "content": items}]
    status, answer = post("/responses", max_output_tokens=8, input=messages)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] == text
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]


def test_images_of_earlier_turns_and_several_images_are_read(ask):
    def num_tokens(messages):
        _, usage = ask(messages)
        return usage["prompt_tokens"]

    with_one_image = num_tokens(question(data_url(3)))
    per_image = with_one_image - num_tokens([{"role": "user", "content": "What is this?"}])
    assert per_image > 3

    two_images = question(data_url(3), data_url(4))
    two_images[0]["content"].insert(1, {"type": "text", "text": "and"})
    assert num_tokens(two_images) == with_one_image + per_image + len("and")

    turns = [*question(data_url(3)), {"role": "assistant", "content": "x"}, *question(data_url(5))]
    assert num_tokens(turns) > with_one_image + per_image


def test_a_function_is_called_beside_an_image(ask):
    choice, _ = ask(
        question(data_url(6)),
        tools=[{"type": "function", "function": {"name": "paint", "parameters": _COLOUR}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    )
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_remote_urls_are_refused(post, scheme):
    messages = question(f"{scheme}://127.0.0.1:9/image.png")
    status, answer = post("/chat/completions", max_tokens=8, messages=messages)
    assert status == 400, answer
    assert f"the URL has the scheme {scheme}" in answer["error"]["message"]
    assert "data:image/png;base64" in answer["error"]["message"]


def test_a_file_url_reads_only_from_the_configured_folder(post, ask, folder):
    (folder / "one.png").write_bytes(base64.b64decode(png(1)))
    choice, _ = ask(question(f"file://{folder}/one.png"))
    assert choice["message"] == ask(question(data_url(1)))[0]["message"]
    for url in ("file:///etc/passwd", f"file://{folder}/../secret", f"file://{folder}/none.png"):
        status, answer = post("/chat/completions", max_tokens=8, messages=question(url))
        assert status == 400, answer
        assert "is not a regular file in the folder" in answer["error"]["message"]


def test_a_broken_image_is_refused_and_the_server_continues(post, ask):
    for content in ("iVBORw0KGgo=", "!"):
        started = time.monotonic()
        messages = question(f"data:image/png;base64,{content}")
        status, answer = post("/chat/completions", max_tokens=8, messages=messages)
        assert status == 400, answer
        assert time.monotonic() - started < 10
    assert ask(question(data_url(7)))[0]["message"]["content"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_large_legal_image_is_answered_soon(ask, kind):
    """The image has 16 million pixels. On an idle machine, the answer takes about one second."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((4000, 4000)).convert("RGB").save(file, kind)
    content = base64.b64encode(file.getvalue()).decode()
    started = time.monotonic()
    ask(question(f"data:image/{kind.lower()};base64,{content}"))
    assert time.monotonic() - started < 10


def test_a_prompt_that_the_model_cannot_process_ends_only_its_request(post, ask):
    """The prompt contains the token that starts audio, but no audio.

    For such a prompt, the code of the model cannot compute the positions of the tokens.
    """
    messages = question(data_url(1))
    messages[0]["content"][1]["text"] = "<audio_start_token>"
    for _ in range(4):  # more failures than the setting `max_step_failures` allows
        status, answer = post("/chat/completions", max_tokens=8, messages=messages)
        assert status == 400, answer
        assert "the model cannot process the images of this prompt" in answer["error"]["message"]
    assert ask(question(data_url(7)))[0]["message"]["content"]
