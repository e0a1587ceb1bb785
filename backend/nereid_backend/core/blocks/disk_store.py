# SPDX-License-Identifier: Apache-2.0
"""A folder of files, with a limit on their total size. Each file contains the bytes of one key.

    header    one line of JSON: format, model, dtype and layout; key, size and checksum of the bytes
    content   the bytes

A file is used only if its header is exactly the expected header. Damaged files and files of another
model, data type or layout are therefore ignored. Each file is first written under a temporary name,
so an incomplete file never has the final name. If the folder is full, the least recently used files
are deleted. Files with other names are never changed.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = 1
_SUFFIX = ".prefix"
_TEMPORARY_SUFFIX = ".prefix-part"
# If a process crashes, an unfinished file can remain in the folder. An unfinished file is deleted
# only if it is older than `_UNFINISHED_S` seconds, because another process may still be writing a
# newer file.
_UNFINISHED_S = 60
# Other processes can use the same folder. After this number of seconds, the next write reads the
# names and sizes of all files again, so that the size limit also counts the files of the other
# processes.
_RESCAN_AFTER_S = 60
# The largest number of bytes that may wait for the writer thread. If the limit would be exceeded,
# `write` does nothing and returns False. Without the limit, a slow disk could fill the memory with
# waiting bytes.
_MAX_PENDING_BYTES = 256 * 2**20


class _PendingFiles:
    """The waiting tasks of the writer thread. There is at most one task for each file.

    A task contains the new bytes of a file, or None if the file must be deleted.

    Attributes:
        num_bytes: the number of bytes in all tasks.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, bytes | None] = {}
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        """Return whether the file `name` must still be written or deleted."""
        return name in self._tasks

    def __getitem__(self, name: str) -> bytes | None:
        """Return the new bytes of the file `name`; None if the file must be deleted."""
        return self._tasks[name]

    def set(self, name: str, data: bytes | None) -> None:
        """Set the task of a file. If the file already has another task, that task is replaced."""
        self.num_bytes += _length(data) - _length(self._tasks.get(name))
        self._tasks[name] = data

    def remove_if_unchanged(self, name: str, data: bytes | None) -> None:
        """Remove the task of the file `name`, unless the task has been replaced by a newer one.

        `data` is the task that is done: the bytes that were written, or None.
        """
        if name in self._tasks and self._tasks[name] is data:
            del self._tasks[name]
            self.num_bytes -= _length(data)


