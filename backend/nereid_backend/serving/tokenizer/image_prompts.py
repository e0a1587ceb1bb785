# SPDX-License-Identifier: Apache-2.0
"""Builds prompts with images, videos or audio.

A separate process does the work (vision/image_worker.py).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.chat.chat_messages import (
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
)
from nereid_backend.vision.audio_parts import audio_url, is_audio_part, read_audio_part
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_sources import ImageSources
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle
from nereid_backend.vision.messages import IMAGE_FIELDS, is_image_part
from nereid_backend.vision.video_frames import is_video_part, read_video_part, video_url

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# An object in config.json describes an encoder if the key of the object contains one of these
# words.
_ENCODER_WORDS = ("vis", "audio", "encoder")
# The largest total size of a request's images, measured in bytes of base64 text. The limit applies
# to the images that the request contains and to the images that the server downloads or reads.
MAX_IMAGE_BYTES = 32 * 2**20
# The largest total size of the image files that the server downloads or reads. Base64 converts
# three bytes to four characters, so the base64 text of these files has at most MAX_IMAGE_BYTES
# characters.
_MAX_FILE_BYTES = MAX_IMAGE_BYTES * 3 // 4


def may_accept_media(model: str) -> bool:
    """Return whether a checkpoint's files describe a media encoder and a media processor.

    Media are images, videos and audio. Return True even if the checkpoint accepts only one of them,
    such as audio. An encoder converts media to embeddings for the model. A processor converts the
    files of a client to inputs of the encoder. The engine may still refuse all media, because only
    the engine checks whether it supports the model's architecture.

    Args:
        model: the folder of the checkpoint.
    """
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_processor = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    return has_processor and _describes_encoder(config)


def _describes_encoder(config: dict[str, Any]) -> bool:
    """Return whether the content of a checkpoint's config.json describes a media encoder.

    The description is an object such as `vision_config`, `visual`, `audio_config` or
    `encoder_config`. Models that convert an image to tokens have the key `vq_config` instead (VQ
    means vector quantisation).
    """
    if "vq_config" in config:
        return True
    names_of_objects = [name for name, value in config.items() if isinstance(value, dict)]
    return any(word in name for name in names_of_objects for word in _ENCODER_WORDS)


def has_image_parts(body: dict[str, Any] | None) -> bool:
    """Return whether the messages of a chat contain at least one image, video or audio file.

    Messages with a wrong type are ignored, because `read_messages` refuses them later.
    """
    messages = body.get("messages") if body is not None else None
    if not isinstance(messages, list):
        return False
    return any(_is_medium(part) for message in messages for part in _parts_of(message) or [])


def _parts_of(message: Any) -> list[Any] | None:  # noqa: ANN401 - any JSON value
    """Return the parts of a message's content; None if the content is not a list of parts."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else None


def _is_medium(part: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether a part of a message's content is an image, a video or audio."""
    if not isinstance(part, dict):
        return False
    return is_image_part(part) or is_video_part(part) or is_audio_part(part)


def take_media(body: dict[str, Any]) -> list[bytes]:
    """Replace each image, video and audio file in the messages of a chat by a placeholder.

    Return the images, videos and audio files, which are called media. A video is returned as one
    data URL that contains its frames, and an audio file is returned as a data URL.

    Example: the part {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    becomes {"type": "image"}, and b"data:image/png;base64,iVBO" is returned.

    Raises:
        RequestError: an image part has no URL, a video part has no frames, or audio is not WAV.

    Mutates: `body`.
    """
    media: list[bytes] = []
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_take_media_of(message, media) for message in messages]
    return media


