# SPDX-License-Identifier: Apache-2.0
"""Decodes WAV files from untrusted clients, and changes the sampling rate of the audio.

A WAV file consists of chunks. The chunk "fmt " describes the samples, and the chunk "data" contains
them. A sample is one number for each channel. The Python module `wave` reads no samples that are
floating-point numbers, so this module reads the chunks itself.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nereid_backend.errors import RequestError
from nereid_backend.vision.decode_image import ImageLimits

Samples = np.ndarray[tuple[int], np.dtype[np.float32]]
"""The samples of one channel, numbers between -1 and 1."""

MIN_RATE, MAX_RATE = 4_000, 192_000
"""The limits of the sampling rate, in samples for each second."""

_REMEDY = (
    "Send WAV with PCM samples of 8, 16, 24 or 32 bits or with floating-point samples of 32 bits."
)
_FILE_HEADER_BYTES = 12
_CHUNK_HEADER_BYTES = 8
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# A program that writes a WAV file into a pipe does not know the size of the last chunk. The program
# then writes a huge size: FFmpeg 0xFFFFFFFF, arecord about 0x80000000, SoX 0x7FFFF000. Such a file
# would be larger than any limit, so a size of at least `_MIN_UNKNOWN_SIZE` means that the size is
# unknown.
_MIN_UNKNOWN_SIZE = 0x7FFF0000
# The accepted formats of a sample: the kind of number, and the number of bits.
_FORMATS = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32)}


class _Format(NamedTuple):
    """The content of the chunk "fmt "."""

    kind: int
    num_channels: int
    rate: int
    num_bits: int


def decode_wav(data: bytes, field: str, limits: ImageLimits) -> tuple[Samples, int]:
    """Decode a WAV file. Return its samples and its sampling rate.

    The two channels of a stereo file are averaged.

    Args:
        data: the content of the file.
        field: the name of the request field, for error messages.
        limits: the limits of the request.

    Raises:
        RequestError: the file is not a WAV file, is damaged or exceeds a limit.
    """
    if len(data) > limits.max_bytes:
        raise RequestError(
            f"{field}: the audio file has {len(data)} bytes, but the limit is {limits.max_bytes}. "
            "Send a shorter file, or a lower sampling rate."
        )
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise RequestError(f"{field}: the file is not a WAV file. {_REMEDY}")
    layout: _Format | None = None
    for name, content in _chunks(data, field):
        if name == b"fmt ":
            layout = _read_format(content, field)
        elif name == b"data" and layout is not None:
            return _decode(content, layout, field, limits), layout.rate
    raise RequestError(
        f'{field}: the WAV file must have a chunk "fmt ", followed by a chunk "data".'
    )


def check_rate(rate: int, field: str) -> None:
    """Raise a RequestError if a sampling rate is outside the limits."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise RequestError(
            f"{field}: the sampling rate must be between {MIN_RATE} and {MAX_RATE} Hz, but it is "
            f"{rate} Hz. Send another sampling rate."
        )


def check_duration(num_samples: int, rate: int, field: str, limits: ImageLimits) -> None:
    """Raise a RequestError if audio is empty or too long."""
    if num_samples == 0:
        raise RequestError(f"{field}: the audio has no samples. Send audio that is not empty.")
    if num_samples > limits.max_audio_s * rate:
        raise RequestError(
            f"{field}: the audio takes {num_samples / rate:.1f} seconds, but the limit is "
            f"{limits.max_audio_s:g} seconds. Send a shorter part of the audio."
        )