class DiskStore:
    """Stores bytes under keys. Each key has its own file, and a thread writes the files.

    Several threads may call the methods.
    """

    def __init__(self, folder: Path, max_bytes: int, identity: Mapping[str, str]) -> None:
        """Open a folder, and create the folder if it does not exist.

        Args:
            folder: the folder.
            max_bytes: the largest size of all files together.
            identity: identifies the model and its settings. Two stores with different identities
                can use the same folder, but they do not share files.

        Raises:
            OSError: if the folder cannot be created, read or written.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._identity = {"format": str(_FORMAT), **identity}
        # The key of the hash function that computes file names. If two stores have different
        # identities, their keys differ, so they never use the same file name.
        self._name_key = hashlib.blake2b(
            json.dumps(self._identity).encode(), digest_size=16
        ).digest()
        # Whether this store has already logged a warning. Later errors are not logged.
        self._has_warned = False

        # Protects the attributes below, which several threads use.
        self._lock = threading.Lock()
        # Maps the name of a file to its size. The least recently used file comes first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0  # the sum of the sizes
        self._rescan_due = 0.0  # the time at which the sizes are read again
        # The tasks that wait for the writer thread. Each task writes or deletes one file.
        self._pending = _PendingFiles()

        folder.mkdir(parents=True, exist_ok=True)
        self._find_existing_files()  # sets `_sizes` and `_num_bytes`
        # The names of the files in `_pending`, in the order in which the writer thread must write
        # or delete them. `None` ends the writer thread.
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write_files, name="prefix-disk", daemon=True)
        self._writer.start()

    def __contains__(self, key: bytes) -> bool:
        """Return whether the file of this key exists or will be written by the writer thread."""
        name = self._name(key)
        with self._lock:
            if name in self._pending:
                return self._pending[name] is not None
            return name in self._sizes

    @property
    def num_bytes(self) -> int:
        """The total size of all files, in bytes."""
        return self._num_bytes

    def read(self, key: bytes) -> bytes | None:
        """Return the bytes that are stored under a key, or None if there is no valid file.

        The file becomes the most recently used file. A damaged file is deleted.
        """
        name = self._name(key)
        with self._lock:
            if name in self._pending:
                # The file is not written yet. The writer thread will write the file, and will add
                # the file to `_sizes` as the most recently used file.
                return _content(self._pending[name])
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)  # the most recently used file is at the end
        data = self._read_and_touch(name)
        if data is None:
            return None
        header, content = _split_header(data)
        # The header contains the key, the size and a checksum of the content.
        is_valid = header == self._header(key, content)
        if not is_valid:
            self._delete_damaged(name)
            return None
        return content

    def _delete_damaged(self, name: str) -> None:
        """Delete a damaged file, and log a warning for the first such file."""
        self._warn(
            f"The file {self._folder / name} of the prefix cache is damaged or belongs to another "
            "model, so it is deleted and its tokens are computed again. Further such files are not "
            "reported."
        )
        self._delete_file(name)

    def _read_and_touch(self, name: str) -> bytes | None:
        """Return the content of a file, and set its modification time to the current time.

        When the folder is opened the next time, the modification times show which files were used
        least recently. If the file cannot be read, forget the file and return None. Also log a
        warning, unless another process has deleted the file.
        """
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            # Another process that uses the folder may delete a file at any time.
            is_expected = isinstance(error, FileNotFoundError) and self._folder.is_dir()
            if not is_expected:
                self._warn(f"The file {path} of the prefix cache cannot be read: {error}.")
            self._forget(name)
            return None
        with contextlib.suppress(OSError):  # The disk may be read-only after an error.
            os.utime(path)
        return data

    def write(self, key: bytes, content: bytes) -> bool:
        """Store bytes under a key. The writer thread writes the file in the background.

        Returns:
            False if too many bytes already wait for the writer thread. In this case, the bytes are
            not stored.
        """
        name = self._name(key)
        data = self._header(key, content) + b"\n" + content
        with self._lock:
            num_waiting = self._pending.num_bytes
            # If no bytes are waiting, accept a file of any size, because a file that is larger than
            # the limit could otherwise never be written.
            if num_waiting > 0 and num_waiting + len(data) > _MAX_PENDING_BYTES:
                return False
            self._pending.set(name, data)
        self._queue.put(name)  # needs no lock, because the writer thread looks up the task
        return True

    def delete(self, key: bytes) -> None:
        """Delete the file of a key in the background, if the file exists."""
        name = self._name(key)
        with self._lock:
            self._pending.set(name, None)
        self._queue.put(name)

    def flush(self, timeout_s: float) -> None:
        """Write all waiting files, and end the writer thread. Wait at most `timeout_s` seconds."""
        self._queue.put(None)
        self._writer.join(timeout_s)

    def _find_existing_files(self) -> None:
        """Record the sizes of the existing files, and delete unfinished files.

        Mutates: `_sizes`, `_num_bytes` and `_rescan_due`.
        """
        self._rescan_due = time.monotonic() + _RESCAN_AFTER_S
        existing_files = []
        min_unfinished_time = time.time() - _UNFINISHED_S
        for path in self._folder.iterdir():
            # Another process that uses the folder may delete a file at any time.
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if path.suffix == _SUFFIX:
                    existing_files.append((stat.st_mtime_ns, path.name, stat.st_size))
                elif path.suffix == _TEMPORARY_SUFFIX and stat.st_mtime < min_unfinished_time:
                    path.unlink()
        # The least recently used file has the smallest modification time.
        sizes = OrderedDict((name, size) for _modified, name, size in sorted(existing_files))
        with self._lock:
            self._sizes = sizes
            self._num_bytes = sum(sizes.values())

    def _write_files(self) -> None:
        """Write and delete files until the queue returns None. The writer thread runs this method.

        The queue contains the names of files. `_pending` maps the name of a file to its task: the
        new bytes of the file, or None if the file must be deleted.
        """
        while (name := self._queue.get()) is not None:
            with self._lock:
                if name not in self._pending:
                    # The file got a second task while the first task was waiting, so the queue
                    # contained the name twice. The second task is already done.
                    continue
                data = self._pending[name]
            try:
                if data is None:
                    self._delete_file(name)
                else:
                    self._write_file(name, data)
            except OSError as error:
                self._warn(
                    f"The prefix cache cannot write to the folder {self._folder}: {error}. "
                    "Further such errors are not reported."
                )
            with self._lock:
                self._pending.remove_if_unchanged(name, data)

    def _delete_file(self, name: str) -> None:
        """Delete a file of the folder, if the file exists."""
        (self._folder / name).unlink(missing_ok=True)
        self._forget(name)

    def _write_file(self, name: str, data: bytes) -> None:
        """Write a file of the folder. If the file exists already, replace its content.

        If the folder would become too large, the least recently used files are deleted first. If
        `data` alone exceeds the size limit of the folder, nothing is changed.
        """
        if len(data) > self._max_bytes:
            return
        if time.monotonic() >= self._rescan_due:
            self._find_existing_files()
        # An old file with this name exists until the new file replaces it. Therefore the old and
        # the new file together must not exceed the size limit.
        self._delete_oldest_files(len(data))
        _write_atomically(self._folder / name, data)
        self._forget(name)  # The old file no longer exists, so its size no longer counts.
        with self._lock:
            self._sizes[name] = len(data)
            self._num_bytes += len(data)

    def _delete_oldest_files(self, size: int) -> None:
        """Delete the least recently used files until a new file of `size` bytes fits."""
        while True:
            with self._lock:
                if self._num_bytes + size <= self._max_bytes or not self._sizes:
                    return
                name, old_size = self._sizes.popitem(last=False)
                self._num_bytes -= old_size
            (self._folder / name).unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        """Remove a file from `_sizes`, and update the total size. Do not delete the file.

        The method acquires `_lock`, so the caller must not hold the lock.
        """
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)

    def _header(self, key: bytes, content: bytes) -> bytes:
        """Return the header of a file: one line of JSON without a newline at its end."""
        checksum = hashlib.blake2b(content, digest_size=16).hexdigest()
        about = {"key": key.hex(), "size": len(content), "checksum": checksum}
        return json.dumps({**self._identity, **about}).encode()

    def _name(self, key: bytes) -> str:
        """Return the file name for a key. The name also depends on the identity of this store."""
        return hashlib.blake2b(key, digest_size=20, key=self._name_key).hexdigest() + _SUFFIX

    def _warn(self, message: str) -> None:
        """Log a warning, but only if this store has not logged a warning before."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(message)


def _split_header(data: bytes) -> tuple[bytes, bytes]:
    """Split the content of a file into the header (the first line) and the bytes after the header.

    Example: a file with the lines '{"size": 2}' and 'ab' gives b'{"size": 2}' and b"ab".
    """
    header, _newline, content = data.partition(b"\n")
    return header, content


def _content(data: bytes | None) -> bytes | None:
    """Return the content that a task writes after the header; None if the task deletes a file."""
    if data is None:
        return None
    _header, content = _split_header(data)
    return content


def _length(data: bytes | None) -> int:
    """Return the number of bytes that a task writes. The result is 0 if the task deletes a file."""
    return 0 if data is None else len(data)


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash of the process never leaves an incomplete file at `path`.

    The bytes are first written to a temporary file, which is then renamed. Only the current user
    can read the file. A crash of the machine can leave an incomplete file, because the bytes are
    not flushed to the disk. `DiskStore.read` detects such a file by its checksum.
    """
    temporary = path.with_suffix(f".{os.getpid()}{_TEMPORARY_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
