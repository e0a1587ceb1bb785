# SPDX-License-Identifier: Apache-2.0
"""Imports torch and transformers once, and forks the engine process and the worker processes.

    python -m nereid_backend.serving.process.forking.fork_server FD MODULE...

FD is an inherited Unix socket. The program listens for requests on this socket. The program imports
each MODULE when it starts. The imports take several seconds of CPU time. A forked process does not
repeat the imports. `nereid serve` starts the fork server before Triton server. If there is no fork
server, a stub starts its child process itself (forked_process.py).

Each connection to the socket belongs to one child process:

    stub -> fork server    one byte, and the four open files that `_receive` describes
    fork server -> stub    the process id, and the exit code when the process has ended

Each number has 8 bytes. If the connection closes before the child process has ended, the stub has
died. The fork server then kills the child process. If the fork server cannot create the child
process, the fork server closes the connection.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import platform
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nereid_backend.fast_imports import importing

NUMBER = struct.Struct("!q")
"""The format of the process id and of the exit code."""
_CREDENTIALS = struct.Struct("3i")
# A request contains the descriptors of four files: the JSON text, the channel, the standard output
# and the standard error.
_FILES_OF_REQUEST = 4
# The time limit is short, because a process sends its request immediately after it has connected.
_RECEIVE_TIMEOUT_S = 5.0
# The file descriptors of the standard output and the standard error.
_STDOUT, _STDERR = 1, 2
_WAKE_BYTES = 4096
_ANY_CHILD = -1  # As an argument of os.waitpid, -1 means any child process.
# The indices of the fields arg_start and arg_end of /proc/self/stat. The first field after the name
# of the program has the index 0.
_ARG_START, _ARG_END = 45, 46
# Environment variables that have no effect on the import of libraries.
_IGNORED_PREFIXES = ("NEREID_", "_NEREID_", "PYTEST_")
_IGNORED_VARIABLES = {
    *("LD_LIBRARY_PATH", "PATH", "PYTHONUNBUFFERED", "XDG_CACHE_HOME", "XDG_STATE_HOME"),
    *("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "_"),
}

log = logging.getLogger("nereid")


@dataclass(frozen=True)
class Request:
    """A request for a child process.

    Attributes:
        connection: the connection to the stub.
        module: the module that the child process runs, as `python -m` would run it.
        arguments: the arguments of the module. The text "{fd}" is replaced by the file descriptor
            of the channel.
        python: two texts: the version of the stub's Python, and the path of the stub's package
            nereid_backend.
        environment: the environment variables of the child process.
        folder: the current folder of the child process.
        files: three open files of the child process: the channel to the stub, the standard output,
            and the standard error.
    """

    connection: socket.socket
    module: str
    arguments: list[str]
    python: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def python_identity() -> list[str]:
    """Return two texts: the version of this Python, and the path of the package nereid_backend."""
    return [platform.python_version(), str(Path(__file__).resolve().parents[3])]


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a socket has the same user as this process."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(packed)[1] == os.getuid())


class ForkServer:
    """Forks child processes and reports how they end."""

    def __init__(self, listener: socket.socket, environment: Mapping[str, str]) -> None:
        """Register the events that `run` handles: new connections, and the end of a child process.

        Args:
            listener: the listening socket.
            environment: a copy of the environment variables that was made before the imports.
        """
        self._listener = listener
        self._environment = environment
        # Maps the id of each child process to the connection over which the child process was
        # requested.
        self._connections: dict[int, socket.socket] = {}
        # When a child process has ended, Python writes a byte into `_wake_writer`. The selector
        # then reports that `_wake` has data.
        self._wake, self._wake_writer = socket.socketpair()
        _send_signals_to(self._wake_writer)
        self._wake.setblocking(False)  # `_reap` reads until there is no more data.
        # For each registered socket, the selector's data is the function that handles the events of
        # the socket.
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)

    def run(self) -> NoReturn:
        """Handle requests, and report the end of each child process. This method never returns."""
        while True:
            for key, _ in self._selector.select():
                handle_event = key.data
                handle_event()

    def _accept(self) -> None:
        """Accept a connection from a stub, and create the child process that the stub requests.

        If no child process can be created, close the connection without an answer. A stub is a
        process that runs a Triton model.
        """
        connection, _ = self._listener.accept()
        request = _receive(connection) if is_same_user(connection) else None
        if request is None:
            connection.close()
            return
        pid = self._fork(request)
        # Close this process's copies of the files. Only the child process uses the files.
        for file in request.files:
            os.close(file)
        if pid is None:
            connection.close()
        else:
            self._add_child(pid, connection)

    def _add_child(self, pid: int, connection: socket.socket) -> None:
        """Send the id of a new child process to its stub. Kill the process when the stub dies.

        `_reap` sends the exit code of the child process later.
        """
        self._connections[pid] = connection
        # After its request, the stub sends nothing over this connection. A later event therefore
        # means that the stub has closed the connection.
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(pid))
        self._send_to_stub(child=pid, number=pid)

    def _fork(self, request: Request) -> int | None:
        """Fork a process, and return the process id; None if no process can be created."""
        if not _can_serve(request, self._environment):
            return None
        try:
            pid = os.fork()
        except OSError as error:  # too little memory, or too many processes
            log.warning("the fork server cannot create a process: %s", error)
            return None
        if pid == 0:
            self._run_as_child(request)
        return pid

    def _run_as_child(self, request: Request) -> NoReturn:
        """Run the module of a request in this forked process, then exit.

        First undo what this process has inherited from the fork server: the signal handlers, the
        open sockets and the environment variables.
        """
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            sockets = (self._listener, self._wake, self._wake_writer, request.connection)
            # `_connections` contains the connections of other child processes. This process must
            # not keep them open.
            for inherited in (*sockets, *self._connections.values()):
                inherited.close()
            # Delete the environment variables that the fork server was started with. Imported
            # libraries have set further variables. `_environment` does not contain the further
            # variables, so they are not deleted.
            for name in self._environment:
                del os.environ[name]
            # When the requested module is done, it ends this process with `os._exit`. Therefore the
            # lines below are reached only after an error.
            _run_module(request)
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            os._exit(1)

    def _kill(self, pid: int) -> None:
        """Kill a child process, because its stub has died."""
        self._selector.unregister(self._connections[pid])
        # The kernel cannot have reused the process id, because `_reap` has not waited for this
        # child process yet.
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Send the exit code of each ended child process to its stub."""
        # Python has written one byte for each child process that has ended. Read all of these
        # bytes.
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(_WAKE_BYTES):
                pass
        while (ended_process := _next_ended_process()) is not None:
            pid, exit_code = ended_process
            self._send_to_stub(child=pid, number=exit_code)
            self._close_connection(pid)

    def _close_connection(self, pid: int) -> None:
        """Close the connection over which a child process was requested. The child has ended."""
        connection = self._connections.pop(pid)
        with contextlib.suppress(KeyError):  # The stub has closed the connection.
            self._selector.unregister(connection)
        connection.close()

    def _send_to_stub(self, child: int, number: int) -> None:
        """Send a number to the stub that has requested a child process.

        Do nothing if the stub has died.

        Args:
            child: the process id of the child process.
            number: the process id or the exit code of the child process.
        """
        with contextlib.suppress(OSError):
            self._connections[child].sendall(NUMBER.pack(number))