def resample(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Return the same audio with another sampling rate.

    The Fourier transform of the audio is cut or extended to the frequencies of the new rate, and
    transformed back. Frequencies that the new rate cannot express are removed.
    """
    if rate == new_rate:
        return samples
    # torch is imported here, because the process that reads requests does not resample audio and
    # starts faster without torch.
    import torch

    # The Fourier transform treats the audio as periodic, and would mix its end with its start.
    # Therefore at least one second of zeros is appended. The padded audio lasts a whole number of
    # seconds, so it has a whole number of samples at both sampling rates.
    num_seconds = len(samples) // rate + 2
    padded = torch.zeros(num_seconds * rate)
    padded[: len(samples)] = torch.from_numpy(samples)
    num_new = num_seconds * new_rate
    spectrum = torch.fft.rfft(padded)[: num_new // 2 + 1]
    resampled = torch.fft.irfft(spectrum, n=num_new) * (new_rate / rate)
    num_kept = max(1, round(len(samples) * new_rate / rate))
    result: Samples = resampled[:num_kept].numpy()
    return result


def _chunks(data: bytes, field: str) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the name and the content of each chunk of a WAV file.

    A WAV file consists of a header of 12 bytes and of chunks. A chunk consists of its name (4
    bytes), its size (4 bytes) and its content. Example: the first chunk is usually b"fmt ".
    """
    view = memoryview(data)
    start = _FILE_HEADER_BYTES
    while start + _CHUNK_HEADER_BYTES <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        content_start = start + _CHUNK_HEADER_BYTES
        num_left = len(data) - content_start
        if size >= _MIN_UNKNOWN_SIZE:  # The chunk extends to the end of the file.
            size = num_left
        if size > num_left:
            raise RequestError(
                f"{field}: the WAV file declares a chunk of {size} bytes, but only "
                f"{num_left} bytes follow. Send the complete file."
            )
        yield name, view[content_start : content_start + size]
        # If a chunk has an odd number of bytes, one padding byte follows.
        start = content_start + size + size % 2


def _read_format(content: memoryview, field: str) -> _Format:
    """Return the content of a WAV file's chunk "fmt ". This chunk describes the samples.

    Raises:
        RequestError: the chunk is damaged, or the format is not supported.
    """
    if len(content) < 16:
        raise RequestError(
            f'{field}: the chunk "fmt " of the WAV file has {len(content)} bytes, but it must have '
            "at least 16 bytes."
        )
    # The two ignored fields are the bytes per second and the bytes per frame.
    kind, num_channels, rate, _, _, num_bits = struct.unpack_from("<HHIIHH", content)
    if kind == _EXTENSIBLE and len(content) >= 26:
        # In the format "extensible", the type of the samples (integer or float) is at byte 24.
        (kind,) = struct.unpack_from("<H", content, 24)
    if (kind, num_bits) not in _FORMATS:
        raise RequestError(
            f"{field}: the samples of the WAV file have the format {kind} and {num_bits} bits, "
            f"which is not supported. {_REMEDY}"
        )
    if num_channels not in (1, 2):
        raise RequestError(
            f"{field}: the WAV file has {num_channels} channels, but only 1 or 2 channels are "
            "supported. Send mono or stereo."
        )
    check_rate(rate, field)
    return _Format(kind, num_channels, rate, num_bits)


def _decode(content: memoryview, layout: _Format, field: str, limits: ImageLimits) -> Samples:
    """Convert the content of a WAV file's chunk "data" to samples, float32 [num_samples].

    The samples are between -1 and 1. The two channels of a stereo file are averaged.
    """
    # A frame contains one sample of each channel.
    frame_bytes = layout.num_bits // 8 * layout.num_channels
    num_frames, num_left = divmod(len(content), frame_bytes)
    if num_left:
        raise RequestError(
            f"{field}: the samples of the WAV file have {len(content)} bytes, which is not a "
            f"multiple of {frame_bytes}. Send the complete file."
        )
    check_duration(num_frames, layout.rate, field, limits)
    if layout.kind == _FLOAT:
        samples = np.frombuffer(content, "<f4")
        if not np.isfinite(samples).all():
            raise RequestError(f"{field}: a sample of the WAV file is not a finite number.")
        # Samples outside the range from -1 to 1 are too loud, but not invalid. Clip these samples,
        # as audio players do.
        samples = samples.clip(-1.0, 1.0)
    else:
        samples = _scale_integers(content, layout.num_bits)
    samples = samples.astype(np.float32, copy=False)
    if layout.num_channels == 2:
        samples = samples.reshape(-1, 2).mean(axis=1)
    return samples


def _scale_integers(content: memoryview, num_bits: int) -> Samples:
    """Convert integers of 8, 16, 24 or 32 bits to samples between -1 and 1.

    Example: with 16 bits, the integer 16384 becomes 0.5.
    """
    if num_bits == 8:
        # Integers of 8 bits are unsigned, and 128 means silence.
        return (np.frombuffer(content, "u1").astype(np.float32) - 128) / 128
    if num_bits == 24:
        # numpy has no integers of three bytes. Multiply the integers by 256, by inserting a lowest
        # byte with the value 0, to get integers of 32 bits.
        wide = np.zeros((len(content) // 3, 4), "u1")
        wide[:, 1:] = np.frombuffer(content, "u1").reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    integers = np.frombuffer(content, f"<i{num_bits // 8}")
    return integers.astype(np.float32) / (1 << (num_bits - 1))
