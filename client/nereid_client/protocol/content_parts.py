"""Content parts in requests to embedding models and rerankers: texts and images."""

from typing import Any

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.refused import AUDIO_PARTS, VIDEO_PARTS

_CONTENT_PARTS = ("text", "image", "image_url")
_REFUSED_PARTS = {
    **dict.fromkeys(VIDEO_PARTS, "this endpoint reads no videos; send frames as images"),
    **dict.fromkeys(AUDIO_PARTS, "this endpoint reads no audio; send a transcript as text"),
}
"""Maps the key of a refused content part to the reason for the refusal and an alternative."""


def refuse_videos_and_audio(part: dict[str, Any], field: str, place: str) -> None:
    """Check that a content part has no video and no audio.

    Args:
        part: the content part.
        field: the request field that contains the part, such as "input", for the error's `param`.
        place: the path of the part in the request, such as "input[2]", for the error message.

    Raises: FieldError that names the key of the part and an alternative.
    """
    for name, remedy in _REFUSED_PARTS.items():
        if part.get(name) is not None:
            raise FieldError(field, f"{place} has {name}, but {remedy}")


def content_part(value: object, field: str, place: str) -> dict[str, str]:
    """Validate a content part, and return it as `{"text": ...}` or `{"image": ...}`.

    A part with a text and an image is returned with both keys.

    Example: OpenAI's {"type": "image_url", "image_url": {"url": "data:"}} returns
    {"image": "data:"}.

    Args:
        value: the content part, or a text.
        field: the request field that contains the part, such as "input", for the error's `param`.
        place: the path of the part in the request, such as "input[2]", for the error message.

    Raises: FieldError if the value is no content part, or if its content is not supported.
    """
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise FieldError(
            field,
            f"{place} must be a string or a content part, but the request has {shown(value)}",
        )
    refuse_videos_and_audio(value, field, place)
    names = [name for name in _CONTENT_PARTS if value.get(name) is not None]
    has_two_images = "image" in names and "image_url" in names
    if not names or has_two_images:
        raise FieldError(
            field,
            f"{place} must have text, or one of image and image_url, or both a text and an image, "
            f"but the request has {shown(value)}",
        )
    part = {}
    for name in names:
        key = "text" if name == "text" else "image"
        part[key] = _content_of(value, name, field, place)
    return part


def _content_of(part: dict[str, Any], name: str, field: str, place: str) -> str:
    """Return the value of the key `name` in a content part: a text, or the URL of an image."""
    content = part[name]
    if name == "image_url" and isinstance(content, dict):
        content = content.get("url")  # the object is OpenAI's format
    if not isinstance(content, str):
        raise FieldError(
            field, f"{place}.{name} must be a string, but the request has {shown(content)}"
        )
    return content
