# SPDX-License-Identifier: Apache-2.0
"""The process that decodes and prepares the images of requests.

    python -m nereid_backend.vision.image_worker FD FOLDER TIMEOUT_S

FD is the inherited end of a connection, FOLDER is the checkpoint, and TIMEOUT_S is the time limit
of a request in seconds. The process loads torch and the checkpoint's processor once, and then forks
a child for each request. The time and the memory of a child are limited, so a hostile image ends
only the child. Messages, packed with msgpack:

    first message of the worker    ["ready"] or ["failed", message]
    parent -> worker               [text, [image, ...]], each image is a data URL or base64;
                                   a video is a data URL of its frames
    worker -> parent               ["done", token ids, packed images] or ["refused", message]
"""

import base64
import binascii
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import msgpack

from nereid_backend.process_limits import limit_child

_MAX_CHILD_BYTES = 768 * 2**20

Prepare = Callable[[str, list[bytes]], list[Any]]


def serve(connection: Connection, prepare: Prepare, timeout_s: float) -> None:
    """Answer requests until the parent closes the connection."""
    while True:
        try:
            text, images = msgpack.unpackb(connection.recv_bytes())
        except (EOFError, OSError):
            return
        connection.send_bytes(_answer(prepare, text, images, timeout_s))


def _answer(prepare: Prepare, text: str, images: list[bytes], timeout_s: float) -> bytes:
    """Run `prepare` in a forked child, and return the packed answer."""
    result, child_end = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        result.close()
        _run_child(child_end, prepare, text, images, timeout_s)
    child_end.close()
    try:
        if not result.poll(timeout_s):
            return _refusal(f"the images were not prepared within {timeout_s:g} seconds")
        return result.recv_bytes()
    except (EOFError, OSError):
        return _refusal("the images need too much memory, or their decoder has crashed")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        result.close()


def _run_child(
    result: Connection, prepare: Prepare, text: str, images: list[bytes], timeout_s: float
) -> NoReturn:
    """Prepare a request in a child process, send the answer to the parent, and exit."""
    try:
        limit_child(_MAX_CHILD_BYTES, timeout_s)
        result.send_bytes(msgpack.packb(prepare(text, images)))
    except MemoryError:
        # There may be too little memory to send an error message. If the parent process gets no
        # message, the parent process refuses the images.
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - the child ends here, and the client must learn why
        is_refusal = type(error).__name__ == "RequestError"
        detail = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        result.send_bytes(_refusal(detail.removeprefix("messages: ")))
    finally:
        os._exit(0)


def _refusal(message: str) -> bytes:
    """Return the packed answer that refuses a request."""
    packed: bytes = msgpack.packb(["refused", f"messages: {message.rstrip('.')}."])
    return packed


def _load(folder: Path) -> Prepare:
    """Load the processor of a checkpoint, and return a function that prepares a request."""
    # This function contains imports, because declare_operators must run before transformers is
    # imported.
    from nereid_backend.vision.torchvision_operators import declare_operators

    declare_operators()
    import torch
    from transformers import AutoConfig

    from nereid_backend.errors import RequestError
    from nereid_backend.vision.chat_processor import ChatProcessor
    from nereid_backend.vision.messages import Found, FoundImage, FoundVideo, check_numbers
    from nereid_backend.vision.packed_tensors import pack_images
    from nereid_backend.vision.read_image import decode_data_url
    from nereid_backend.vision.video_frames import is_video_url, read_video_url

    # Threads of torch do not survive a fork.
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    processor = ChatProcessor(folder, config)

    def decode(content: bytes, field: str) -> Found:
        if content[:5].lower() == b"data:" or b"://" in content[:20]:
            url = content.decode("utf-8", "replace")
            if is_video_url(url):
                return FoundVideo(field, read_video_url(url, field, processor.limits))
            return FoundImage(field, decode_data_url(url, field, processor.limits))
        try:
            return FoundImage(field, base64.b64decode(content, validate=True))
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{field}: the base64 content is damaged: {error}") from error

    def prepare(text: str, images: list[bytes]) -> list[Any]:
        found = [decode(image, f"image {number}") for number, image in enumerate(images, 1)]
        check_numbers(found, processor.limits)
        prompt = processor.prepare_text(text, found)
        assert prompt.images is not None
        return ["done", prompt.token_ids, pack_images(prompt.images)]

    return prepare


def run_worker(load: Callable[[Path], Prepare]) -> None:
    """Load the processor, and answer requests until the parent process closes the connection.

    Args:
        load: loads the processor of a checkpoint, and returns the function that prepares the images
            of a request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        prepare = load(Path(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent must learn why
        connection.send_bytes(msgpack.packb(["failed", str(error)]))
        return
    connection.send_bytes(msgpack.packb(["ready"]))
    serve(connection, prepare, float(sys.argv[3]))


if __name__ == "__main__":
    run_worker(_load)
