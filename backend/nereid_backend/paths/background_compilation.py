# SPDX-License-Identifier: Apache-2.0
"""Compiles a forward pass in another process, while the engine uses the model's own code."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

_MODULE = "nereid_backend.paths.compile_process"
# A compilation takes a minute, but the process gets little time on a busy machine, and it may wait
# for compilations of other models.
_TIMEOUT_S = 3600.0


class BackgroundCompilation:
    """A process that compiles a forward pass (compile_process.py), and a thread that waits for it.

    Attributes:
        folder: the folder for the library.
    """

    def __init__(self, message: bytes, folder: Path, timeout_s: float = _TIMEOUT_S) -> None:
        """Start the process. The caller does not wait for it.

        Args:
            message: the description of the model; see `pack_skeleton`.
            folder: the folder for the library.
            timeout_s: the time in seconds after which the process is killed.

        Raises:
            OSError: if the process cannot be started.
        """
        self.folder = folder
        self._outcome: str | None = None
        self._connection, child_end = Pipe()
        fd = child_end.fileno()
        with child_end:
            # The process leads a new process group, so that the C++ compiler can be killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(fd), str(folder)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._thread = threading.Thread(
            target=self._wait, args=(message, timeout_s), name="forward-compilation", daemon=True
        )
        self._thread.start()

    @property
    def outcome(self) -> str | None:
        """The reason why there is no library, "" after a success, or None before the end."""
        return self._outcome

    def close(self) -> None:
        """Kill the process if it is running, and wait for its end."""
        self._kill()
        self._thread.join()

    def _wait(self, message: bytes, timeout_s: float) -> None:
        """Send the model, wait for the result or the time limit, and end the process."""
        reason = f"the compilation took longer than {timeout_s:g} s"
        try:
            self._connection.send_bytes(message)
            if self._connection.poll(timeout_s):
                reason = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            reason = "the compilation was killed or needed too much memory"
        self._kill()
        self._process.wait()
        self._connection.close()
        self._outcome = reason

    def _kill(self) -> None:
        """Kill the process and the C++ compiler."""
        # The process id is valid, because only the thread `_wait` waits for the process.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
