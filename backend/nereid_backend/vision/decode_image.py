# SPDX-License-Identifier: Apache-2.0
"""Decodes image files that may be hostile.

The header of a file contains the format and the size of the image. If the format is not in a short
list, or if the size exceeds a limit, the file is refused. The pixels are decoded only after these
checks.
"""

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nereid_backend.errors import ModelError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

# The image formats that are decoded. Pillow could decode further formats, but its decoders for
# those formats are rarely used and little tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of the images, videos and audio of one request.

    Attributes:
        max_images: the largest number of images.
        max_frames: the largest number of images in all videos together.
        max_audios: the largest number of audio files.
        max_audio_s: the largest duration of all audio files together, in seconds.
        max_bytes: the largest size of an image file or an audio file.
        max_pixels: the largest number of pixels of an image.
        max_aspect_ratio: the largest ratio of an image's longer side to its shorter side. If the
            ratio of an image is larger, a processor can enlarge the image to many more pixels.
    """

    max_images: int = 16
    max_frames: int = 64
    max_audios: int = 16
    max_audio_s: float = 600.0
    max_bytes: int = 20 * 2**20
    max_pixels: int = 16 * 10**6
    max_aspect_ratio: int = 100


def decode_image(data: bytes, field: str, limits: ImageLimits) -> "Image":
    """Decode an image file, and return the image as RGB.

    If the EXIF data contain a rotation, the image is rotated. Damaged EXIF data are ignored.

    Only the first frame of an animated file is decoded. Transparent pixels are drawn on white.

    Args:
        data: the content of the file.
        field: the name of the request field, for error messages.
        limits: the limits of an image.

    Raises:
        RequestError: the file is not an image in one of `FORMATS`, is damaged, or is too large.
        ModelError: Pillow is not installed.
        MemoryError: the image needs more memory than this process may use.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise ModelError(
            "images need the package pillow. Install nereid-backend[images]."
        ) from error
    if len(data) > limits.max_bytes:
        raise RequestError(
            f"{field}: the image file has {len(data)} bytes, but the limit is {limits.max_bytes}. "
            "Send a smaller file."
        )
    try:
        with warnings.catch_warnings():
            # Pillow warns about large images and broken metadata. Large images are refused below.
            warnings.simplefilter("ignore")
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_size(image.size, field, limits)
                decoded = _decode_pixels(image, data)
                _rotate(decoded)
                return _to_rgb(decoded)
    except (RequestError, MemoryError):
        # A MemoryError is not converted to an error about this image, because all images of the
        # request share this memory. The caller handles the MemoryError for the whole request.
        raise
    except PIL.Image.DecompressionBombError as error:
        raise RequestError(
            f"{field}: the image has more than the limit of {limits.max_pixels} pixels. Send a "
            "smaller image."
        ) from error
    except PIL.UnidentifiedImageError as error:
        raise RequestError(
            f"{field}: the file is not an image in one of the formats {', '.join(FORMATS)}."
        ) from error
    except Exception as error:
        # An image decoder can raise any exception for a broken file. Convert the exception to a
        # RequestError, so that only the current request fails.
        raise RequestError(f"{field}: the image cannot be decoded: {error}") from error


def _decode_pixels(image: Any, data: bytes) -> Any:  # noqa: ANN401 - images of Pillow
    """Decode the pixels of an opened image file, and return an image that contains the pixels.

    Args:
        image: the image that `PIL.Image.open` has returned.
        data: the content of the file.
    """
    if image.format == "WEBP":
        return _decode_webp(image, data)
    if image.format == "PNG":
        _convert_transparent_value(image)
    image.load()
    return image


