# SPDX-License-Identifier: Apache-2.0
"""Reads images from remote URLs and file URLs. A URL is refused unless the settings allow it.

A client could misuse a URL to read files of this machine, or to reach services that only this
machine can reach. Remote images are therefore downloaded only from allowed hosts with public
addresses. Files are read only from one allowed folder.

The address of a host is looked up once, checked, and then used for the connection. A second lookup
could return another address. Each redirect is checked like the first URL.
"""

import asyncio
import base64
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from nereid_backend.errors import ConfigError, ModelError, RequestError
from nereid_backend.vision.decode_image import ImageLimits

if TYPE_CHECKING:
    import httpx2

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_REDIRECTS = 3
# Matches an item of the setting image_url_hosts, such as "*.example.org:8443".
_ALLOWED_HOST = re.compile(r"(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:[0-9]{1,5})?")
_TOO_SLOW = (
    "{field}: the download of the images took longer than the limit (image_url_timeout_s). Send "
    "the images as data URLs, such as data:image/png;base64,..."
)
# A small compressed body can contain a huge file. Therefore the request asks for a body without
# compression, and a body is never decompressed.
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "nereid"}
# All public IPv6 addresses of hosts are in this network. The module `ipaddress` also treats some
# other addresses as public (`is_global`). Examples are fec0::1, which belongs to a private network,
# and ::7f00:1, which contains the IPv4 address 127.0.0.1.
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")
# An IPv6 address in one of the first two networks contains an IPv4 address, which may be private.
# The other network has special purposes, such as the metadata of a cloud. The module `ipaddress` of
# older Python versions calls some of these addresses global.
_NOT_PUBLIC = [ipaddress.ip_network(text) for text in ("2002::/16", "2001::/32", "192.0.0.0/24")]


@dataclass(slots=True)
class _Budget:
    """The number of bytes and the time that remain for reading the images of one request."""

    num_bytes: int
    deadline_s: float  # in the time of `time.monotonic`

    def check_time(self, field: str) -> None:
        """Raise a RequestError if no time remains. `field` is the name of the next image."""
        self.remaining_s(field)

    def remaining_s(self, field: str) -> float:
        """Return the remaining time in seconds. Raise a RequestError if no time remains."""
        remaining = self.deadline_s - time.monotonic()
        if remaining <= 0:
            raise RequestError(_TOO_SLOW.format(field=field))
        return remaining


