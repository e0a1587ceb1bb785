"""Tests that clients can send a video as a list of image files, which are called frames."""

import base64
import io

import pytest
from backend.vision import image_archs
from backend.vision.image_archs import film, open_engine, picture
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.image_prompts import take_media
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.messages import read_video, split_messages
from nereid_backend.vision.video_frames import read_video_url
from transformers.utils import is_torchvision_available

# The first type has positions in time, and the second type has a plain encoder.
TYPES = ("qwen2_vl", "llava_onevision")


def frame(seed: int, width: int = 8, height: int = 6) -> str:
    """Return an image file with random pixels in base64."""
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(*frames: str, parameters: str = "") -> str:
    """Return a data URL with the frames of a video."""
    return f"data:video/jpeg{parameters};base64,{','.join(frames)}"


def split(part: dict, limits: ImageLimits | None = None):
    """Read a chat with the parts `part` and a text, and return the video that `part` contains."""
    text_part = {"type": "text", "text": "What happens?"}
    messages, (video,) = split_messages(
        [{"role": "user", "content": [part, text_part]}], limits or ImageLimits()
    )
    assert messages[0]["content"][0] == {"type": "video"}
    return video


A, B = frame(1), frame(2)
FORMS = {
    "a data URL": ({"type": "video_url", "video_url": {"url": data_url(A, B)}}, 2.0),
    "a data URL with fps": (
        {"type": "video_url", "video_url": {"url": data_url(A, B, parameters=";fps=4")}},
        4.0,
    ),
    "fps beside the URL": (
        {"type": "video_url", "video_url": {"url": data_url(A, B), "fps": 0.5}},
        0.5,
    ),
    "fps of null in the object": (
        {"video_url": {"url": data_url(A, B), "fps": None}, "fps": 4},
        4.0,
    ),
    "fps of one frame each day": (
        {"type": "video_url", "video_url": {"url": data_url(A, B), "fps": 1 / 86_400}},
        1 / 86_400,
    ),
    "fps with many digits": (
        {"type": "video_url", "video_url": {"url": data_url(A, B), "fps": 24_000 / 1001}},
        24_000 / 1001,
    ),
    "no type": ({"video_url": {"url": data_url(A, B)}}, 2.0),
    "a list": (
        {"type": "video", "video": [f"data:image/png;base64,{each}" for each in (A, B)], "fps": 1},
        1.0,
    ),
}


@pytest.mark.parametrize(("part", "fps"), FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_frames(part, fps):
    video = split(part)
    assert video.video.fps == fps
    frames = read_video(video, ImageLimits())
    assert [image.tobytes() for image in frames] == [picture(n, 8, 6).tobytes() for n in (1, 2)]
    body = {"messages": [{"role": "user", "content": [part]}]}
    (url,) = take_media(body)
    assert body["messages"][0]["content"] == [{"type": "video"}]
    video_in_body = read_video_url(url.decode(), "image", ImageLimits())
    assert (list(video_in_body.frames), video_in_body.fps) == ([A, B], fps)


WRONG = {
    "a video file": ({"type": "video_url", "video_url": {"url": "data:video/mp4;AAAA"}}, "decodes"),
    "a remote URL": ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, "decodes no"),
    "no video": ({"type": "video"}, "has no video. Send the frames"),
    "an empty list": ({"type": "video", "video": []}, "has no video"),
    "a remote frame": ({"type": "video", "video": ["https://a/b.png"]}, "each frame of the video"),
    "fps of 0": ({"type": "video_url", "video_url": {"url": data_url(A), "fps": 0}}, "fps, the"),
    "fps above all floats": (
        {"type": "video_url", "video_url": {"url": data_url(A), "fps": 10**400}},
        "fps, the",
    ),
    "fps as a text": ({"type": "video", "video": [], "fps": "x"}, "has no video"),
    "too many frames": (
        {"type": "video_url", "video_url": {"url": data_url(*[A] * 5)}},
        "at most 4 frames",
    ),
}


@pytest.mark.parametrize(("part", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_video_is_refused_with_a_remedy(part, message):
    with pytest.raises(RequestError, match=message):
        split(part, ImageLimits(max_frames=4))


def test_the_frames_of_all_videos_are_counted_together():
    part = {"type": "video_url", "video_url": {"url": data_url(A, B)}}
    with pytest.raises(RequestError, match="at most 3 frames"):
        split_messages([{"role": "user", "content": [part, part]}], ImageLimits(max_frames=3))


DAMAGED = {
    "base64": ("!!!", "frame 1: the base64 content is damaged"),
    "image": (base64.b64encode(b"no image").decode(), "frame 1: the file is not an image"),
    "size": (frame(2, 8, 8), "frame 1 has 8 x 8 pixels, but frame 0 has 8 x 6 pixels"),
}


@pytest.mark.parametrize(("second", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_frame_is_named(second, message):
    video = split({"type": "video_url", "video_url": {"url": data_url(A, second)}})
    with pytest.raises(RequestError, match=message):
        read_video(video, ImageLimits())


@pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is not installed")
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_equal_those_of_generate(model_type, tmp_path):
    folder, chats, expected, depends_on_videos = image_archs.build(
        model_type, tmp_path, kind="video"
    )
    assert depends_on_videos
    engine = open_engine(folder, block_size=4, max_num_batched_tokens=32)
    try:
        assert "videos" not in engine._parts.images.refused
        assert image_archs._mixed(engine, chats) == expected
        engine.check()
        assert image_archs._cached(engine, chats) == expected
    finally:
        engine.close()


def test_a_model_that_reads_only_images_refuses_videos_and_audio(tmp_path):
    folder = image_archs.image_types.save("idefics2", tmp_path, "small")
    engine = open_engine(folder)
    try:
        assert engine._parts.images.name == "packed"
        with pytest.raises(RequestError, match="videos are refused, because the checkpoint's proc"):
            engine.image_prompt(image_archs.video_chat([film(1, 2)], "hello"))
        with pytest.raises(RequestError, match=r"audio is refused, because .* Send a transcript"):
            engine.image_prompt(image_archs.audio_chat([image_archs.noise(1, 0.6)], "hello"))
    finally:
        engine.close()
