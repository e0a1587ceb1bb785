"""Deletes the shared memory of Triton servers that were killed.

A Triton server exchanges tensors with its models through files in /dev/shm. If the server is
killed, for example because its container has too little memory, these files remain. In Kubernetes,
the files even remain after the container was restarted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nereid_client.locked_file import open_locked

_FOLDER = Path("/dev/shm")
# While a server runs, `nereid serve` locks a file in `_FOLDER`. The file name consists of
# `_LOCK_PREFIX` and the server's prefix. Example: the names of the server's shared memory regions
# begin with "nereid_17_0f1e2d3c_". The file is then named "lock_of_nereid_17_0f1e2d3c_".
_LOCK_PREFIX = "lock_of_"
_LOCK_PATTERN = f"{_LOCK_PREFIX}nereid_*_????????_"


@contextmanager
def reserve_prefix(prefix: str, folder: Path = _FOLDER) -> Iterator[None]:
    """Delete the shared memory of servers that were killed, and mark `prefix` as used.

    Other servers do not delete the shared memory of this server during the `with` block.

    Args:
        prefix: the prefix of the names of this server's shared memory, such as
            "nereid_17_0f1e2d3c_".
        folder: the folder of the shared memory.
    """
    for lock_path in folder.glob(_LOCK_PATTERN):
        _delete_if_abandoned(lock_path)
    lock_path = folder / f"{_LOCK_PREFIX}{prefix}"
    try:
        lock = open_locked(lock_path)
    except OSError:  # for example, the folder cannot be written
        yield
        return
    with lock:
        yield
        # After an exception, the file remains, because the shared memory may also remain. The next
        # server that starts then deletes the file and the shared memory.
        lock_path.unlink(missing_ok=True)


def delete_shared_memory(prefix: str, folder: Path = _FOLDER) -> None:
    """Delete the shared memory of the server with this prefix."""
    for region in folder.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _delete_if_abandoned(lock_path: Path) -> None:
    """Delete the shared memory of a server, unless its `nereid serve` still runs."""
    try:
        lock = open_locked(lock_path)
    except OSError:  # the file is locked, or belongs to another user
        return
    with lock:
        delete_shared_memory(lock_path.name.removeprefix(_LOCK_PREFIX), lock_path.parent)
        lock_path.unlink(missing_ok=True)
