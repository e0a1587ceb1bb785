# SPDX-License-Identifier: Apache-2.0
"""Separates the images of a chat from the messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nereid_backend.errors import RequestError
from nereid_backend.vision.read_image import (
    ImageLimits,
    check_size,
    decode_data_url,
    decode_image,
)
from nereid_backend.vision.refused_parts import refused_part

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGE_TYPES = ("image_url", "image", "input_image")


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


def split_messages(
    messages: Sequence[Mapping[str, Any]], limits: ImageLimits
) -> tuple[list[dict[str, Any]], list[FoundImage]]:
    """Replace each image in messages by a placeholder. Return the new messages and the images.

    Example: a message with the content [{"type": "image_url", "image_url": {"url": "data:..."}},
    {"type": "text", "text": "Hi"}] gets the content [{"type": "image"}, {"type": "text", "text":
    "Hi"}], and "data:..." is the only image.

    Raises:
        RequestError: a content part is invalid, a content part is a video, audio or a file, or
            there are too many images.
    """
    images: list[FoundImage] = []
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: the message must be an object.")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [
                _split_part(part, f"messages[{index}].content[{number}]", images)
                for number, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        result.append(dict(message))
    if len(images) > limits.max_images:
        raise RequestError(
            f"messages: the request has {len(images)} images, but the limit is {limits.max_images}."
        )
    return result, images


def _split_part(part: Any, field: str, images: list[FoundImage]) -> dict[str, Any]:  # noqa: ANN401
    """Return a placeholder for an image part. Return any other content part unchanged.

    Mutates: `images`. The image is appended.
    """
    if not isinstance(part, Mapping):
        raise RequestError(f"{field}: the content part must be an object.")
    kind = part.get("type")
    refused = refused_part(part)
    if refused is not None:
        raise RequestError(f"{field}: the content part has the type {refused[0]}, but {refused[1]}")
    if kind not in _IMAGE_TYPES:
        return dict(part)
    name = next((n for n in ("image_url", "image", "url") if part.get(n) is not None), None)
    source = part[name] if name is not None else None
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None or (isinstance(source, str) and not source):
        raise RequestError(f"{field}: the content part has no image. Set image_url.url.")
    images.append(FoundImage(f"{field}.{name}", source))
    return {"type": "image"}


def read_images(images: Sequence[FoundImage], limits: ImageLimits) -> list["Image"]:
    """Decode images, and return them in the same order.

    Raises:
        RequestError: an image is damaged or too large.
        ModelError: Pillow is not installed.
    """
    return [_read(image, limits) for image in images]


def _read(image: FoundImage, limits: ImageLimits) -> "Image":
    source = image.source
    if isinstance(source, str):
        source = decode_data_url(source, image.field, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), image.field, limits)
    if not (hasattr(source, "size") and hasattr(source, "convert")):
        raise RequestError(
            f"{image.field}: the image must be a data URL, bytes or an image of Pillow, but it is "
            f"an object of the type {type(source).__name__}."
        )
    check_size(source.size, image.field, limits)
    return source.convert("RGB")  # type: ignore[no-any-return]
