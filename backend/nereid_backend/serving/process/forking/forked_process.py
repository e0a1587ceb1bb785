# SPDX-License-Identifier: Apache-2.0
"""Starts a child process, either through the fork server or as a new Python interpreter."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

from nereid_backend.serving.process.forking.fork_server import NUMBER, is_same_user, python_identity

ADDRESS_VARIABLE = "_NEREID_FORK_SERVER"
"""The environment variable that contains the name of the fork server's abstract Unix socket."""
# The fork server answers only after it has imported its modules. The imports take long on a busy
# machine.
_ANSWER_TIMEOUT_S = 120.0


class ForkedProcess:
    """A process that the fork server has created.

    The class has some methods of subprocess.Popen.

    Args:
        connection: the connection to the fork server.

    Raises:
        OSError: the fork server does not create the process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = self._receive(_ANSWER_TIMEOUT_S)
        self._exit_code: int | None = None

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self._exit_code is None:
            try:
                self._exit_code = self._receive(timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            except OSError:
                # The fork server has died. All its child processes then end, including this one.
                self._exit_code = 1
            self._connection.close()
        return self._exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. Do nothing if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process. Do nothing if the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout_s: float) -> int:
        """Wait for the next number that the fork server sends: a process id or an exit code."""
        self._connection.settimeout(timeout_s)
        packed = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(packed) < NUMBER.size:
            raise ConnectionError("the fork server has closed the connection")
        return int(NUMBER.unpack(packed)[0])


def start_process(
    module: str, channel: socket.socket, title: str
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start a child process that runs a module.

    If there is a fork server, it creates the process. The fork server has already imported the
    large libraries, so such a process starts faster. If there is no fork server, or if it refuses
    the request, a new Python process is started.

    Args:
        module: the module.
        channel: the child's end of the channel. The first argument of the module is the file
            descriptor of this end.
        title: the second argument of the module. The title is only shown in lists of processes.
    """
    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        with contextlib.suppress(OSError):
            return _fork(address, module, channel, title)
    # Usually, `sys.executable` is the path of the current environment's Python interpreter. The
    # path can be empty if Python is embedded in another program.
    python = sys.executable or shutil.which("python3") or "python3"
    number = channel.fileno()
    return subprocess.Popen(
        [python, "-m", module, str(number), title], pass_fds=[number], stdin=subprocess.DEVNULL
    )


def _fork(address: str, module: str, channel: socket.socket, title: str) -> ForkedProcess:
    """Request a process from the fork server, and return the process.

    Raises:
        OSError: there is no fork server, or the fork server does not create the process.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + address)
        if not is_same_user(connection):
            raise PermissionError("the fork server belongs to another user")
        _send_request(connection, _request_fields(module, title), channel)
        return ForkedProcess(connection)
    except OSError:
        connection.close()
        raise


def _request_fields(module: str, title: str) -> dict[str, object]:
    """Return the fields of a message that requests a new process from the fork server.

    The files of the new process are not among these fields; see `_send_request`.

    The fork server refuses the request if its own Python or its own environment variables differ,
    because the modules that it has imported depend on them.
    """
    return {
        "module": module,
        # The fork server replaces {fd} by the file descriptor of the channel in the new process.
        "arguments": ["{fd}", title],
        "python": python_identity(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


def _send_request(
    connection: socket.socket, fields: dict[str, object], channel: socket.socket
) -> None:
    """Send a request to the fork server.

    A request consists of four open files: a file with `fields` as JSON, and three files for the new
    process, which are its channel, its standard output and its standard error.
    """
    with os.fdopen(os.memfd_create("request"), "wb") as json_file:
        json_file.write(json.dumps(fields).encode())
        json_file.flush()
        # The file descriptors of the standard output and the standard error are 1 and 2.
        files = [json_file.fileno(), channel.fileno(), 1, 2]
        socket.send_fds(connection, [b"\0"], files)
