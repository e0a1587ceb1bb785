# SPDX-License-Identifier: Apache-2.0
"""The process that decodes and prepares the images, videos and audio of requests.

    python -m nereid_backend.vision.image_worker FD FOLDER TIMEOUT_S

FD is the inherited end of a connection, FOLDER is the checkpoint, and TIMEOUT_S is the time limit
of a request in seconds. The process loads torch and the checkpoint's processor once, and then forks
a child, which prepares up to 100 requests. The time and the memory of a child are limited, so a
hostile image ends only the child. Messages, packed with msgpack (see large_messages.py):

    first message of the worker    ["ready"] or ["failed", message]
    parent -> worker               [text, [image, ...], add_special_tokens]; the third value can
                                   be missing; each image is a data URL or base64;
                                   a video is a data URL of its frames, and audio is a
                                   data URL of a WAV file
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
from typing import Any, NoReturn, Self

import msgpack

from nereid_backend.errors import RequestError
from nereid_backend.fast_imports import importing
from nereid_backend.process_limits import limit_child
from nereid_backend.vision.large_messages import Message, receive_message

_MAX_CHILD_BYTES = 768 * 2**20
# A child process that has answered `_MAX_REQUESTS` requests is replaced. Otherwise, memory that the
# child process does not free could accumulate.
_MAX_REQUESTS = 100
# The prefix of a data URL, such as "data:image/png;base64,", is recognised only if the prefix has
# at most this number of characters.
_MAX_URL_PREFIX = 100
# An answer that contains prepared images begins with these bytes. The answer is a list of three
# values, which is packed with msgpack. The first value is the text "done".
_DONE = b"\x93\xa4done"

# Prepares the images of a request. The arguments are the values of the request, such as a text and
# a list of images. The function may remove images from the list, so that their memory is freed.
Prepare = Callable[..., list[Any]]


def serve(connection: Connection, prepare: Prepare, timeout_s: float) -> None:
    """Answer requests to prepare images until the parent process closes the connection.

    Each request is answered in a forked child process, because a hostile image can crash the
    decoder, or need too much memory or time.

    Args:
        connection: the connection to the parent process.
        prepare: prepares the images of a request.
        timeout_s: the time limit of a request in seconds.
    """
    children = ChildProcesses(prepare, timeout_s)
    while True:
        try:
            request = receive_message(connection)
        except (EOFError, OSError):
            children.end_child()
            return
        children.answer(request).send(connection)
        # A request occupies up to 32 MiB of memory. Free this memory before the next request
        # arrives.
        request.close()


class ChildProcesses:
    """Answers requests in forked processes, whose memory and time are limited.

    One child answers several requests, because a fork takes ten times as long as the preparation of
    a small image. A child that has refused a request or has failed is not used again, because its
    image may have been hostile.
    """

    def __init__(self, prepare: Prepare, timeout_s: float) -> None:
        """Store the arguments. The first child process starts when the first request arrives.

        Args:
            prepare: prepares the images of a request.
            timeout_s: the time limit of a request.
        """
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._child: _ChildProcess | None = None

    def answer(self, request: Message) -> Message:
        """Answer a request in a child process. Request and answer are packed with msgpack.

        If the child process of the last request still runs, it gets the request. Otherwise, or if
        this child process ends without an answer, a new child process gets the request.
        """
        if self._child is not None:
            try:
                return self._send_to(self._child, request)
            except (EOFError, OSError):
                # Earlier requests may have used up the memory or the CPU time of the child process.
                # Therefore a new child process gets the request.
                self.end_child()
        self._child = _ChildProcess.start(self._prepare, self._timeout_s, request)
        try:
            return self._send_to(self._child, request)
        except (EOFError, OSError):
            # Even a new child process has ended without an answer, so the request itself is the
            # cause.
            self.end_child()
            return _refusal(
                "the images or the audio need too much memory, or their decoder has crashed. Send "
                "smaller or fewer files"
            )

    def _send_to(self, child: "_ChildProcess", request: Message) -> Message:
        """Send a request to the child process, and return its answer.

        If the child process exceeds the time limit, the answer is a refusal. A child process that
        has refused a request, or has given `_MAX_REQUESTS` answers, is ended.

        Raises:
            EOFError, OSError: the child process has ended.
        """
        answer = child.answer(request, self._timeout_s)
        if answer is None:
            answer = _refusal(
                f"the images or the audio were not prepared within {self._timeout_s:g} seconds. "
                "Send smaller or fewer files"
            )
        is_refusal = not answer.starts_with(_DONE)
        if is_refusal or child.num_requests >= _MAX_REQUESTS:
            self.end_child()  # `child` is the only child process.
        return answer

    def end_child(self) -> None:
        """End the child process, if there is one. There is at most one child process."""
        if self._child is not None:
            self._child.close()
            self._child = None


class _ChildProcess:
    """A forked process that answers requests.

    Args:
        pid: the process id.
        connection: the parent's end of the connection to the process.

    Attributes:
        num_requests: the number of requests that the child has answered.
    """

    def __init__(self, pid: int, connection: Connection) -> None:
        self.num_requests = 0
        self._pid = pid
        self._connection = connection

    @classmethod
    def start(cls, prepare: Prepare, timeout_s: float, request: Message) -> Self:
        """Fork a process. In the child, this method never returns.

        Args:
            prepare: prepares the images of a request.
            timeout_s: the time limit of a request.
            request: the request that the worker is answering. The child closes its copy, because
                the copy would occupy memory. The parent also sends the request as a message.
        """
        parent_end, child_end = Pipe()
        pid = os.fork()
        if pid == 0:  # This process is the child.
            parent_end.close()
            request.close()
            _run_child(child_end, prepare, timeout_s)
        child_end.close()
        return cls(pid, parent_end)

    def answer(self, request: Message, timeout_s: float) -> Message | None:
        """Return the child's answer to a request, or None if the time limit expires first.

        Raises:
            EOFError, OSError: the child has ended.
        """
        request.send(self._connection)
        if not self._connection.poll(timeout_s):
            return None
        answer = receive_message(self._connection)
        self.num_requests += 1
        return answer

    def close(self) -> None:
        """Kill the process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._connection.close()


