"""Tests that hostile image files are refused, and that other image files are decoded correctly."""

import io
import struct
import zlib

import pytest
from nereid_backend import RequestError
from nereid_backend.vision.decode_image import ImageLimits, decode_image
from nereid_backend.vision.shared_pixels import PixelMemory
from PIL import Image

LIMITS = ImageLimits()
RED, BLUE = (255, 0, 0), (0, 0, 255)


def two_colours() -> Image.Image:
    """Return an image of 30 x 20 pixels whose left half is red and whose right half is blue."""
    image = Image.new("RGB", (30, 20), RED)
    image.paste(BLUE, (15, 0, 30, 20))
    return image


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def png(
    width: int,
    height: int,
    pixels: bytes = b"",
    *,
    num_bits: int = 8,
    is_grey: bool = False,
    transparent: bytes = b"",
) -> bytes:
    """Return a PNG file whose header declares any size, even a size that contradicts the pixels.

    Args:
        width: the width in the header.
        height: the height in the header.
        pixels: the bytes of all rows. Each row begins with a zero byte (no PNG filter).
        num_bits: the number of bits in each number of a pixel.
        is_grey: whether a pixel has one number (grey) instead of three (RGB).
        transparent: the pixel value that is transparent, with two bytes for each number.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, num_bits, 0 if is_grey else 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(pixels))
    if transparent:
        body = chunk(b"tRNS", transparent) + body
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (png(50_000, 50_000), "more than the limit of 16000000 pixels"),
        (png(10_000, 10_000, bytes(50_000_000)), "10000 x 10000 pixels, but the limit is"),
        (png(1, 100_000), "at most 100 times as long"),
        (file_of(two_colours())[:60], "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image in one of the formats"),
        (file_of(two_colours(), "TIFF"), "not an image in one of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image in one of the formats"),
        (b"", "not an image in one of the formats"),
        (bytes(21 * 2**20), "bytes, but the limit is"),
    ],
)
def test_hostile_files_are_refused(data, problem):
    with pytest.raises(RequestError, match=problem):
        decode_image(data, "messages: image 1", LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        file_of(two_colours()),
        file_of(two_colours().convert("RGBA")),
        file_of(two_colours().convert("P")),
        file_of(two_colours().convert("CMYK"), "JPEG", quality=95),
        file_of(two_colours(), "WEBP", lossless=True),
        file_of(two_colours(), "GIF", save_all=True, append_images=[Image.new("RGB", (30, 20))]),
    ],
)
def test_the_first_frame_of_a_legal_file_has_the_right_colours(data):
    image = decode_image(data, "image", LIMITS)
    assert (image.mode, image.size) == ("RGB", (30, 20))
    for position, colour in (((3, 3), RED), ((26, 16), BLUE)):
        pairs = zip(image.getpixel(position), colour, strict=True)
        assert all(abs(channel - expected) < 12 for channel, expected in pairs)


def test_the_rotation_in_the_exif_data_is_applied():
    exif = Image.Exif()
    exif[0x112] = 6  # The camera was rotated by 90 degrees.
    image = decode_image(file_of(two_colours(), "JPEG", exif=exif), "image", LIMITS)
    assert image.size == (20, 30)
    assert image.getpixel((10, 3))[0] > 200
    assert image.getpixel((10, 26))[2] > 200


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_damaged_exif_data_are_ignored(kind):
    image = decode_image(file_of(two_colours(), kind, exif=b"Exif\0\0damaged"), "image", LIMITS)
    assert image.size == (30, 20)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_is_rotated_if_other_exif_data_are_damaged(kind):
    # The first entry is the rotation (6). The second entry is the camera model, which is damaged: a
    # number instead of a text.
    entries = struct.pack(">HHIHHHHIf", 0x112, 3, 1, 6, 0, 0x110, 11, 1, 1.5)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 2) + entries + bytes(4)
    image = decode_image(file_of(two_colours(), kind, exif=exif), "image", LIMITS)
    assert image.size == (20, 30)


def test_transparent_pixels_are_white():
    image = decode_image(file_of(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), "image", LIMITS)
    assert image.getpixel((1, 1)) == (255, 255, 255)


def test_dark_and_light_pixels_of_16_bits_differ():
    image = Image.new("I;16", (4, 4), 65_000)
    assert decode_image(file_of(image), "image", LIMITS).getpixel((0, 0))[0] > 250


def test_only_the_transparent_pixels_of_16_bits_are_white():
    image = Image.new("I;16", (2, 1), 20_000)
    image.putpixel((1, 0), 1_000)
    decoded = decode_image(file_of(image, transparency=1_000), "image", LIMITS)
    assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(78, 78, 78), (255, 255, 255)]


@pytest.mark.parametrize(
    ("num_bits", "row", "transparent", "colours"),
    [
        pytest.param(2, b"\x1b", b"\0\1", [0, 255, 170, 255], id="grey, 2 bits"),
        pytest.param(4, b"\x01\x2f", b"\0\1", [0, 255, 34, 255], id="grey, 4 bits"),
        pytest.param(
            16, bytes(6) + b"\x80\0" * 3, b"\x80\0" * 3, [0, 255], id="colours, 3 x 16 bits"
        ),
    ],
)
def test_the_transparent_colour_of_a_png_file_does_not_change_other_colours(
    num_bits, row, transparent, colours
):
    is_grey = len(transparent) == 2
    pixels = b"\0" + row
    options = {"num_bits": num_bits, "is_grey": is_grey, "transparent": transparent}
    image = decode_image(png(len(colours), 1, pixels, **options), "image", LIMITS)
    assert [image.getpixel((x, 0))[0] for x in range(len(colours))] == colours


def test_an_image_for_which_the_memory_is_too_small_is_not_called_damaged(monkeypatch):
    monkeypatch.setattr(PixelMemory, "__init__", lambda *_: bytes(2**60))
    with pytest.raises(MemoryError):
        decode_image(file_of(two_colours(), "WEBP"), "image", LIMITS)