class ImageSources:
    """Reads images from allowed hosts and from an allowed folder."""

    def __init__(self, hosts: str = "", timeout_s: float = 5.0, folder: str = "") -> None:
        """Store the settings.

        Args:
            hosts: a list of hosts, separated by commas. Images are downloaded only from these
                hosts. `*.example.org` allows all subdomains, `example.org:8443` allows another
                port, and `*` allows all hosts. "" allows no downloads.
            timeout_s: the time limit in seconds for all downloads of one request together.
            folder: the folder whose files may be read with file URLs. "" allows no files.

        Raises:
            ConfigError: an item of `hosts` has another form, so it would never allow a host, or
                `folder` is not a folder that can be read.
        """
        self._hosts = [host.strip().lower() for host in hosts.split(",") if host.strip()]
        for host in self._hosts:
            if not _ALLOWED_HOST.fullmatch(host):
                raise ConfigError(
                    "image_url_hosts: each item must be a host such as example.org, "
                    f"example.org:8443, *.example.org or *, but one item is {host}."
                )
        if folder and not (Path(folder).is_dir() and os.access(folder, os.R_OK | os.X_OK)):
            raise ConfigError(
                f"image_folder: {folder} is not a folder that this user can read. Give the folder "
                "from which images are read, or remove the setting."
            )
        self._timeout_s = timeout_s
        self._folder = folder

    def read(
        self, media: Sequence[bytes], limits: ImageLimits, max_total_bytes: int
    ) -> list[bytes]:
        """Replace each remote URL and each file URL by the content of the image file in base64.

        Data URLs and base64 texts are returned unchanged. Videos and audio files are always data
        URLs.

        Args:
            media: the images, videos and audio files. Each item is a URL or a base64 text.
            limits: the limits of the number of images (`max_images`) and of the size of one file
                (`max_bytes`).
            max_total_bytes: the largest total size of the files that are read.

        Raises:
            RequestError: a URL is not allowed, the file cannot be read, or a limit is exceeded.
            ModelError: httpx2 is not installed.
        """
        # The function `check_numbers` later checks the limits of videos and audio files. The number
        # of images is checked here, so that a request with too many images downloads nothing.
        num_images = sum(not _is_video_or_audio(item) for item in media)
        if num_images > limits.max_images:
            raise RequestError(
                f"messages: the request has {num_images} images, but the limit is "
                f"{limits.max_images}. Send fewer images."
            )
        # All files of the request together may have at most `max_total_bytes` bytes, and all
        # downloads together may take at most `_timeout_s` seconds.
        budget = _Budget(max_total_bytes, time.monotonic() + self._timeout_s)
        result = []
        for number, item in enumerate(media, 1):
            if _is_remote_or_file_url(item):
                content = self._read_url(item, f"messages: image {number}", limits, budget)
                result.append(base64.b64encode(content))
            else:
                result.append(item)
        return result

    def _read_url(
        self, url_bytes: bytes, field: str, limits: ImageLimits, budget: _Budget
    ) -> bytes:
        """Return the content of the file at a remote URL or a file URL.

        Args:
            url_bytes: the URL.
            field: the name of the image in error messages, such as "messages: image 1".
            limits: the limits of the images.
            budget: the bytes and the time that remain for all images of the request. Mutated: the
                size of the file is subtracted.
        """
        url = _parse(url_bytes, field)
        limit = min(limits.max_bytes, budget.num_bytes)
        if url.scheme == "file":
            content = self._read_file(url, field, limit, budget)
        else:
            content = self._download(url, field, limit, budget)
        budget.num_bytes -= len(content)
        return content

    def _download(self, url: SplitResult, field: str, limit: int, budget: _Budget) -> bytes:
        """Download the file at a remote URL, and return its content.

        Args:
            url: the URL.
            field: the name of the image in error messages.
            limit: the largest number of bytes of the file.
            budget: the time that remains for all downloads of the request.
        """
        # Check the host before httpx2 is imported. Otherwise, the error for a forbidden host would
        # depend on whether httpx2 is installed. `_download_with_redirects` checks the host of each
        # URL again.
        self._check_host(url, field)
        try:
            import httpx2
        except ImportError as error:
            raise ModelError(
                "remote images need the package httpx2. Install nereid-backend[images]."
            ) from error

        async def download() -> bytes:
            # httpx2 limits only the time of each single operation. A host that sends the image byte
            # by byte would never exceed that limit. `asyncio.timeout` limits the total time.
            async with asyncio.timeout(budget.remaining_s(field)):
                return await self._download_with_redirects(url, field, limit)

        try:
            return asyncio.run(download())
        except TimeoutError as error:
            raise RequestError(_TOO_SLOW.format(field=field)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RequestError(
                f"{field}: the image could not be downloaded: {type(error).__name__}."
            ) from error

    async def _download_with_redirects(self, url: SplitResult, field: str, limit: int) -> bytes:
        """Download the file at a remote URL, and follow at most `_MAX_REDIRECTS` redirects.

        The host of each URL is checked, and its address is looked up once. The connection uses this
        address, because a second lookup could return the address of a private network. The caller
        limits the total time.
        """
        import httpx2  # The HTTP client is an optional package.

        # The proxy settings of the environment are ignored, because a proxy could connect to an
        # address that was not checked.
        async with httpx2.AsyncClient(trust_env=False, follow_redirects=False) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                self._check_host(url, field)
                address = await _public_address(url, field)
                request = client.build_request(
                    "GET",
                    httpx2.URL(url.geturl()).copy_with(host=address, fragment=None),
                    headers={**_HEADERS, "Host": url.netloc},
                    # The requested URL contains an address instead of the host's name, but the
                    # certificate must be valid for the host's name.
                    extensions={"sni_hostname": url.hostname},
                    timeout=self._timeout_s,
                )
                response = await client.send(request, stream=True)
                if not response.has_redirect_location:
                    return await _read_body(response, field, limit)  # This call also closes it.
                location = response.headers["location"]
                await response.aclose()
                url = _parse_redirect(url, location, field)
        raise RequestError(
            f"{field}: the URL has more than {_MAX_REDIRECTS} redirects. Send the URL of the image "
            "itself."
        )

    def _check_host(self, url: SplitResult, field: str) -> None:
        """Raise a RequestError if the settings forbid the scheme, the host or the port of a URL."""
        default_port = _DEFAULT_PORTS.get(url.scheme)  # None if the scheme is not http or https
        # If the setting image_url_hosts is empty, this server downloads no images, so it refuses
        # every scheme.
        if not self._hosts or default_port is None:
            raise RequestError(
                f"{field}: the URL has the scheme {url.scheme}, but this server downloads no "
                "images with this scheme. Send the image as a data URL, such as "
                "data:image/png;base64,..."
            )
        host = (url.hostname or "").rstrip(".")  # "example.org." is the same host as "example.org".
        port = url.port or default_port
        # An entry of the setting image_url_hosts may omit the port. Example: the entry
        # "example.org" allows only the default port of the URL's scheme.
        is_default_port = port == default_port
        is_allowed = any(
            _allows(allowed, host, port, is_default_port=is_default_port) for allowed in self._hosts
        )
        if not is_allowed:
            name = host if is_default_port else f"{host}:{port}"
            raise RequestError(
                f"{field}: images from {name} are not allowed. The setting image_url_hosts lists "
                "the allowed hosts."
            )

    def _read_file(self, url: SplitResult, field: str, limit: int, budget: _Budget) -> bytes:
        """Return the content of a file in the allowed folder.

        Args:
            url: a file URL, such as file:///images/a.png.
            field: the name of the image in error messages.
            limit: the largest number of bytes of the file.
            budget: the time that remains for all images of the request.
        """
        budget.check_time(field)
        if not self._folder:
            raise RequestError(
                f"{field}: the URL has the scheme file, but this server reads no local files. Send "
                "the image as a data URL, such as data:image/png;base64,..."
            )
        content = None
        if url.netloc in ("", "localhost"):
            # One byte more than `limit` is read, so that a larger file is detected below.
            content = _read_in_folder(_file_path(url), self._folder, limit + 1)
        if content is None:
            raise RequestError(
                f"{field}: the file does not exist, or is not a regular file in the folder of the "
                "setting image_folder."
            )
        if len(content) > limit:
            raise _too_large(field, limit)
        return content


def _is_video_or_audio(item: bytes) -> bool:
    """Return whether an item is a data URL of a video or of an audio file."""
    # Only the beginning of the item is copied, because an item can have many megabytes.
    return item[:11].lower().startswith((b"data:video/", b"data:audio/"))


def _is_remote_or_file_url(item: bytes) -> bool:
    """Return whether an item is the URL of a file. Data URLs and base64 texts contain the file."""
    return item[:6].lower().startswith((b"http:", b"https:", b"file:"))


def _file_path(url: SplitResult) -> str:
    """Return the path in a file URL. Example: file:///images/a%20b.png returns "/images/a b.png".

    In a Python model of the Triton server, Python's encoding of file names is ASCII. The result can
    nevertheless contain other characters, because their bytes are escaped for this encoding.
    """
    return os.fsdecode(unquote(url.path).encode())


def _read_in_folder(path: str, folder: str, max_bytes: int) -> bytes | None:
    """Return the first `max_bytes` bytes of a file, or the whole file if it is smaller.

    Return None if the file does not exist, or is not a regular file in `folder`.
    """
    real_folder = Path(folder).resolve()
    try:
        # Opening a device or a named pipe can have an effect, even if nothing is read. Therefore
        # a file outside the folder is not opened.
        if not Path(os.path.realpath(path)).is_relative_to(real_folder):
            return None
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):  # ValueError: the path contains a null character
        return None
    try:
        # `opened` is the real path of the open file, without symbolic links. The check of the path
        # and the read use the same open file, so a client cannot replace the file after the check.
        opened = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not is_file or not opened.is_relative_to(real_folder):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)