def _run_child(connection: Connection, prepare: Prepare, timeout_s: float) -> NoReturn:
    """Answer requests in this child process, and then end the process.

    The process ends when the parent process closes the connection. It also ends after a request
    that it refuses, because a hostile image may have changed the state of the process. The memory
    and the CPU time of the process are limited.
    """
    try:
        limit_child(_MAX_CHILD_BYTES, timeout_s)
        while True:
            answer = _answer(prepare, connection)
            answer.send(connection)
            if not answer.starts_with(_DONE):
                break
    except (EOFError, OSError):
        pass  # The parent process has closed the connection.
    except MemoryError:
        # There may not be enough memory left to build an error message, so this process ends
        # without an answer. The parent process then retries or refuses the request.
        pass
    finally:
        os._exit(0)


def _answer(prepare: Prepare, connection: Connection) -> Message:
    """Receive a request, and prepare its images. Return the answer: the result, or a refusal.

    The request and the answer are packed with msgpack.

    Raises:
        EOFError, OSError: the parent process has closed the connection.
        MemoryError: the images need more memory than this process may use.
    """
    # The bytes of the request are not stored in a variable. Therefore their memory is freed before
    # the images are prepared.
    values = msgpack.unpackb(receive_message(connection).read())
    try:
        return Message(msgpack.packb(prepare(*values)))
    except MemoryError:
        raise
    except RequestError as error:
        return _refusal(str(error))
    except BaseException as error:  # noqa: BLE001 - the client must learn the reason
        # Some packages, such as tokenizers, are written in Rust. If a check in such a package
        # fails, the raised error is not a subclass of `Exception`.
        return _refusal(f"{type(error).__name__}: {error}")


