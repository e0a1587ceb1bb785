"""Tests that data URLs give their bytes, and that other URLs are refused."""

import base64

import pytest
from nereid_backend import RequestError
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_data_urls import decode_data_url

LIMITS = ImageLimits()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1/a.png", "the scheme http"),
        ("file:///etc/passwd", "the scheme file"),
        ("data:text/html;base64,AAAA", "must be a data URL"),
        ("data:image/png;base64,@@@@", "base64 content is damaged"),
        ("data:image/png;base64," + "A" * 30_000_000, "but the limit is"),
    ],
)
def test_other_urls_are_refused(url, problem):
    with pytest.raises(RequestError, match=problem):
        decode_data_url(url, "messages: image 1", LIMITS)


@pytest.mark.parametrize("media_type", ["image/PNG", "application/octet-stream", ""])
def test_a_data_url_gives_its_bytes(media_type):
    url = f"data:{media_type};base64," + base64.b64encode(b"abc").decode()
    assert decode_data_url(url, "image", LIMITS) == b"abc"