def _send_signals_to(writer: socket.socket) -> None:
    """Let Python write a byte into a socket whenever a child process ends (SIGCHLD)."""
    writer.setblocking(False)  # `set_wakeup_fd` requires this.
    # Without a handler, SIGCHLD would be ignored, and Python would write no byte.
    signal.signal(signal.SIGCHLD, _do_nothing)
    signal.set_wakeup_fd(writer.fileno())


def _do_nothing(number: int, frame: object) -> None:
    pass


def _next_ended_process() -> tuple[int, int] | None:
    """Return the process id and the exit code of one ended child process; None if there is none.

    Each ended process is returned only once.
    """
    try:
        pid, status = os.waitpid(_ANY_CHILD, os.WNOHANG)
    except ChildProcessError:
        return None  # There are no child processes.
    if pid == 0:
        return None  # All child processes still run.
    return pid, os.waitstatus_to_exitcode(status)


def _receive(connection: socket.socket) -> Request | None:
    """Receive a request for a child process. Return None if the request is incomplete.

    A request consists of four open files. The first file contains the fields of the request as
    JSON, and is closed by this function. The other three files become `Request.files`, and must be
    closed by the caller. The files of an incomplete request are closed by this function.
    """
    descriptors: list[int] = []
    try:
        connection.settimeout(_RECEIVE_TIMEOUT_S)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, _FILES_OF_REQUEST)
        if len(descriptors) != _FILES_OF_REQUEST:
            raise ValueError(f"{len(descriptors)} files arrived instead of {_FILES_OF_REQUEST}")
        fields = _read_json(descriptors.pop(0))
        # A TypeError means that `fields` has missing or unknown keys.
        return Request(connection=connection, files=descriptors, **fields)
    except (OSError, ValueError, TypeError) as error:
        log.debug("the fork server received an incomplete request: %s", error)
        for descriptor in descriptors:
            os.close(descriptor)
        return None


