# SPDX-License-Identifier: Apache-2.0
"""Decodes the base64 text of images, videos and audio that a request contains."""

import binascii
import re

from nereid_backend.errors import RequestError
from nereid_backend.vision.decode_image import ImageLimits

# The format of an image is read from the file itself, because a client may not know the format.
# Example: if the extension of a file is unknown, browsers send application/octet-stream or no media
# type.
IMAGE_DATA_URL = re.compile(
    r"data:(?:image/[A-Za-z0-9.+-]*|application/octet-stream)?;base64,", re.IGNORECASE
)


def decode_data_url(url: str, field: str, limits: ImageLimits) -> bytes:
    """Decode a data URL, and return its bytes.

    Example: "data:image/png;base64,iVBO..." returns the bytes of the PNG file.

    Args:
        url: the data URL.
        field: the name of the request field, for error messages.
        limits: the limits of an image.

    Raises:
        RequestError: the text is not a data URL in base64, or the file is too large.
    """
    match = IMAGE_DATA_URL.match(url)
    if match is None:
        # Search only the first 8 characters for the scheme and its colon, because the whole text
        # can be large.
        scheme, colon, _ = url[:8].partition(":")
        if colon and scheme.lower() in ("http", "https", "file"):
            raise RequestError(
                f"{field}: the URL has the scheme {scheme}, but the server reads no remote and no "
                "local files. Send the image as a data URL, such as data:image/png;base64,..."
            )
        raise RequestError(
            f"{field}: the URL must be a data URL with base64 content, such as "
            "data:image/png;base64,..."
        )
    return decode_base64(url[match.end() :], field, limits)


def decode_base64(text: str | bytes | memoryview, field: str, limits: ImageLimits) -> bytes:
    """Decode the base64 text of a file, and return the bytes of the file.

    Args:
        text: the base64 text, as a text or in ASCII bytes.
        field: the name of the request field, for error messages.
        limits: the limits of the file.

    Raises:
        RequestError: the text is not valid base64, or the file is too large.
    """
    # Four characters of base64 contain three bytes. Check the size before decoding, so that a huge
    # text needs no further memory.
    num_bytes = len(text) * 3 // 4
    # base64 text can end with one or two padding characters (`=`). In this case, `num_bytes`
    # exceeds the size of the file by one or two bytes.
    if num_bytes > limits.max_bytes + 2:
        raise RequestError(
            f"{field}: the file has about {num_bytes} bytes, but the limit is "
            f"{limits.max_bytes}. Send a smaller file."
        )
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{field}: the base64 content is damaged: {error}") from error
