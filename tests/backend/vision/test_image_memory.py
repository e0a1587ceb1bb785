"""Tests that the largest allowed images need less than 200 MB of additional memory."""

import pytest
from PIL import Image

from loadtest.bench.bench_large_images import SEE, Worker, saved

_FILES = {
    "JPEG": saved("JPEG"),
    "CMYK JPEG": saved("JPEG", "CMYK"),
    "PNG": saved("PNG", compress_level=1),
    "transparent PNG": saved("PNG", "RGBA", compress_level=1),
    "WebP": saved("WEBP", method=0),
    "lossless WebP": saved("WEBP", lossless=True, quality=0, method=0),
}


@pytest.fixture(scope="module")
def worker():
    worker = Worker(SEE)
    yield worker
    worker.close()


@pytest.mark.parametrize("encode", _FILES.values(), ids=_FILES)
def test_an_image_of_16_million_pixels_needs_less_than_200_mb(worker, encode):
    image = Image.linear_gradient("L").resize((4000, 4000)).convert("RGB")
    figures = worker.measure(encode(image))
    assert figures.status == 200
    assert figures.child_mb < 200


def test_a_refused_file_leaves_a_worker_that_answers(worker):
    assert worker.measure(b"no image").status == 400
    assert worker.measure(saved("PNG")(Image.new("RGB", (9, 9)))).status == 200
