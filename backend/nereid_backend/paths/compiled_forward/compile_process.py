# SPDX-License-Identifier: Apache-2.0
"""The program of the process that compiles a forward pass; see background_compilation.py.

    python -m nereid_backend.paths.compiled_forward.compile_process FD FOLDER

FD is the file descriptor of the connection to the engine. FOLDER is the folder for the library. The
messages are:

    engine -> process   the bytes that `pack_skeleton` returns
    process -> engine   the reason why there is no library, as UTF-8; empty after a success

The process has the lowest priority and a memory limit. The process and the C++ compiler form a
process group. When the engine dies or closes its end of the connection, all processes of this group
are killed.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from nereid_backend.errors import first_line
from nereid_backend.process_limits import limit_memory

# The lowest priority. If this process and a process of niceness 0 compete for one CPU, this process
# gets about 1.5 % of the CPU's time. This applies only if Linux schedules the two processes in the
# same group.
_NICENESS = 19
# The compilation may use this amount of address space in bytes, in addition to the imported
# libraries and the model. A compilation of 36 layers needs about 2 GB.
_MAX_BYTES = 6 * 2**30
# A temporary folder that is older than `_LEFTOVER_AGE_S` belongs to a compilation that was killed.
_LEFTOVER_AGE_S = 3600


def main() -> None:
    """Compile the model that the engine sends, and send the result to the engine.

    The result is the reason of a failure, or "" after a success. The arguments of the command line
    are the file descriptor of the connection to the engine, and the folder of the library.
    """
    # Ctrl+C stops the engine, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _lower_priority()
    connection_fd, folder_name = sys.argv[1:]
    connection = Connection(int(connection_fd))
    folder = Path(folder_name)
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        return  # The engine has ended.
    # If the engine ends during the compilation, this thread ends the process.
    threading.Thread(target=_end_with_engine, args=(connection,), daemon=True).start()
    reason = _compile_or_reason(message, folder)
    with contextlib.suppress(OSError):
        connection.send_bytes(reason.encode())
    # Exit immediately. Python's cleanup would take a second, and would wait for the thread.
    os._exit(0)


def _compile_or_reason(message: bytes, folder: Path) -> str:
    """Compile the model in `message`. Return "" after a success, or the reason for a failure."""
    try:
        with _exclusive_lock(folder.parent):
            _compile(message, folder)
    except Exception as error:  # noqa: BLE001 - the process ends here, and the engine must learn why
        return first_line(error) or type(error).__name__
    return ""


def _lower_priority() -> None:
    """Lower the priority of this process, so that the engine gets CPU time and memory first."""
    os.nice(_NICENESS)
    # If the memory of the machine is exhausted, Linux kills this process instead of the engine.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _compile(message: bytes, folder: Path) -> None:
    """Compile the model in `message`, and store the library in `folder`.

    The message is the result of `pack_skeleton`: the model without large weights. The caller has a
    lock, so only one process of this machine compiles at a time.

    Raises:
        Exception: of any class, if torch cannot trace or compile the model's code.
    """
    # Import these modules only here. A process that is still waiting for the lock then needs little
    # memory.
    import torch

    from nereid_backend.attention.transformers_hook import AttentionHook
    from nereid_backend.paths.compiled_forward.build_library import build_library
    from nereid_backend.paths.compiled_forward.library_files import (
        TraceError,
        has_library,
        write_trace_error,
    )
    from nereid_backend.paths.compiled_forward.model_skeleton import unpack_skeleton

    if has_library(folder):
        return  # Another process has compiled the same model.
    _delete_folders_of_killed_compilations(folder.parent)
    model, attention_name, is_native, num_threads = unpack_skeleton(message)
    limit_memory(_MAX_BYTES)
    # Set the number of threads before the compilation, because this number becomes the largest
    # number of threads that the compiled library can use.
    torch.set_num_threads(num_threads)
    try:
        hook = AttentionHook(attention_name)  # the model's config contains this name
        build_library(model, hook, folder, is_native=is_native)
    except TraceError as error:
        write_trace_error(folder, error)
        raise


def _delete_folders_of_killed_compilations(folder: Path) -> None:
    """Delete the temporary folders of compilations that were killed more than an hour ago."""
    for path in folder.glob("tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Return a context manager whose block runs in only one process of this machine at a time.

    Other processes wait until this process leaves the block. The lock belongs to a file in
    `folder`, and the operating system releases the lock if the process dies. If the folder does not
    support locks, several processes compile at the same time.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "background.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _end_with_engine(connection: Connection) -> None:
    """Wait until the engine closes the connection, then kill this process and its C++ compiler."""
    # The engine sends no second message, so the end of the connection is the next event.
    with contextlib.suppress(EOFError, OSError):
        connection.poll(None)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