def _take_media_of(message: Any, media: list[bytes]) -> Any:  # noqa: ANN401 - any JSON value
    """Replace each image, video and audio file in a chat message by a placeholder.

    Return the new message. If the content of a message is not a list, the message contains no such
    files, and is returned unchanged.

    Mutates: `media`. The images, videos and audio files of the message are appended.
    """
    parts = _parts_of(message)
    if parts is None:
        return message
    content = []
    for part in parts:
        if _is_medium(part):
            medium = _read_medium(part)
            # JSON can contain characters such as "\ud800", which are not valid in UTF-8. The option
            # "surrogatepass" encodes these characters anyway. The function that reads the source
            # later raises a RequestError for them.
            media.append(medium.source.encode("utf-8", "surrogatepass"))
            content.append(medium.placeholder)
        else:
            content.append(part)
    return {**message, "content": content}


class _Medium(NamedTuple):
    """An image, a video or audio: a URL or base64 text, and the placeholder for the message."""

    source: str
    placeholder: dict[str, str]


def _read_medium(part: dict[str, Any]) -> _Medium:
    """Read a part of a message's content that contains an image, a video or audio.

    The source of a video or of audio is always a data URL. If the part contains only base64 text, a
    data URL is made from this text.
    """
    if is_video_part(part):
        return _Medium(_video_source(part), VIDEO_PLACEHOLDER)
    if is_audio_part(part):
        return _Medium(audio_url(read_audio_part(part, "messages")), AUDIO_PLACEHOLDER)
    return _Medium(_image_source(part), IMAGE_PLACEHOLDER)


def _video_source(part: dict[str, Any]) -> str:
    """Return a data URL that contains the frames of a video part."""
    video = read_video_part(part, "messages", ImageLimits())
    if not all(isinstance(frame, str) for frame in video.frames):
        raise RequestError("messages: each frame of a video must be a string in base64.")
    return video_url(video)


def _image_source(part: dict[str, Any]) -> str:
    """Return the URL or the base64 text of an image part.

    The parts `{"image_url": {"url": URL}}`, `{"image_url": URL}` and `{"image_url": None, "image":
    URL}` return URL.
    """
    source = next((part[name] for name in IMAGE_FIELDS if part.get(name) is not None), None)
    if isinstance(source, dict):
        source = source.get("url")
    if not isinstance(source, str) or not source:
        raise RequestError(
            "messages: an image part must have image_url.url, a data URL such as "
            "data:image/png;base64,..."
        )
    return source


class ImagePrompts:
    """Builds prompts with images in a separate process."""

    def __init__(self, model: str, sources: ImageSources | None = None) -> None:
        """Store the arguments without starting the process.

        Args:
            model: the folder of the checkpoint.
            sources: reads images from remote URLs and file URLs. None means that such URLs are
                refused.
        """
        self._sources = sources or ImageSources()
        self._process = ImageWorkerHandle("nereid_backend.vision.image_worker", model)

    def warm_up(self) -> None:
        """Start the process, so that the first request with an image does not wait for the start.

        If the start fails, the first request with an image starts the process again and reports the
        error.
        """
        self._process.warm_up()

    def prepare(
        self, text: str, images: list[bytes], *, add_special_tokens: bool | None = None
    ) -> tuple[list[int], bytes]:
        """Return the token ids of a prompt with images, and the packed inputs of the image encoder.

        The method is thread-safe. The process prepares requests one after another.

        Args:
            text: the rendered prompt, with one placeholder for each image.
            images: the images. Each image is a URL or base64 text.
            add_special_tokens: whether the tokenizer adds its special tokens. None means that they
                are added unless the text begins with the BOS token.

        Raises:
            RequestError: an image is invalid or exceeds a limit.
            EngineError: the process has ended or cannot be started.
        """
        images_in_base64 = self._sources.read(images, ImageLimits(), _MAX_FILE_BYTES)
        num_bytes = sum(map(len, images_in_base64))
        if num_bytes > MAX_IMAGE_BYTES:
            raise RequestError(
                f"messages: the images have {num_bytes} bytes in base64, but the limit is "
                f"{MAX_IMAGE_BYTES} bytes. Send smaller images."
            )
        token_ids, packed_images = self._process.call([text, images_in_base64, add_special_tokens])
        return token_ids, packed_images

    def close(self) -> None:
        """End the process."""
        self._process.close()