def _parse(url: bytes, field: str) -> SplitResult:
    """Split a URL into its components.

    Raises:
        RequestError: the URL is not valid, or contains a user name or a password.
    """
    try:
        parts = urlsplit(url.decode("ascii"))
        has_credentials = parts.username is not None or parts.password is not None
        _ = parts.port  # This raises a ValueError if the port is not a valid number.
    except ValueError as error:
        raise RequestError(f"{field}: the URL is not valid.") from error
    if has_credentials:
        raise RequestError(f"{field}: the URL must not contain a user name or a password.")
    return parts


def _parse_redirect(url: SplitResult, location: str, field: str) -> SplitResult:
    """Return the target of a redirect, split into its components.

    Args:
        url: the URL that redirects to the target.
        location: the target: a URL, or a path on the host of `url`.
        field: the name of the image in error messages.

    Raises:
        RequestError: the target is not valid, or contains a user name or a password.
    """
    try:
        target = urljoin(url.geturl(), location)
    except ValueError as error:
        raise RequestError(f"{field}: the URL redirects to a URL that is not valid.") from error
    return _parse(target.encode(), field)


def _allows(allowed: str, host: str, port: int, *, is_default_port: bool) -> bool:
    """Return whether an entry of the setting image_url_hosts allows a host and a port.

    Examples: "*.example.org" allows "a.example.org" but not "example.org". "*" allows every host on
    the default port. "example.org:8443" allows only the port 8443 of this host.

    Args:
        allowed: the entry.
        host: the host.
        port: the port.
        is_default_port: whether the port is the default port of the URL's scheme.
    """
    allowed_host, colon, allowed_port = allowed.partition(":")
    has_right_port = allowed_port == str(port) if colon else is_default_port
    if not has_right_port:
        return False
    if allowed_host.startswith("*."):
        return host.endswith(allowed_host[1:])
    return allowed_host in ("*", host)


