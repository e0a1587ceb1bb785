"""Tests that images are read only from allowed hosts, public addresses and one local folder."""

import base64
import http.server
import os
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from nereid_backend import ConfigError, RequestError
from nereid_backend.vision import image_sources
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_sources import ImageSources

LIMITS = ImageLimits()
MAX_BYTES = 1000
IMAGE = b"the bytes of an image"


class Handler(http.server.BaseHTTPRequestHandler):
    """A web server whose response depends on the path: an image, a redirect, or an error."""

    REDIRECTS: ClassVar = {
        "/once": "/image",
        "/loop": "/loop",
        "/private": "http://10.0.0.1/image",
        "/other": "http://other.example/image",
        "/file": "file:///etc/passwd",
        "/damaged": "http://[",
    }

    def do_GET(self):
        if self.path in self.REDIRECTS:
            self.send_response(302)
            self.send_header("Location", self.REDIRECTS[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/large":
            self.wfile.write(bytes(5 * MAX_BYTES))
        else:
            self.wfile.write(IMAGE)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def port():
    """The port of a web server on this machine (see `Handler`)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def local_is_public(monkeypatch):
    """Treat 127.0.0.1 as a public address, so that a test can run its own server."""
    is_public = image_sources._is_public
    monkeypatch.setattr(
        image_sources, "_is_public", lambda address: address == "127.0.0.1" or is_public(address)
    )


def read(sources, *urls, limits=LIMITS):
    """Return the image of each URL.

    A data URL or base64 is returned unchanged. Any other image is returned as base64.
    """
    return sources.read([url.encode() for url in urls], limits, MAX_BYTES)


def test_data_urls_and_base64_are_unchanged():
    images = ["data:image/png;base64,iVBO", "iVBO"]
    assert read(ImageSources(), *images) == [image.encode() for image in images]


@pytest.mark.parametrize("path", ["image", "once"])
def test_an_image_of_an_allowed_host_is_downloaded(port, local_is_public, path):
    sources = ImageSources(f"127.0.0.1:{port}")
    [image] = read(sources, f"http://127.0.0.1:{port}/{path}")
    assert base64.b64decode(image) == IMAGE


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("loop", "more than 3 redirects"),
        ("private", "images from 10.0.0.1 are not allowed"),
        ("other", "images from other.example are not allowed"),
        ("file", "the scheme file"),
        ("damaged", "redirects to a URL that is not valid"),
        ("missing", "the status 404"),
        ("large", "more than the 1000 bytes"),
        ("slow", "took longer than the limit"),
    ],
)
def test_wrong_answers_are_refused(port, local_is_public, path, problem):
    sources = ImageSources(f"127.0.0.1:{port}", timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(RequestError, match=problem):
        read(sources, f"http://127.0.0.1:{port}/{path}")
    assert time.monotonic() - start < 3


def test_a_slow_lookup_of_a_host_does_not_exceed_the_time_limit(monkeypatch):
    test_has_ended = threading.Event()

    def slow_lookup(*_args, **_kwargs):
        test_has_ended.wait(timeout=10)
        return []

    monkeypatch.setattr(image_sources.socket, "getaddrinfo", slow_lookup)
    start = time.monotonic()
    with pytest.raises(RequestError, match="took longer than the limit"):
        read(ImageSources("*", timeout_s=0.2), "http://example.org/image.png")
    test_has_ended.set()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"),
        *("[::1]", "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "2130706433", "localhost"),
        *("[fec0::2]", "[::7f00:1]", "[::ffff:0:7f00:1]", "[64:ff9b:1::a00:1]", "192.0.0.192"),
    ],
)
def test_addresses_that_are_not_public_are_refused(host):
    with pytest.raises(RequestError, match="not public"):
        read(ImageSources("*"), f"http://{host}/image.png")


@pytest.mark.parametrize(
    ("hosts", "url", "problem"),
    [
        ("", "http://example.org/a.png", "the scheme http, but this server downloads no"),
        ("", "HTTPS://example.org/a.png", "the scheme https, but this server downloads no"),
        ("example.com", "http://example.org/a.png", "images from example.org are not allowed"),
        ("*.example.org", "http://example.org/a.png", "images from example.org are not allowed"),
        ("*.example.org", "http://badexample.org/a", "images from badexample.org are not allowed"),
        ("*", "http://example.org:8080/a.png", "images from example.org:8080 are not allowed"),
        ("*", "http://me:secret@example.org/a.png", "must not contain a user name"),
        ("*", "http://example.org:x/a.png", "the URL is not valid"),
        ("*", "http://ex\u00e4mple.org/a.png", "the URL is not valid"),
    ],
)
def test_urls_that_the_settings_do_not_allow_are_refused(hosts, url, problem):
    with pytest.raises(RequestError, match=problem):
        read(ImageSources(hosts), url)


@pytest.mark.parametrize(
    "host", ["https://example.org", "example.org/images", "example.org:https", "*example.org", "."]
)
def test_an_item_of_the_hosts_that_allows_no_host_is_a_wrong_setting(host):
    with pytest.raises(ConfigError, match="image_url_hosts: each item must be a host such as"):
        ImageSources(f"example.com, {host}")


def test_subdomains_are_allowed_by_a_wildcard():
    assert image_sources._allows("*.example.org", "a.b.example.org", 80, is_default_port=True)
    assert not image_sources._allows("*.example.org", "a.b.example.org", 81, is_default_port=False)
    assert image_sources._allows("example.org:81", "example.org", 81, is_default_port=False)
    assert not image_sources._allows("example.org:81", "example.org", 80, is_default_port=True)


def test_a_device_outside_the_folder_is_not_even_opened(tmp_path, monkeypatch):
    opened_paths = []
    open_file = os.open

    def record_and_open(path, *rest):
        opened_paths.append(path)
        return open_file(path, *rest)

    monkeypatch.setattr(image_sources.os, "open", record_and_open)
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/null", f"{tmp_path}/../../dev/null", f"{tmp_path}/link"):
        with pytest.raises(RequestError, match="does not exist, or is not a regular file"):
            read(ImageSources(folder=str(tmp_path)), f"file://{path}")
    assert not opened_paths


@pytest.fixture
def image_folder(tmp_path):
    """A folder that contains two image files, a link to a file outside the folder, and a pipe."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(IMAGE)
    (folder / "large.png").write_bytes(bytes(MAX_BYTES + 1))
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_file_in_the_folder_is_read(image_folder):
    [image] = read(ImageSources(folder=str(image_folder)), f"file://{image_folder}/a%20b.png")
    assert base64.b64decode(image) == IMAGE


@pytest.mark.parametrize("name", ["link", "../secret", "pipe", "none", "", "%00"])
def test_only_files_in_the_folder_are_read(image_folder, name):
    with pytest.raises(RequestError, match="does not exist, or is not a regular file"):
        read(ImageSources(folder=str(image_folder)), f"file://{image_folder}/{name}")


def test_files_that_the_settings_do_not_allow_are_refused(image_folder):
    sources = ImageSources(folder=str(image_folder))
    with pytest.raises(RequestError, match="more than the 1000 bytes"):
        read(sources, f"file://{image_folder}/large.png")
    with pytest.raises(RequestError, match="does not exist"):
        read(sources, f"file://host{image_folder}/a%20b.png")
    with pytest.raises(RequestError, match="this server reads no local files"):
        read(ImageSources(), f"file://{image_folder}/a%20b.png")


def test_a_file_with_a_name_outside_ascii_is_read_in_a_model_of_the_triton_server(tmp_path):
    (tmp_path / "é.png").write_bytes(IMAGE)
    program = (
        "import sys; from nereid_backend.vision.image_sources import _Budget, ImageSources; "
        "from urllib.parse import urlsplit; "
        "assert sys.getfilesystemencoding() == 'ascii'; "
        f"sources = ImageSources(folder={str(tmp_path)!r}); "
        f"url = urlsplit('file://{tmp_path}/%C3%A9.png'); "
        "content = sources._read_file(url, 'image', 1000, _Budget(1000, float('inf'))); "
        "sys.stdout.buffer.write(content)"
    )
    # With these variables, Python encodes file names as ASCII. The Triton server starts models with
    # these variables.
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE
    )
    assert result.stdout == IMAGE


def test_the_images_of_a_request_share_one_limit(tmp_path):
    (tmp_path / "half").write_bytes(bytes(MAX_BYTES // 2 + 1))
    url = f"file://{tmp_path}/half"
    with pytest.raises(RequestError, match="image 2: the image file has more than the 499 bytes"):
        read(ImageSources(folder=str(tmp_path)), url, url)
    with pytest.raises(RequestError, match="3 images, but the limit is 2"):
        read(ImageSources(), *[url] * 3, limits=ImageLimits(max_images=2))


def test_videos_and_audio_files_do_not_count_as_images():
    media = ["AAAA", "data:audio/wav;base64,AAAA", "data:video/jpeg;base64,AAAA,AAAA"]
    expected = [item.encode() for item in media]
    assert read(ImageSources(), *media, limits=ImageLimits(max_images=1)) == expected
