# SPDX-License-Identifier: Apache-2.0
"""Compiles a forward pass in another process. Meanwhile, the engine uses the model's own code."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

_MODULE = "nereid_backend.paths.compiled_forward.compile_process"
# The process is killed if it has not finished after this time. A compilation takes about a minute
# if the machine is idle. It takes longer if other processes need the CPUs, or if the process must
# wait for the compilation of another model.
_TIMEOUT_S = 3600.0


class BackgroundCompilation:
    """A process that compiles a forward pass, and a thread that waits for this process.

    Attributes:
        folder: the folder for the library.
    """

    def __init__(self, message: bytes, folder: Path, timeout_s: float = _TIMEOUT_S) -> None:
        """Start a process that compiles a forward pass. Do not wait for the end of the compilation.

        Args:
            message: the message that describes the model; see `pack_skeleton`.
            folder: the folder for the library.
            timeout_s: the time in seconds after which the process is killed.

        Raises:
            OSError: if the process cannot be started.
        """
        self.folder = folder
        self._outcome: str | None = None  # see `outcome`
        self._connection, child_end = Pipe()
        with child_end:  # The engine closes its copy of this end after the start of the process.
            self._process = _start_process(child_end.fileno(), folder)
        self._thread = threading.Thread(
            target=self._exchange_messages,
            args=(message, timeout_s),
            name="forward-compilation",
            daemon=True,
        )
        self._thread.start()

    @property
    def outcome(self) -> str | None:
        """The result of the compilation.

        The result is None while the compilation runs, "" after the library was stored, or the
        reason why there is no library.
        """
        return self._outcome

    def close(self) -> None:
        """Kill the process if it is running, and wait until the process and the thread end."""
        self._kill()
        self._thread.join()

    def _exchange_messages(self, message: bytes, timeout_s: float) -> None:
        """Send the model, wait at most `timeout_s` seconds for the result, and end the process.

        A separate thread runs this method. The result is stored in `_outcome`; see `outcome`.
        """
        try:
            self._connection.send_bytes(message)
            if self._connection.poll(timeout_s):
                outcome = self._connection.recv_bytes().decode()
            else:
                outcome = f"the compilation took longer than {timeout_s:g} s"
        except (EOFError, OSError):
            outcome = "the compilation was killed or needed too much memory"
        self._kill()
        self._process.wait()
        self._connection.close()
        self._outcome = outcome

    def _kill(self) -> None:
        """Kill the process and the C++ compiler."""
        # While `returncode` is None, Python has not collected the exit status of the process. Linux
        # therefore has not given the process id to another process.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _start_process(connection_fd: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that compiles the model, and return the process.

    Args:
        connection_fd: the file descriptor through which the process exchanges messages.
        folder: the folder for the compiled library.
    """
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(connection_fd), str(folder)],
        pass_fds=[connection_fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # The process and the C++ compiler that it starts form a process group, so that one signal
        # can kill both. They stay in the engine's session, because the process lowers its priority
        # (niceness) to leave more CPU time for the engine. In a separate session, the lower
        # priority would have no effect on the engine: Linux divides the CPU time equally among
        # sessions.
        process_group=0,
    )