async def _public_address(url: SplitResult, field: str) -> str:
    """Look up the host of a URL, and return one of the host's addresses.

    Raises:
        RequestError: the host has no address, or one of its addresses is not public.
    """
    host, port = url.hostname or "", url.port or _DEFAULT_PORTS[url.scheme]
    # Use a separate executor for the lookup. A lookup cannot be interrupted, and a name server can
    # delay it for half a minute. The method `asyncio.run` would wait for the threads of asyncio's
    # own executor, but it does not wait for the thread of this executor. Therefore, if a lookup
    # exceeds the time limit, the request is answered at once, and the thread ends later.
    executor = ThreadPoolExecutor(1, "image-host")
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(executor, look_up)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{field}: the host {host} has no address.") from error
    finally:
        executor.shutdown(wait=False)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(map(_is_public, addresses)):
        raise RequestError(f"{field}: the host {host} has an address that is not public.")
    return addresses[0]


def _is_public(address: str) -> bool:
    """Return whether an IP address is public.

    An IPv6 address that contains an IPv4 address does not count as public.
    """
    parsed = ipaddress.ip_address(address.split("%")[0])
    if parsed.version == 6 and parsed not in _PUBLIC_IPV6:
        return False
    if any(parsed in each for each in _NOT_PUBLIC):
        return False
    return parsed.is_global and not parsed.is_multicast


async def _read_body(response: "httpx2.Response", field: str, limit: int) -> bytes:
    """Read and return the body of a response, and close the response.

    Raises:
        RequestError: the status is not 200, or the body has more than `limit` bytes.
    """
    try:
        if response.status_code != 200:
            raise RequestError(
                f"{field}: the download of the image failed with the status {response.status_code}."
            )
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > limit:
                raise _too_large(field, limit)
        return bytes(content)
    finally:
        await response.aclose()


def _too_large(field: str, limit: int) -> RequestError:
    return RequestError(
        f"{field}: the image file has more than the {limit} bytes that this request may still "
        "read. Send smaller or fewer images."
    )
