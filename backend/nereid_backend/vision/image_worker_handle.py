# SPDX-License-Identifier: Apache-2.0
"""Starts the process that decodes and prepares images, and sends requests to the process.

The process runs image_worker.py or another worker.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from nereid_backend.errors import EngineError, RequestError
from nereid_backend.vision.large_messages import Message, receive_message

_START_TIMEOUT_S = 120.0
_TIMEOUT_S = 10.0
# The worker process aborts a request after _TIMEOUT_S. If the worker process does not respond
# within _HANG_TIMEOUT_S, the worker process is killed.
_HANG_TIMEOUT_S = 20.0


class ImageWorkerHandle:
    """Starts the process that prepares images, and sends requests to this process.

    If the process has ended, the next request starts a new process.
    """

    def __init__(self, module: str, model: str) -> None:
        """Store the arguments, but do not start the process yet.

        Args:
            module: the name of the Python module that the process runs.
            model: the folder of the checkpoint.
        """
        self._module = module
        self._model = model
        self._lock = threading.Lock()
        # `_kill_process` is a function that kills the process. It is None if there is no process.
        # Python also calls this function when this object is deleted.
        self._kill_process: weakref.finalize[..., Any] | None = None
        self._connection: Connection | None = None
        # Whether the process has loaded the checkpoint's processor, which prepares images.
        self._is_ready = False

    def warm_up(self) -> None:
        """Start the process, and wait until the process is ready.

        If the start fails, the first request starts the process again and reports the error.
        """
        with self._lock, contextlib.suppress(RequestError, EngineError):
            self._ready_connection()

    def call(self, request: Sequence[Any]) -> list[Any]:
        """Send a request to the process, and return the answer: the token ids, and the images.

        The images are packed with msgpack. The method is thread-safe. If several threads call this
        method, their requests are answered one after another.

        Args:
            request: the arguments of the function `prepare` in the process, such as a text and a
                list of images. msgpack must be able to pack the arguments.

        Raises:
            RequestError: an image is invalid or exceeds a limit.
            EngineError: the process has ended or cannot be started.
        """
        with self._lock:
            answer = self._answer(Message(msgpack.packb(request)))
        match answer:
            case ["done", *values]:  # such as ["done", token ids, packed images]
                return values
            case ["refused", message]:
                raise RequestError(str(message))
        raise EngineError("The process that prepares images has sent an unknown answer.")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer(self, message: Message) -> list[Any]:
        """Send a message to the process, and return the unpacked answer."""
        connection = self._ready_connection()
        try:
            message.send(connection)
            if connection.poll(_HANG_TIMEOUT_S):
                answer: list[Any] = msgpack.unpackb(receive_message(connection).read())
                return answer
        except (EOFError, OSError):
            pass
        self._end()
        raise EngineError("The process that prepares images has ended. Send the request again.")

    def _ready_connection(self) -> Connection:
        """Return the connection to the process. If no process is ready, start the process first.

        Raises:
            RequestError: the process cannot load the processor of the checkpoint.
            EngineError: the process cannot be started.
        """
        # The process sends nothing without a request. If something can be read, the process has
        # ended since the last request, and the connection is closed.
        connection = self._connection
        if connection is not None and self._is_ready and not connection.poll():
            return connection
        self._end()
        return self._start_and_wait()

    def _start_and_wait(self) -> Connection:
        """Start the process, wait until the process is ready, and return the connection.

        If the process does not become ready, kill the process.
        """
        try:
            connection = self._start()
            failure = _wait_until_ready(connection)
        except (EOFError, OSError) as error:
            self._end()
            raise EngineError("The process that prepares images could not be started.") from error
        if failure is not None:
            self._end()
            raise RequestError(f"messages: images are refused, because {failure}")
        self._is_ready = True
        return connection

    def _start(self) -> Connection:
        """Start the process, and return the connection to the process."""
        own_end, child_end = socket.socketpair()
        with child_end:
            connection = Connection(own_end.detach())
            try:
                process = self._run_module(child_end.fileno())
            except OSError:
                connection.close()
                raise
        self._connection = connection
        # If this object is deleted without a call of `close`, Python kills the process.
        self._kill_process = weakref.finalize(self, _kill, process)
        return connection

    def _run_module(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Run the module in a new process. `descriptor` is the child's end of the connection."""
        # An embedded Python may not know the path of its interpreter.
        python = sys.executable or shutil.which("python3") or "python3"
        return subprocess.Popen(
            [python, "-m", self._module, str(descriptor), self._model, str(_TIMEOUT_S)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            # The process forks a child that handles the requests. The child does not have the
            # threads of the process, so a library that has started threads before the fork could
            # hang in the child. OMP_NUM_THREADS prevents libraries from starting threads.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _end(self) -> None:
        """Kill the process."""
        self._is_ready = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._kill_process is not None:
            self._kill_process()
            self._kill_process = None


def _wait_until_ready(connection: Connection) -> str | None:
    """Wait for the first message of the process: ["ready"] or ["failed", reason].

    Return None if the process is ready, or the reason why the process failed.

    Raises:
        EOFError, OSError: the process has ended.
        TimeoutError: the process has sent no message within the time limit.
    """
    if not connection.poll(_START_TIMEOUT_S):
        raise TimeoutError
    kind, *reason = msgpack.unpackb(connection.recv_bytes())
    return None if kind == "ready" else str(reason[0])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait until it has ended."""
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
