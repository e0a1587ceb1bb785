# SPDX-License-Identifier: Apache-2.0
"""Reads videos that clients send as lists of image files. An image of a video is called a frame.

Nereid decodes no video files. A client sends the frames of a video in one of two formats:

    {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME,FRAME"}}
    {"type": "video", "video": ["data:image/jpeg;base64,FRAME", ...], "fps": 2}

The first format is also accepted by vLLM. Each FRAME is an image file in base64. A data URL can
contain the number of frames per second: "data:video/jpeg;fps=2;base64,FRAME,FRAME".
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_data_urls import IMAGE_DATA_URL

DEFAULT_FPS = 2.0
"""The number of frames per second if a client sends no `fps`."""

_TYPES = ("video", "video_url", "input_video")
# The fields of a content part in which a client can send the video.
_FIELDS = ("video_url", "video", "url")
_DATA_URL = re.compile(r"data:video/[a-z0-9.+-]*(?:;fps=([0-9.e-]{1,25}))?;base64,", re.IGNORECASE)
_REMEDY = (
    "Send the frames of the video as image files: "
    '{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME"}}.'
)
_MAX_FPS = 1000.0


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The frames of one video, before the image files are decoded.

    Attributes:
        frames: the frames in the order of time. Each frame is a base64 text, the bytes of an image
            file, or an image of Pillow.
        fps: the number of frames per second.
    """

    frames: Sequence[Any]
    fps: float = DEFAULT_FPS


def is_video_part(part: Mapping[str, Any]) -> bool:
    """Return whether a content part is a video.

    In vLLM's API, a content part can have no type. Example: {"video_url": {"url": "data:..."}}.
    """
    kind = part.get("type")
    return kind in _TYPES or (kind is None and any(name in part for name in _TYPES))


def is_video_url(url: str) -> bool:
    """Return whether a text is a data URL of a video."""
    return url[:11].lower() == "data:video/"


def read_video_url(url: str, field: str, limits: ImageLimits) -> VideoFrames:
    """Split a data URL of a video into the base64 texts of its frames.

    Example: "data:video/jpeg;base64,AA==,BB==" returns the frames ["AA==", "BB=="].

    Args:
        url: the data URL.
        field: the name of the request field, for error messages.
        limits: the limits of the request.

    Raises:
        RequestError: the text is not a data URL of frames, or there are too many frames.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RequestError(f"{field}: the server decodes no video files. {_REMEDY}")
    # Split at most `max_frames` times, so that even a very long URL gives a short list. If there
    # are more than `max_frames` frames, the list has `max_frames + 1` items, and the video is
    # refused.
    frames = url[match.end() :].split(",", limits.max_frames)
    check_num_frames(len(frames), field, limits)
    return VideoFrames(frames, _read_fps(match.group(1), field))


def read_video_part(part: Mapping[str, Any], field: str, limits: ImageLimits) -> VideoFrames:
    """Return the frames in a content part that contains a video.

    The field `video_url`, `video` or `url` contains a data URL of all frames, a list of frames, or
    an object with the fields `url` and `fps`. `fps` is the number of frames per second. Example:
    {"video": ["data:image/jpeg;base64,AA=="], "fps": 2} returns the frame "AA==" and 2 frames per
    second.

    Args:
        part: a content part for which `is_video_part` returns true.
        field: the name of the content part, for error messages.
        limits: the limits of the request.

    Raises:
        RequestError: the content part has no frames or too many frames.
    """
    source, fps = _source_and_fps(part)
    if isinstance(source, str):
        video = read_video_url(source, field, limits)
        # The field `fps` overrides the number of frames per second in the URL.
        return video if fps is None else replace(video, fps=_read_fps(fps, field))
    if not isinstance(source, list | tuple) or not source:
        raise RequestError(f"{field}: the content part has no video. {_REMEDY}")
    check_num_frames(len(source), field, limits)
    return VideoFrames([_read_frame(frame, field) for frame in source], _read_fps(fps, field))


def _source_and_fps(part: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the video of a content part and its field `fps`. A missing value is None.

    The video is a data URL or a list of frames.

    Example: {"video_url": {"url": "data:video/jpeg;base64,AA=="}, "fps": 2} returns
    ("data:video/jpeg;base64,AA==", 2).
    """
    value = next((part[name] for name in _FIELDS if part.get(name) is not None), None)
    fps = part.get("fps")
    if isinstance(value, Mapping):
        inner_fps = value.get("fps")
        return value.get("url"), fps if inner_fps is None else inner_fps
    return value, fps


def check_num_frames(num_frames: int, field: str, limits: ImageLimits) -> None:
    """Raise a RequestError if videos have more frames than the limit."""
    if num_frames > limits.max_frames:
        raise RequestError(
            f"{field}: a request can have at most {limits.max_frames} frames of videos. Send fewer "
            "frames for each second."
        )


def video_url(video: VideoFrames) -> str:
    """Return `video` as a data URL. `read_video_url` converts the URL back to the frames.

    Each frame of `video` must be a base64 text.
    """
    # `repr` keeps all digits of the number, such as 23.976023976 or 1.2e-05.
    return f"data:video/jpeg;fps={video.fps!r};base64,{','.join(video.frames)}"


def _read_frame(frame: Any, field: str) -> Any:  # noqa: ANN401 - a text, bytes or an image
    """Return a frame of a video: the base64 text of a data URL, or any other value unchanged.

    The data URL can be the field `url` of an object, so the frame {"url":
    "data:image/jpeg;base64,AA=="} returns "AA==". Of the other values, only bytes and images of
    Pillow are valid. `read_video` refuses all others.

    Raises:
        RequestError: the frame is a text, but not a data URL of an image.
    """
    source = frame.get("url") if isinstance(frame, Mapping) else frame
    return _base64_text(source, field) if isinstance(source, str) else source


def _base64_text(source: str, field: str) -> str:
    """Return the base64 text in the data URL of one frame.

    Example: "data:image/jpeg;base64,AA==" returns "AA==". Raise a RequestError if `source` is not a
    data URL of an image.
    """
    match = IMAGE_DATA_URL.match(source)
    # In the data URL of a video, commas separate the frames. Therefore a single frame contains no
    # comma.
    if match is None or "," in source[match.end() :]:
        raise RequestError(
            f"{field}: each frame of the video must be a data URL such as "
            "data:image/jpeg;base64,..."
        )
    return source[match.end() :]


def _read_fps(value: Any, field: str) -> float:  # noqa: ANN401 - any JSON value
    """Convert `value` to the number of frames per second. Return `DEFAULT_FPS` for None."""
    if value is None:
        return DEFAULT_FPS
    with suppress(TypeError, ValueError, OverflowError):
        fps = float(value)
        if 0 < fps <= _MAX_FPS:
            return fps
    raise RequestError(
        f"{field}: fps, the number of frames per second, must be between 0 and {_MAX_FPS:g}, "
        f"but it is {shown(value)}."
    )
