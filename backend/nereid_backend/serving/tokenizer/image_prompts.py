# SPDX-License-Identifier: Apache-2.0
"""Builds the prompts of requests with images in a separate process (vision/image_worker.py)."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

from nereid_backend.errors import EngineError, RequestError
from nereid_backend.serving.tokenizer.chat_messages import IMAGE_PLACEHOLDER
from nereid_backend.vision.image_sources import ImageSources
from nereid_backend.vision.read_image import ImageLimits

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_START_TIMEOUT_S = 120.0
_TIMEOUT_S = 10.0
# The worker process aborts a request after _TIMEOUT_S. If the worker process does not respond
# within this longer time, the worker process hangs.
_HANG_TIMEOUT_S = 20.0
_IMAGE_TYPES = ("image_url", "image", "input_image")
# The largest size of all images of a request, in base64.
MAX_IMAGE_BYTES = 32 * 2**20


def reads_images(model: str) -> bool:
    """Return whether a checkpoint has an image processor and a config with an image encoder.

    Whether the model can be computed with images, is known only to the engine.
    """
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_encoder = any("vis" in name and isinstance(config[name], dict) for name in config)
    has_processor = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    return has_processor and (has_encoder or "vq_config" in config)


def has_image_parts(body: dict[str, Any] | None) -> bool:
    """Return whether the messages of a chat contain an image."""
    messages = body.get("messages") if body is not None else None
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict)
    ]
    return any(
        isinstance(part, dict) and part.get("type") in _IMAGE_TYPES
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def take_images(body: dict[str, Any]) -> list[bytes]:
    """Replace the images in the messages of a chat by placeholders, and return the images.

    Example: the part {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    becomes {"type": "image"}, and b"data:image/png;base64,iVBO" is returned.

    Raises:
        RequestError: an image part has no URL.

    Mutates: `body`.
    """
    images: list[bytes] = []
    messages = body.get("messages")
    if not isinstance(messages, list):
        return images
    changed = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            message = {**message, "content": [_take_image(part, images) for part in content]}
        changed.append(message)
    body["messages"] = changed
    return images


def _take_image(part: Any, images: list[bytes]) -> Any:  # noqa: ANN401 - any JSON value
    """Return IMAGE_PLACEHOLDER for an image part, and any other content part unchanged.

    The URL or the base64 text of the image is appended to `images`.
    """
    if not isinstance(part, dict) or part.get("type") not in _IMAGE_TYPES:
        return part
    source = part.get("image_url", part.get("image"))
    if isinstance(source, dict):
        source = source.get("url")
    if not isinstance(source, str) or not source:
        raise RequestError(
            "messages: an image part must have image_url.url, a data URL such as "
            "data:image/png;base64,..."
        )
    images.append(source.encode("utf-8", "surrogatepass"))
    return IMAGE_PLACEHOLDER


class ImagePrompts:
    """The process that prepares images. If it has ended, the next request starts it again."""

    def __init__(self, model: str, sources: ImageSources | None = None) -> None:
        """Create an object without a process.

        Args:
            model: the folder of the checkpoint.
            sources: reads the images of remote and file URLs. None refuses these URLs.
        """
        self._model = model
        self._sources = sources or ImageSources()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def warm_up(self) -> None:
        """Start the process, so that the first request with an image does not wait for the start.

        Errors are ignored. After an error, the first request with an image starts the process again
        and reports the error.
        """
        with self._lock, contextlib.suppress(RequestError, EngineError):
            if self._connection is None:
                self._start()

    def prepare(self, text: str, images: list[bytes]) -> tuple[list[int], bytes]:
        """Return the token ids of a prompt with images, and the packed images for the engine.

        The method is thread-safe. Requests are prepared one after another.

        Args:
            text: the rendered prompt, with one placeholder for each image.
            images: URLs, or base64.

        Raises:
            RequestError: an image is invalid or exceeds a limit.
            EngineError: the process has ended or cannot be started.
        """
        images = self._sources.read(images, ImageLimits(), MAX_IMAGE_BYTES * 3 // 4)
        num_bytes = sum(map(len, images))
        if num_bytes > MAX_IMAGE_BYTES:
            raise RequestError(
                f"messages: the images have {num_bytes} bytes in base64, but the limit is "
                f"{MAX_IMAGE_BYTES} bytes. Send smaller images."
            )
        with self._lock:
            answer = self._ask(msgpack.packb([text, images]))
        if answer[0] == "done":
            return answer[1], answer[2]
        raise RequestError(str(answer[1]))

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, message: bytes) -> list[Any]:
        """Send a message to the process, and return the answer."""
        connection = self._connection or self._start()
        try:
            connection.send_bytes(message)
            if connection.poll(_HANG_TIMEOUT_S):
                answer: list[Any] = msgpack.unpackb(connection.recv_bytes())
                return answer
        except (EOFError, OSError):
            pass
        self._end()
        raise EngineError("The process that prepares images has ended. Send the request again.")

    def _start(self) -> Connection:
        """Start the process, and wait until it has loaded the processor."""
        own_end, child_end = socket.socketpair()
        module = "nereid_backend.vision.image_worker"
        # An embedded Python may not know the path of its interpreter.
        python = sys.executable or shutil.which("python3") or "python3"
        command = [python, "-m", module, str(child_end.fileno())]
        self._process = subprocess.Popen(
            [*command, self._model, str(_TIMEOUT_S)],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        child_end.close()
        self._connection = Connection(own_end.detach())
        try:
            if self._connection.poll(_START_TIMEOUT_S):
                answer = msgpack.unpackb(self._connection.recv_bytes())
                if answer[0] == "ready":
                    return self._connection
                self._end()
                raise RequestError(f"messages: images are refused, because {answer[1]}")
        except (EOFError, OSError):
            pass
        self._end()
        raise EngineError("The process that prepares images could not be started.")

    def _end(self) -> None:
        """Kill the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._process = None
