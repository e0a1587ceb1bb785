# SPDX-License-Identifier: Apache-2.0
"""Decodes WebP images without animation directly into the memory of a Pillow image.

Pillow decodes each WebP file as an animation. For an image of 16 million pixels, the decoder of
animations needs 192 MB in addition to the 64 MB of the decoded image. This module calls the
function for still images in the library libwebp, which Pillow has loaded. The pixels are the same.
"""

import ctypes
import struct
from functools import cache
from typing import Any

from nereid_backend.vision.shared_pixels import PixelMemory

_PIXEL_BYTES = 4
_HEADER_BYTES = 12
_CHUNK_HEADER_BYTES = 8
_PIXEL_CHUNKS = (b"VP8X", b"ALPH", b"VP8 ", b"VP8L")


def decode_still_webp(image: Any, data: bytes) -> Any:  # noqa: ANN401 - images of Pillow
    """Decode a WebP file with libwebp, and return a new image; None if Pillow must decode the file.

    Pillow must decode the file if it contains an animation, or if libwebp cannot be called.

    Args:
        image: the image that `PIL.Image.open` has returned. Its pixels are not decoded yet.
        data: the content of the file.
    """
    import PIL.Image

    library = _libwebp()
    if library is None or image.n_frames != 1 or image.mode not in ("RGB", "RGBA"):
        return None
    pixel_file = _with_pixel_chunks_only(data)
    if _size_in_header(library, pixel_file) != image.size:
        return None
    decoded = PIL.Image.new(image.mode, image.size)
    if not _decode_into(library, pixel_file, decoded):
        return None
    # `image.info` contains the EXIF data of the file. The EXIF data may contain a rotation.
    decoded.info = image.info
    return decoded


def _size_in_header(library: ctypes.CDLL, data: bytes) -> tuple[int, int] | None:
    """Return the width and the height of a WebP file; None if the file is not valid."""
    width, height = ctypes.c_int(), ctypes.c_int()
    is_valid = library.WebPGetInfo(data, len(data), ctypes.byref(width), ctypes.byref(height))
    return (width.value, height.value) if is_valid else None


def _decode_into(library: ctypes.CDLL, data: bytes, image: Any) -> bool:  # noqa: ANN401 - an image of Pillow
    """Decode a WebP file into the memory of a new RGB or RGBA image of the same size.

    Pillow stores each pixel in four bytes. In the mode RGB, Pillow ignores the fourth byte.
    Therefore libwebp can write RGBA pixels even into the memory of an RGB image.

    Return whether the pixels were written. They are not written if the file is damaged, or if the
    memory of the image is not available.
    """
    try:
        memory = PixelMemory(image)
    except ValueError:
        return False
    row_bytes = _PIXEL_BYTES * image.width
    num_bytes = row_bytes * image.height
    pixels = library.WebPDecodeRGBAInto(data, len(data), memory.address, num_bytes, row_bytes)
    return pixels is not None


def _with_pixel_chunks_only(data: bytes) -> bytes:
    """Return a WebP file without the chunks that libwebp does not need, such as EXIF.

    libwebp detects that the pixels of a damaged file are incomplete only if no chunk follows the
    pixels.

    Example: the chunks VP8X, ICCP, VP8 and EXIF become the chunks VP8X and VP8.
    """
    content = memoryview(data)
    kept = []
    start = _HEADER_BYTES
    while start + _CHUNK_HEADER_BYTES <= len(data):
        name, num_bytes = struct.unpack_from("<4sI", data, start)
        # A WebP file consists of chunks. If a chunk has an odd number of bytes, one padding byte
        # follows.
        end = start + _CHUNK_HEADER_BYTES + num_bytes + num_bytes % 2
        if name in _PIXEL_CHUNKS:
            kept.append(content[start:end])
        start = end
    num_kept = sum(map(len, kept))
    if num_kept == len(data) - _HEADER_BYTES:
        return data
    # The size in the header counts the four bytes "WEBP".
    header = struct.pack("<4sI4s", b"RIFF", num_kept + 4, b"WEBP")
    return b"".join([header, *kept])


@cache
def _libwebp() -> ctypes.CDLL | None:
    """Return the library libwebp that Pillow has loaded; None if its functions are not found."""
    try:
        from PIL import _webp

        # Pillow's extension module `_webp` is linked to libwebp, so ctypes finds the functions of
        # libwebp in this module.
        library = ctypes.CDLL(_webp.__file__)
        get_info, decode = library.WebPGetInfo, library.WebPDecodeRGBAInto
    except (ImportError, OSError, AttributeError):
        return None
    # int WebPGetInfo(const uint8_t* data, size_t data_size, int* width, int* height)
    size_pointer = ctypes.POINTER(ctypes.c_int)
    get_info.argtypes = [ctypes.c_char_p, ctypes.c_size_t, size_pointer, size_pointer]
    get_info.restype = ctypes.c_int
    # uint8_t* WebPDecodeRGBAInto(const uint8_t* data, size_t data_size,
    #                             uint8_t* output_buffer, size_t output_buffer_size,
    #                             int output_stride), which returns NULL for a damaged file
    decode.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    decode.restype = ctypes.c_void_p
    return library