def _read_json(descriptor: int) -> Any:  # noqa: ANN401 - any JSON value
    """Parse the content of an open JSON file, and close the file."""
    with open(descriptor, "rb") as json_file:
        # The process that requests the child process has written the file, and has sent its open
        # file descriptor. Therefore, the two processes share one position in the file, which is at
        # the end of the file after the writing. Move the position to the start.
        json_file.seek(0)
        return json.load(json_file)


def _can_serve(request: Request, environment: Mapping[str, str]) -> bool:
    """Return whether this process can be forked to create the requested child process.

    The request and this process must have the same Python and the same environment variables,
    because these determine the imported modules. If the request differs from this process, log a
    warning.
    """
    own = _relevant_variables(environment)
    requested = _relevant_variables(request.environment)
    names = own.keys() | requested.keys()
    differences = sorted(name for name in names if own.get(name) != requested.get(name))
    if request.python != python_identity() or differences:
        log.warning(
            "the fork server does not create the process %s, because its Python or these "
            "environment variables differ: %s",
            request.module,
            ", ".join(differences) or "none",
        )
        return False
    return True


def _relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may have an effect on the import of libraries."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_IGNORED_PREFIXES) and name not in _IGNORED_VARIABLES
    }


def _run_module(request: Request) -> None:
    """Run the requested module in this process, as `python -m` would run it.

    This forked process first gets the environment, the folder, the output files and the command
    line of the request.
    """
    os.environ.update(request.environment)
    os.chdir(request.folder)
    channel, output, errors = request.files  # three file descriptors
    for file, standard_file in ((output, _STDOUT), (errors, _STDERR)):
        os.dup2(file, standard_file)
        os.close(file)
    arguments = [argument.replace("{fd}", str(channel)) for argument in request.arguments]
    _set_command_line([sys.executable, "-m", request.module, *arguments])
    sys.argv = [request.module, *arguments]
    gc.enable()  # The fork server has disabled the garbage collection, so that forks are cheaper.
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _set_command_line(command: list[str]) -> None:
    """Change the command line of this process. Programs such as ps show the command line.

    The kernel reads the command line from the memory of the process. This memory has a fixed
    length. A longer command line is truncated, and a shorter command line is padded with spaces.
    If the memory cannot be found, the command line is not changed.
    """
    with contextlib.suppress(OSError, ValueError):
        first_address, end_address = _command_line_addresses()
        num_bytes = end_address - first_address
        # The last byte of the command line must be a null byte.
        max_text_bytes = num_bytes - 1
        text = "\0".join(command).encode(errors="replace")[:max_text_bytes]
        ctypes.memmove(first_address, text.ljust(max_text_bytes) + b"\0", num_bytes)


def _command_line_addresses() -> tuple[int, int]:
    """Return the first address and the end address of this process's command line in memory."""
    # The second field of /proc/self/stat is the name of the program in parentheses. The name can
    # contain spaces.
    status = Path("/proc/self/stat").read_text()
    _, _, text_after_name = status.rpartition(")")
    fields_after_name = text_after_name.split()
    return int(fields_after_name[_ARG_START]), int(fields_after_name[_ARG_END])


def _reason_against_forks() -> str | None:
    """Return the reason why this process cannot be forked safely; None if it can be forked.

    A forked process has only one thread. If another thread of its parent owns a lock during the
    fork, the forked process can wait for this lock forever.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return "an imported library has started a thread"
    # A process cannot use CUDA if its parent has used CUDA before the fork.
    if "/libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        return "an imported library has loaded the CUDA driver"
    return None


def _end_openblas_threads() -> None:
    """End the threads of OpenBLAS by forking a process that exits at once.

    numpy uses OpenBLAS. OpenBLAS ends its own threads before each fork. The threads of OpenBLAS do
    not make forks unsafe, so they must not be counted.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main(argv: list[str]) -> int:
    """Import the modules, and then create child processes that need these modules.

    Serve requests until the process is killed. Return only if an imported module makes forks
    unsafe; the return value is then the exit code 1.

    Args:
        argv: the name of the program, the file descriptor of the listening socket, and the names of
            the modules.
    """
    # Ctrl-C sends SIGINT to this process and to its parent. Ignore the signal here, because the
    # parent process decides when this process stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(argv[1]))
    # Copy the variables before the imports, because imported libraries set further variables.
    environment = dict(os.environ)
    with importing():
        for module in argv[2:]:
            importlib.import_module(module)
    gc.disable()  # A garbage collection would copy memory pages that all processes share.
    _end_openblas_threads()
    reason = _reason_against_forks()
    if reason is not None:
        log.warning("the fork server ends, because %s", reason)
        return 1
    ForkServer(listener, environment).run()  # `run` never returns.


if __name__ == "__main__":
    sys.exit(main(sys.argv))
