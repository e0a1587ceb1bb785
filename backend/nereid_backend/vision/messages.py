# SPDX-License-Identifier: Apache-2.0
"""Separates the images, videos and audio of a chat from the messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nereid_backend.errors import RequestError
from nereid_backend.vision.audio_parts import FoundAudio, is_audio_part, read_audio_part
from nereid_backend.vision.decode_image import ImageLimits, check_size, decode_image
from nereid_backend.vision.image_data_urls import decode_base64, decode_data_url
from nereid_backend.vision.refused_parts import refused_part
from nereid_backend.vision.video_frames import (
    VideoFrames,
    check_num_frames,
    is_video_part,
    read_video_part,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGE_TYPES = ("image_url", "image", "input_image")
# The fields of a content part in which a client can send the image. If several fields are set, the
# field that comes first in this tuple is used.
IMAGE_FIELDS = ("image_url", "image", "url")


@dataclass(frozen=True, slots=True)
class FoundImage:
    """An image in a chat message.

    Attributes:
        field: the name of the request field that contains the image, such as
            `messages[0].content[1].image_url`.
        source: a data URL, the bytes of an image file, or an image of Pillow.
    """

    field: str
    source: Any


@dataclass(frozen=True, slots=True)
class FoundVideo:
    """A video in a chat message.

    Attributes:
        field: the name of the content part, such as `messages[0].content[1]`.
        video: the frames of the video.
    """

    field: str
    video: VideoFrames


# An image, a video or an audio file in a chat message. The file is not decoded yet.
Medium = FoundImage | FoundVideo | FoundAudio
KIND_OF = {FoundImage: "images", FoundVideo: "videos", FoundAudio: "audio"}
"""Maps a class of media to the member of `KINDS`."""
# Maps a class of media to the type of the placeholders in the messages.
_PLACEHOLDER_TYPES = {FoundImage: "image", FoundVideo: "video", FoundAudio: "audio"}


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Return whether a content part is an image.

    In vLLM's API, the field type may be missing. Example: {"image_url": {"url": "data:..."}}.
    """
    kind = part.get("type")
    return kind in _IMAGE_TYPES or (kind is None and any(name in part for name in _IMAGE_TYPES))


def split_messages(
    messages: Sequence[Mapping[str, Any]], limits: ImageLimits
) -> tuple[list[dict[str, Any]], list[Medium]]:
    """Replace each image, video and audio file in chat messages by a placeholder.

    Return the new messages, and a list of the images, videos and audio files in their order.

    Example: a message with the content [{"type": "image_url", "image_url": {"url": "data:..."}},
    {"type": "text", "text": "Hi"}] gets the content [{"type": "image"}, {"type": "text", "text":
    "Hi"}], and "data:..." is the only image.

    Raises:
        RequestError: a content part is invalid, a content part is a file, or there are too many
            images.
    """
    media: list[Medium] = []
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: the message must be an object.")
        new_message = dict(message)
        content = message.get("content")
        if isinstance(content, list | tuple):
            # `_split_part` appends the file of a part to `media`.
            new_message["content"] = [
                _split_part(part, f"messages[{index}].content[{number}]", media, limits)
                for number, part in enumerate(content)
            ]
        result.append(new_message)
    check_numbers(media, limits)
    return result, media


def check_numbers(media: Sequence[Medium], limits: ImageLimits) -> None:
    """Raise a RequestError if a request has too many images, video frames or audio files."""
    num_images = sum(isinstance(item, FoundImage) for item in media)
    if num_images > limits.max_images:
        raise RequestError(
            f"messages: the request has {num_images} images, but the limit is {limits.max_images}. "
            "Send fewer images."
        )
    num_frames = sum(len(item.video.frames) for item in media if isinstance(item, FoundVideo))
    check_num_frames(num_frames, "messages", limits)
    num_audios = sum(isinstance(item, FoundAudio) for item in media)
    if num_audios > limits.max_audios:
        raise RequestError(
            f"messages: the request has {num_audios} audio files, but the limit is "
            f"{limits.max_audios}. Send fewer audio files."
        )


