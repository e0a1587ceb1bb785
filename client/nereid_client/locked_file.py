"""Opens and locks a file. The lock shows other programs that this program still runs."""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def open_locked(path: Path) -> BinaryIO:
    """Open a file and lock it. The lock is released when the file is closed or the process ends.

    Unlike a process id, the lock also shows that a process in another container still runs.

    Raises: OSError if another process has locked the file.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def lock_until_exit(path: Path) -> None:
    """Lock a file until this process ends.

    Raises: BlockingIOError if another process has locked the file. OSError if the file cannot be
        opened, or if its file system has no locks.
    """
    with open_locked(path) as file:
        os.dup(file.fileno())  # Nothing closes this descriptor, so the lock remains.