def _convert_transparent_value(image: Any) -> None:  # noqa: ANN401 - an image of Pillow
    """Convert the transparent value of an opened PNG file to 8 bits.

    Pillow converts the pixels of a file with 2 or 4 bits (grey) or 3 x 16 bits (RGB) to 8 bits, but
    not the transparent value. Without this function, other pixels would become transparent.

    Example: with 16 bits, the transparent value (32768, 32768, 32768) becomes (128, 128, 128).
    Pillow alone would use (0, 0, 0), the lower 8 bits of each number.

    Mutates: `image.info`.
    """
    value = image.info.get("transparency")
    raw_mode = image.tile[0][3] if image.tile else None  # Pillow's name of the format in the file
    if isinstance(value, int) and raw_mode == "L;2":
        image.info["transparency"] = (value & 3) * 85
    elif isinstance(value, int) and raw_mode == "L;4":
        image.info["transparency"] = (value & 15) * 17
    elif isinstance(value, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(number >> 8 for number in value)


def _decode_webp(image: Any, data: bytes) -> Any:  # noqa: ANN401 - images of Pillow
    """Decode the pixels of a WebP file. The arguments are those of `_decode_pixels`."""
    # The module is imported here, because it is needed only for WebP files.
    from nereid_backend.vision.decode_webp import decode_still_webp

    # Pillow needs several times as much memory as `decode_still_webp`. Therefore, Pillow decodes
    # only the files for which `decode_still_webp` returns None, such as animations.
    decoded = decode_still_webp(image, data)
    if decoded is not None:
        return decoded
    image.load()
    # Pillow's WebP decoder keeps two more images of the same size in memory. The image is already
    # decoded, so remove the decoder.
    image._decoder = None
    return image


def _rotate(image: Any) -> None:  # noqa: ANN401 - an image of Pillow
    """If the EXIF data of a decoded image contain a rotation, rotate the image.

    Mutates: `image`.
    """
    import PIL.ImageOps

    try:
        # `in_place` avoids a copy. A copy of an image of 16 million pixels needs 64 MB.
        PIL.ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - Pillow can raise any exception for damaged EXIF data
        # The pixels are not damaged, so the image is used. Pillow reads the rotation, then rotates
        # the image, and then updates the EXIF data. If only the update fails, the image is already
        # rotated.
        pass


def check_size(size: tuple[int, int], field: str, limits: ImageLimits) -> None:
    """Raise a RequestError if the size (width, height) of an image exceeds a limit."""
    width, height = size
    if width * height > limits.max_pixels:
        raise RequestError(
            f"{field}: the image has {width} x {height} pixels, but the limit is "
            f"{limits.max_pixels} pixels. Send a smaller image."
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        raise RequestError(
            f"{field}: the image has {width} x {height} pixels. One side may be at most "
            f"{limits.max_aspect_ratio} times as long as the other side."
        )


def _to_rgb(image: Any) -> "Image":  # noqa: ANN401 - an image of Pillow
    """Convert an image of Pillow to RGB. Transparent pixels are drawn on white.

    `image.mode` is Pillow's name of the pixel format, such as "RGBA" or "LA" (grey and alpha).
    """
    import PIL.Image

    if image.mode.startswith("I;16"):
        image = _to_grey(image)
    has_alpha = image.mode in ("RGBA", "LA", "PA")
    has_transparent_colour = "transparency" in image.info
    if has_alpha or has_transparent_colour:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = PIL.Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    if image.mode != "RGB":
        return image.convert("RGB")  # type: ignore[no-any-return]
    image.load()  # Decode the pixels. The conversions above do this themselves.
    return image  # type: ignore[no-any-return]


def _to_grey(image: Any) -> "Image":  # noqa: ANN401 - an image of Pillow
    """Convert an image whose pixels are 16-bit numbers to grey. Transparent pixels become white.

    Pillow's own conversion would set all numbers above 255 to 255.
    """
    import PIL.Image

    numbers = np.asarray(image)
    grey = (numbers // 256).astype(np.uint8)
    transparent_number = image.info.get("transparency")
    if transparent_number is not None:
        grey[numbers == transparent_number] = 255
    return PIL.Image.fromarray(grey)