def _split_part(
    part: Any,  # noqa: ANN401 - any JSON value
    field: str,
    media: list[Medium],
    limits: ImageLimits,
) -> dict[str, Any]:
    """Return a placeholder for an image, a video or audio. Return any other part unchanged.

    Example: {"type": "image_url", "image_url": {"url": "data:..."}} returns {"type": "image"}.

    Args:
        part: one part of the content of a message.
        field: the name of the part in error messages, such as "messages[0].content[1]".
        media: the images, videos and audio files that precede the part. Mutated: if the part
            contains an image, a video or audio, this medium is appended.
        limits: the limits of the request.

    Raises:
        RequestError: the part is invalid, or is a file of another type.
    """
    if not isinstance(part, Mapping):
        raise RequestError(f"{field}: the content part must be an object.")
    medium = _read_medium(part, field, limits)
    if medium is None:
        return dict(part)
    media.append(medium)
    return {"type": _PLACEHOLDER_TYPES[type(medium)]}


def _read_medium(part: Mapping[str, Any], field: str, limits: ImageLimits) -> Medium | None:
    """Return the image, the video or the audio in a content part; None for a part with text.

    Raises:
        RequestError: the part is invalid, or is a file of another type.
    """
    if is_video_part(part):
        return FoundVideo(field, read_video_part(part, field, limits))
    if is_audio_part(part):
        return read_audio_part(part, field)
    refused = refused_part(part)
    if refused is not None:
        kind, reason = refused
        raise RequestError(f"{field}: the content part has the type {kind}, but {reason}")
    return _read_image_part(part, field) if is_image_part(part) else None


def _read_image_part(part: Mapping[str, Any], field: str) -> FoundImage:
    """Return the image in a content part. The image is not decoded yet."""
    names = [name for name in IMAGE_FIELDS if part.get(name) is not None]
    if names:
        source = part[names[0]]
        if isinstance(source, Mapping):
            source = source.get("url")
        is_empty_text = isinstance(source, str) and not source
        if source is not None and not is_empty_text:
            return FoundImage(f"{field}.{names[0]}", source)
    raise RequestError(f"{field}: the content part has no image. Set image_url.url.")


def decode_and_free_images(media: list[Medium], limits: ImageLimits) -> list["Image"]:
    """Decode the images in `media`, and free their files. Return the images in the same order.

    Videos and audio in `media` are left out.

    Raises:
        RequestError: an image is damaged or too large.
        ModelError: Pillow is not installed.

    Mutates: `media`. Each decoded image loses its source, so that the memory of the image file is
    freed before the next image is decoded.
    """
    images = []
    for index, item in enumerate(media):
        if isinstance(item, FoundImage):
            images.append(_decode(item, limits))
            media[index] = FoundImage(item.field, None)
    return images


def read_video(video: FoundVideo, limits: ImageLimits) -> list["Image"]:
    """Decode the frames of a video, and return the frames in the same order.

    Raises:
        RequestError: a frame is damaged or too large, or the frames have different sizes.
        ModelError: Pillow is not installed.
    """
    images: list[Image] = []
    # A frame is a base64 text, the bytes of an image file, or an image of Pillow.
    for number, frame in enumerate(video.video.frames):
        field = f"{video.field}: frame {number}"
        source = decode_base64(frame, field, limits) if isinstance(frame, str) else frame
        image = _decode(FoundImage(field, source), limits)
        images.append(image)
        first = images[0]
        if image.size != first.size:
            raise RequestError(
                f"{field} has {image.width} x {image.height} pixels, but frame 0 has {first.width} "
                f"x {first.height} pixels. All frames of a video must have the same size."
            )
    return images


def _decode(image: FoundImage, limits: ImageLimits) -> "Image":
    """Return the decoded image in RGB, as an image of Pillow.

    Raises:
        RequestError: the image is damaged or too large, or has a wrong type.
        ModelError: Pillow is not installed.
    """
    source, field = image.source, image.field
    if isinstance(source, str):
        return decode_image(decode_data_url(source, field, limits), field, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), field, limits)
    # Pillow may not be installed, so its images are recognised by their attributes.
    is_pillow_image = hasattr(source, "size") and hasattr(source, "convert")
    if not is_pillow_image:
        raise RequestError(
            f"{field}: the image must be a data URL, bytes or a Pillow image, but it is an "
            f"object of the type {type(source).__name__}."
        )
    check_size(source.size, field, limits)
    return source.convert("RGB")  # type: ignore[no-any-return]
