# SPDX-License-Identifier: Apache-2.0
"""A folder of files with a size limit. Each file contains the bytes that belong to one key.

    header    one line of JSON: format, model, dtype and layout; key, size and checksum of the bytes
    content   the bytes

A file is used only if its header is exactly the expected header, so files that are damaged and
files of another model, data type or layout are ignored. Each file is first written under a
temporary name, so a crash never leaves half a file under its final name. If the folder is full, the
file that was not used for the longest time is deleted. Files with other names are never touched.
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
# A process that crashes leaves an unfinished file. Only a file older than this number of seconds is
# deleted, because another process may still be writing a younger file.
_UNFINISHED_S = 60
# The largest number of bytes in the queue of the writer thread. If the queue would become larger,
# `write` does nothing and returns False. Without this limit, the queue could fill the memory while
# the disk is slow.
_MAX_PENDING_BYTES = 256 * 2**20


class DiskStore:
    """Stores bytes under keys, in files of one folder. A thread writes the files.

    The methods may be called by several threads.
    """

    def __init__(self, folder: Path, max_bytes: int, identity: Mapping[str, str]) -> None:
        """Open a folder, and create the folder if it does not exist.

        Args:
            folder: the folder.
            max_bytes: the largest size of all files together.
            identity: names what determines the bytes in addition to their keys, such as the model.
                Two stores with different identities can share a folder, but not the files.

        Raises:
            OSError: if the folder cannot be created, read or written.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._identity = {"format": str(_FORMAT), **identity}
        self._name_key = hashlib.blake2b(
            json.dumps(self._identity).encode(), digest_size=16
        ).digest()
        self._lock = threading.Lock()
        # A mapping from the name of a file to its size. The least recently used file is first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        # The changes that the writer thread must still make. The dict maps the name of a file to
        # the bytes to write, or to None if the file must be deleted.
        self._pending: dict[str, bytes | None] = {}
        self._num_pending_bytes = 0
        self._has_warned = False
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write_files, name="prefix-disk", daemon=True)
        self._writer.start()

    def __contains__(self, key: bytes) -> bool:
        """Return whether a file with this key exists or is waiting to be written."""
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
        """Return the bytes that were stored under a key, or None if the key has no valid file."""
        name = self._name(key)
        with self._lock:
            if name in self._pending:
                # The writer thread has not written or deleted this file yet.
                waiting_data = self._pending[name]
                return None if waiting_data is None else waiting_data.partition(b"\n")[2]
            if name not in self._sizes:
                return None
            self._sizes.move_to_end(name)
        path = self._folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError as error:
            self._warn(f"The file {path} of the prefix cache cannot be read: {error}.")
            self._forget(name)
            return None
        header, separator, content = data.partition(b"\n")
        if separator and header == self._header(key, content):
            return content
        self._warn(
            f"The file {path} of the prefix cache is damaged or belongs to another model, so it is "
            "deleted and its tokens are computed again. Further such files are not reported."
        )
        path.unlink(missing_ok=True)
        self._forget(name)
        return None

    def write(self, key: bytes, content: bytes) -> bool:
        """Write a file in the background.

        Returns:
            False if too many bytes are waiting to be written already. Nothing is written then.
        """
        name = self._name(key)
        data = self._header(key, content) + b"\n" + content
        with self._lock:
            if self._num_pending_bytes + len(data) > max(_MAX_PENDING_BYTES, len(data)):
                return False
            self._num_pending_bytes += len(data) - len(self._pending.get(name) or b"")
            self._pending[name] = data
        self._queue.put(name)
        return True

    def delete(self, key: bytes) -> None:
        """Delete the file of a key in the background, if the file exists."""
        name = self._name(key)
        with self._lock:
            self._num_pending_bytes -= len(self._pending.get(name) or b"")
            self._pending[name] = None
        self._queue.put(name)

    def flush(self, timeout_s: float) -> None:
        """Write all waiting files, and stop the writer thread. Wait at most `timeout_s` seconds."""
        self._queue.put(None)
        self._writer.join(timeout_s)

    def _scan(self) -> None:
        """Read the sizes of the existing files, and delete unfinished files."""
        found = []
        oldest_unfinished = time.time() - _UNFINISHED_S
        for path in self._folder.iterdir():
            # Another process that uses the folder may delete a file at any time.
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if path.suffix == _SUFFIX:
                    found.append((stat.st_mtime_ns, path.name, stat.st_size))
                elif path.suffix == _TEMPORARY_SUFFIX and stat.st_mtime < oldest_unfinished:
                    path.unlink()
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._num_bytes += size

    def _write_files(self) -> None:
        """Write and delete files until the queue contains None. The writer thread runs this method.

        The queue contains the names of files. `_pending` has the bytes to write for each name, or
        None if the file must be deleted.
        """
        while (name := self._queue.get()) is not None:
            with self._lock:
                if name not in self._pending:
                    continue
                data = self._pending[name]
            try:
                self._write_or_delete(name, data)
            except OSError as error:
                self._warn(
                    f"The prefix cache cannot write to the folder {self._folder}: {error}. "
                    "Further such errors are not reported."
                )
            with self._lock:
                # If `write` was called again with the same key, `_pending` contains newer bytes,
                # and the queue contains the name once more. Leave the newer bytes in `_pending` for
                # the next turn of the loop.
                if name in self._pending and self._pending[name] is data:
                    del self._pending[name]
                    self._num_pending_bytes -= len(data or b"")

    def _write_or_delete(self, name: str, data: bytes | None) -> None:
        """Write the bytes `data` to the file `name`. If `data` is None, delete the file.

        The bytes are first written to a temporary file, so that a crash never leaves half a file.
        """
        path = self._folder / name
        if data is None:
            path.unlink(missing_ok=True)
            self._forget(name)
            return
        if len(data) > self._max_bytes:
            return
        self._make_room(len(data))
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
        self._forget(name)
        with self._lock:
            self._sizes[name] = len(data)
            self._num_bytes += len(data)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until a new file of `size` bytes fits.

        The least recently used files are deleted first.
        """
        while True:
            with self._lock:
                if self._num_bytes + size <= self._max_bytes or not self._sizes:
                    return
                name, old_size = self._sizes.popitem(last=False)
                self._num_bytes -= old_size
            (self._folder / name).unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)

    def _header(self, key: bytes, content: bytes) -> bytes:
        """Return the header line of a file, without a newline."""
        checksum = hashlib.blake2b(content, digest_size=16).hexdigest()
        about = {"key": key.hex(), "size": len(content), "checksum": checksum}
        return json.dumps({**self._identity, **about}).encode()

    def _name(self, key: bytes) -> str:
        """Return the file name for a key. The name also depends on the identity of this store."""
        return hashlib.blake2b(key, digest_size=20, key=self._name_key).hexdigest() + _SUFFIX

    def _warn(self, message: str) -> None:
        """Log a warning, but only the first time that this store calls the method."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(message)
