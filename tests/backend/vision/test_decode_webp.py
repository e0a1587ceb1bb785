"""Tests that Nereid decodes still WebP images to the same pixels as Pillow.

Pillow uses the decoder for animations even for still images, and Nereid does not.
"""

import io

import pytest
from backend.vision.image_archs import picture
from nereid_backend import RequestError
from nereid_backend.vision.decode_image import ImageLimits, decode_image
from nereid_backend.vision.decode_webp import decode_still_webp
from PIL import Image


def webp(image: Image.Image, **options) -> bytes:
    """Return the WebP file of an image."""
    file = io.BytesIO()
    image.save(file, "WEBP", **options)
    return file.getvalue()


def transparent() -> Image.Image:
    """Return an image with transparent, half-transparent and opaque pixels."""
    image = picture(1, 61, 45).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def rotation() -> Image.Exif:
    """Return EXIF data that declare a rotation by 90 degrees (the orientation 6)."""
    exif = Image.Exif()
    exif[0x112] = 6
    return exif


_STILL = {
    "lossy": webp(picture(1, 61, 45), quality=80),
    "lossless": webp(picture(2, 61, 45), lossless=True),
    "lossy and transparent": webp(transparent(), quality=80),
    "lossless and transparent": webp(transparent(), lossless=True, exact=True),
    "with EXIF data": webp(picture(3, 61, 45), exif=rotation()),
}


@pytest.mark.parametrize("data", _STILL.values(), ids=_STILL)
def test_a_still_image_has_the_pixels_that_pillow_decodes(data):
    with Image.open(io.BytesIO(data)) as image:
        decoded = decode_still_webp(image, data)
        assert (decoded.mode, decoded.size) == (image.mode, image.size)
        assert decoded.tobytes() == image.tobytes()
        assert decoded.getexif() == image.getexif()


def test_the_rotation_in_the_exif_data_is_applied():
    image = decode_image(_STILL["with EXIF data"], "image", ImageLimits())
    assert image.size == (45, 61)


def test_the_first_frame_of_an_animation_is_decoded_by_pillow():
    frames = [picture(seed, 61, 45) for seed in (1, 2)]
    data = webp(frames[0], save_all=True, append_images=frames[1:], lossless=True)
    with Image.open(io.BytesIO(data)) as image:
        assert decode_still_webp(image, data) is None
    assert decode_image(data, "image", ImageLimits()).tobytes() == frames[0].tobytes()


@pytest.mark.parametrize("data", _STILL.values(), ids=_STILL)
def test_a_damaged_file_is_refused_or_decoded_like_by_pillow(data):
    for position in range(30, len(data), max(1, len(data) // 20)):
        inverted_byte = bytes([data[position] ^ 0xFF])
        damaged = data[:position] + inverted_byte + data[position + 1 :]
        expected = pillow_pixels(damaged)
        if expected is None:
            with pytest.raises(RequestError, match="image"):
                decode_image(damaged, "image", ImageLimits())
        else:
            with Image.open(io.BytesIO(damaged)) as image:
                decoded = decode_still_webp(image, damaged)
            # If the result is None, Nereid decodes the file with Pillow.
            if decoded is not None:
                assert (decoded.mode, decoded.size, decoded.tobytes()) == expected


def pillow_pixels(data: bytes) -> tuple[str, tuple[int, int], bytes] | None:
    """Return the mode, the size and the pixels that Pillow decodes, or None if Pillow fails."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return image.mode, image.size, image.tobytes()
    except (OSError, ValueError, SyntaxError):
        return None


@pytest.mark.parametrize("data", _STILL.values(), ids=_STILL)
def test_a_truncated_file_is_refused(data):
    with pytest.raises(RequestError, match="image"):
        decode_image(data[: len(data) * 2 // 3], "image", ImageLimits())
