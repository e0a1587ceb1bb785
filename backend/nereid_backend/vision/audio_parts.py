# SPDX-License-Identifier: Apache-2.0
"""Reads audio in the content parts of chat messages. Only WAV files are decoded.

The formats of OpenAI and vLLM are accepted:

    {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,BASE64"}}

A caller of the engine can also send arrays: {"type": "audio", "audio": ARRAY, "sampling_rate": N}.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_data_urls import decode_base64
from nereid_backend.vision.read_wav import (
    Samples,
    check_duration,
    check_rate,
    decode_wav,
    resample,
)

# The data types that an array of audio may have, as values of NumPy's `dtype.kind`: signed integers
# (i), unsigned integers (u) and floating-point numbers (f).
_KINDS_OF_NUMBERS = "iuf"
_TYPES = ("audio", "audio_url", "input_audio")
# The fields of a content part in which a client can send the audio.
_FIELDS = ("input_audio", "audio_url", "audio", "url")
_DATA_URL = re.compile(r"data:audio/(?:wav|x-wav|wave|vnd\.wave);base64,", re.IGNORECASE)
_REMEDY = 'Send WAV: {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}.'


@dataclass(frozen=True, slots=True)
class FoundAudio:
    """Audio in a chat message.

    Attributes:
        field: the name of the content part, such as `messages[0].content[1]`.
        source: the base64 text of a WAV file, the bytes of a WAV file, or an array of samples.
        rate: the sampling rate of an array; None for a file.
    """

    field: str
    source: Any
    rate: int | None = None


def is_audio_part(part: Mapping[str, Any]) -> bool:
    """Return whether a content part is audio.

    In vLLM's API, a content part can have no type. Example: {"audio_url": {"url": "data:..."}}.
    """
    kind = part.get("type")
    return kind in _TYPES or (kind is None and any(name in part for name in _TYPES))


def is_audio_url(url: str) -> bool:
    """Return whether a text is a data URL of audio."""
    return url[:11].lower() == "data:audio/"


def audio_url(audio: FoundAudio) -> str:
    """Return `audio` as a data URL. `audio.source` is the base64 text of a WAV file."""
    return f"data:audio/wav;base64,{audio.source}"


def read_audio_url(url: str, field: str) -> FoundAudio:
    """Return the audio in a data URL.

    Example: "data:audio/wav;base64,UklGRg==" returns audio with the source "UklGRg==".

    Raises:
        RequestError: the text is not a data URL of a WAV file.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise RequestError(
            f"{field}: the URL must be a data URL such as data:audio/wav;base64,..., but it begins "
            f"with {shown(url[:30])}. The server reads no remote files and decodes only WAV. "
            f"{_REMEDY}"
        )
    return FoundAudio(field, url[match.end() :])


def read_audio_part(part: Mapping[str, Any], field: str) -> FoundAudio:
    """Return the audio in a content part. The audio is not decoded yet.

    The value of the part can be an object with a base64 text or a data URL, a data URL alone, the
    bytes of a file, or an array of samples. A base64 text without an object is refused. Example:
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}} returns audio with
    the source "UklGRg==".

    Args:
        part: a content part for which `is_audio_part` returns true.
        field: the name of the content part, for error messages.

    Raises:
        RequestError: the content part has no audio, or the format of the audio is not WAV.
    """
    value = next((part[name] for name in _FIELDS if part.get(name) is not None), None)
    if not isinstance(value, Mapping):
        return _read_source(value, part, field)
    _check_format(value.get("format"), field)
    base64_text = value.get("data")
    if isinstance(base64_text, str) and base64_text:
        return FoundAudio(field, base64_text)
    return _read_source(value.get("url"), part, field)


def _read_source(source: Any, part: Mapping[str, Any], field: str) -> FoundAudio:  # noqa: ANN401
    """Return the audio that a client sent as a data URL, a file's bytes, or an array of samples.

    The content part `part` contains the sampling rate of an array. Raise a RequestError for any
    other source.
    """
    match source:
        case str() if source:
            return read_audio_url(source, field)
        case bytes():
            return FoundAudio(field, source)
        case np.ndarray():
            return FoundAudio(field, source, _sampling_rate(part, field))
    raise RequestError(f"{field}: the content part has no audio. {_REMEDY}")


def _check_format(declared: Any, field: str) -> None:  # noqa: ANN401 - any JSON value
    """Raise a RequestError if the client declares a format other than WAV.

    A missing format, or a format with the value null, means WAV.
    """
    if declared not in (None, "wav"):
        raise RequestError(
            f"{field}: the audio has the format {shown(declared)}, but the server decodes only "
            f"WAV. {_REMEDY}"
        )


def _sampling_rate(part: Mapping[str, Any], field: str) -> int:
    """Return the sampling rate that a content part declares for its array of samples.

    Raises:
        RequestError: the sampling rate is missing or is not an integer.
    """
    rate = part.get("sampling_rate")
    if isinstance(rate, bool) or not isinstance(rate, int):
        raise RequestError(
            f"{field}: the sampling_rate of an array must be an integer, but it is {shown(rate)}."
        )
    return rate


def read_audio(found: Sequence[FoundAudio], rate: int, limits: ImageLimits) -> list[Samples]:
    """Decode audio, and resample the audio to the sampling rate `rate`.

    Raises:
        RequestError: a file is damaged or exceeds a limit, or all audio together is too long.
    """
    clips: list[Samples] = []
    for each in found:
        samples, old_rate = _decode(each, limits)
        clips.append(resample(samples, old_rate, rate))
        check_duration(sum(map(len, clips)), rate, each.field, limits)
    return clips


def _decode(audio: FoundAudio, limits: ImageLimits) -> tuple[Samples, int]:
    """Decode audio from a WAV file or an array. Return the samples and the sampling rate.

    Raises:
        RequestError: the file is damaged or exceeds a limit, or the array is not valid.
    """
    source, field = audio.source, audio.field
    if isinstance(source, str):
        return decode_wav(decode_base64(source, field, limits), field, limits)
    if isinstance(source, bytes):
        return decode_wav(source, field, limits)
    assert audio.rate is not None, "read_audio_part stores the sampling rate of each array"
    return _convert_array(np.asarray(source), audio.rate, field, limits), audio.rate


def _convert_array(
    array: "np.ndarray[Any, Any]", rate: int, field: str, limits: ImageLimits
) -> Samples:
    """Return the samples in an array that a caller has sent, as float32 numbers.

    Raises:
        RequestError: the array or its sampling rate `rate` is not valid, or the audio is too long.
    """
    check_rate(rate, field)
    if array.ndim != 1 or array.dtype.kind not in _KINDS_OF_NUMBERS:
        raise _array_error(field)
    # Check the duration before the values, because the check of a huge array would take long.
    check_duration(len(array), rate, field, limits)
    if not np.isfinite(array).all():
        raise _array_error(field)
    return array.astype(np.float32)


def _array_error(field: str) -> RequestError:
    """Return the error for an array that does not have the form of audio."""
    return RequestError(f"{field}: an array of audio must have one axis and finite numbers.")