def _refusal(message: str) -> Message:
    """Return an answer that refuses a request and contains the error message.

    The answer is packed with msgpack. Example: the messages "too large" and "messages: too large."
    give the answer ["refused", "messages: too large."].
    """
    reason = message.removeprefix("messages: ").removesuffix(".")
    return Message(msgpack.packb(["refused", f"messages: {reason}."]))


def _load(folder: Path) -> Prepare:
    """Load the processor of a checkpoint, and return a function that prepares a request."""
    # The modules are imported here, because declare_operators must run before transformers is
    # imported. In the block `with importing():`, the import of torch and transformers is faster.
    from nereid_backend.vision.torchvision_operators import declare_operators

    declare_operators()
    with importing():
        import torch
        from transformers import AutoConfig

        from nereid_backend.vision.chat_processor import ChatProcessor

    from nereid_backend.vision.audio_parts import is_audio_url, read_audio_url
    from nereid_backend.vision.decode_image import ImageLimits
    from nereid_backend.vision.image_data_urls import IMAGE_DATA_URL, decode_base64, decode_data_url
    from nereid_backend.vision.messages import FoundImage, FoundVideo, Medium, check_numbers
    from nereid_backend.vision.packed_tensors import pack_images
    from nereid_backend.vision.shared_pixels import share_pixels
    from nereid_backend.vision.video_frames import is_video_url, read_video_url

    share_pixels(ImageLimits().max_pixels)
    # Each request is answered in a forked process, which does not have the threads of its parent.
    # Therefore torch must not use several threads.
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    processor = ChatProcessor(folder, config)

    def decode(content: bytes, number: int) -> Medium:
        field = f"image {number}"
        match = IMAGE_DATA_URL.match(content[:_MAX_URL_PREFIX].decode("ascii", "replace"))
        if match is not None:
            # Use a memoryview, because decoding `content` to a text would copy all its bytes.
            base64_text = memoryview(content)[match.end() :]
            return FoundImage(field, decode_base64(base64_text, field, processor.limits))
        if content[:5].lower() == b"data:" or b"://" in content[:20]:
            url = content.decode("utf-8", "replace")
            if is_video_url(url):
                return FoundVideo(field, read_video_url(url, field, processor.limits))
            if is_audio_url(url):
                return read_audio_url(url, f"audio {number}")
            return FoundImage(field, decode_data_url(url, field, processor.limits))
        try:
            return FoundImage(field, base64.b64decode(content, validate=True))
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{field}: the base64 content is damaged: {error}") from error

    def prepare(
        text: str, images: list[bytes], add_special_tokens: bool | None = None
    ) -> list[Any]:
        media: list[Medium] = []
        while images:
            # The base64 text is removed from the list, so that its memory is freed.
            media.append(decode(images.pop(0), len(media) + 1))
        check_numbers(media, processor.limits)
        prompt = processor.prepare_rendered(text, media, add_special_tokens=add_special_tokens)
        assert prompt.images is not None
        return ["done", prompt.token_ids, pack_images(prompt.images)]

    return prepare


def run_worker(load: Callable[[Path], Prepare]) -> None:
    """Load the processor, and answer requests until the parent process closes the connection.

    The arguments of the command line are the file descriptor of the connection, the folder of the
    checkpoint, and the time limit of a request in seconds.

    Args:
        load: loads the processor of a checkpoint, and returns the function that prepares the images
            of a request.
    """
    # Ctrl-C sends SIGINT to this process and to its parent. Ignore the signal here, because the
    # parent process decides when this process stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection_fd, folder, timeout_s = sys.argv[1:]
    connection = Connection(int(connection_fd))
    try:
        prepare = load(Path(folder))
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent must learn why
        connection.send_bytes(msgpack.packb(["failed", str(error)]))
        return
    connection.send_bytes(msgpack.packb(["ready"]))
    serve(connection, prepare, float(timeout_s))


if __name__ == "__main__":
    run_worker(_load)
