"""Stores uploaded files and the result files of batches in a folder on disk.

FOLDER/files/FILE_ID/content         the bytes
FOLDER/files/FILE_ID/metadata.json   the file object
FOLDER/uploads/OWNER-FILE_ID/content an incomplete upload; it is moved to FOLDER/files at the end

OWNER is a digest of the client's name. A client with a name can use only a share of the limits.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereid_client.errors import ApiError
from nereid_client.middleware.shared_budget import is_within_share, share_sentence

KEEP_S = 30 * 24 * 3600
"""A file is deleted this number of seconds after its upload, as in OpenAI's API. An ended batch is
deleted this number of seconds after the time in its field `expires_at`.
"""
_UPLOAD_TIME_S = 24 * 3600  # an older unfinished upload is considered to be interrupted
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class FileLimits:
    """The limits on the number and the size of the files in the folder.

    Attributes:
        count: the largest number of files, and the largest number of batches.
        num_bytes: the largest size of all files together.
    """

    count: int
    num_bytes: int


@dataclass(frozen=True)
class StoredFile:
    """The metadata of a stored file: the fields of OpenAI's API, and the owner of the file.

    Attributes:
        id: the id of the file, which is "file-" followed by 24 hexadecimal digits.
        owner: the name of the client that owns the file.
        bytes: the size of the file.
        created_at: the Unix time of the upload, in seconds.
        expires_at: the Unix time at which the file is deleted, in seconds.
        filename: the name that the client gave. It is never used as a path.
        purpose: "batch" for input files, "batch_output" for result files.
    """

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def as_json(self) -> dict[str, Any]:
        """Return the file object that clients receive."""
        fields = asdict(self)
        del fields["owner"]
        return {"object": "file", "status": "processed", **fields}


def new_id(prefix: str) -> str:
    """Return a new id: the prefix, the current time in milliseconds, and random digits.

    In a sorted list, the ids of newer files therefore come after the ids of older files.

    Example: `new_id("file-")` returns "file-019ab2c4d5e6" followed by 12 random digits.
    """
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically. A reader sees either the old or the new content.

    Raises: OSError. The old file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        # While the disk is full, a batch is saved again and again. Without this line, each failed
        # attempt would leave a temporary file.
        temporary.unlink(missing_ok=True)
        raise


class FileStore:
    """The files in a folder. Several processes may use the same folder.

    All methods access the disk, so call them in a thread.

    Args:
        folder: the folder. It is created by the first upload.
        limits: the limits of the folder.
    """

    def __init__(self, folder: Path, limits: FileLimits) -> None:
        self.folder = folder
        self.limits = limits
        self._files = folder / "files"
        self._uploads = folder / "uploads"

    def all(self, owner: str) -> Iterator[StoredFile]:
        """Yield the files of the client `owner`, starting with the newest file."""
        for file_id in sorted(names_in(self._files), reverse=True):
            file = self._read(file_id)
            if file is not None and file.owner == owner:
                yield file

    def find(self, file_id: str, owner: str) -> StoredFile | None:
        """Return the file with this id, or None if the client `owner` has no such file."""
        if not re.fullmatch(r"file-[0-9a-f]{24}", file_id):
            return None
        file = self._read(file_id)
        return file if file is not None and file.owner == owner else None

    def content(self, file_id: str) -> Path:
        """Return the path of the file that contains the uploaded bytes."""
        return self._files / file_id / "content"

    def delete(self, file_id: str) -> None:
        """Delete a file. A batch that already uses the file can still read it."""
        shutil.rmtree(self._files / file_id, ignore_errors=True)

    def start_upload(self, owner: str) -> "Upload":
        """Begin an upload of the client `owner`. Return the object that receives the bytes.

        Raises: ApiError if the folder is full or cannot be written, or if the client uses its share
            of the folder.
        """
        num_files, limit = len(names_in(self._files)), self.limits.count
        num_own = sum(1 for _ in self.all(owner)) if owner else 0
        if not is_within_share(1, num_own, num_files, limit):
            raise ApiError(
                400,
                f"The server stores {num_files} files, and the limit is {limit} "
                f"(max_stored_files). {share_sentence(num_own)}Delete files that are no longer "
                "needed.",
                limit="max_stored_files",
            )
        with disk_errors(self.folder):
            self._uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            return Upload(self, owner, new_id("file-"), self._uploads)

    def publish(self, file: StoredFile, source: Path) -> None:
        """Store a complete file. If a file with this id is already stored, do nothing.

        Args:
            file: the file object.
            source: the folder that contains the file `content`. This folder is moved to the store.

        Raises: OSError.
        """
        target = self._files / file.id
        if target.exists():
            return
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(source / "metadata.json", asdict(file))
        source.rename(target)

    def num_bytes(self) -> int:
        """Return the total size of the files in the folder, in bytes.

        Stored files, unfinished uploads and the results of running batches are counted.
        """
        paths = [Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names]
        return sum(_counted_bytes(path) for path in paths)

    def num_bytes_of(self, owner: str) -> int:
        """Return the total size of the client's stored files and unfinished uploads, in bytes."""
        uploads = self._uploads.glob(f"{_digest(owner)}-*/content")
        return sum(file.bytes for file in self.all(owner)) + sum(map(_counted_bytes, uploads))

    def delete_expired(self, now: float) -> None:
        """Delete files that have expired or are damaged, and uploads that were interrupted.

        Args:
            now: the current Unix time, in seconds.
        """
        self._delete_expired_files(now)
        self._delete_interrupted_uploads(now)

    def _delete_expired_files(self, now: float) -> None:
        """Delete each file whose time `expires_at` has passed or whose metadata is damaged."""
        for file_id in names_in(self._files):
            try:
                file = self._read_metadata(file_id)
            except OSError:
                # The metadata cannot be read now, for example because this process has
                # too many open files. The file may not have expired yet.
                continue
            if file is None or file.expires_at <= now:  # damaged or expired
                self.delete(file_id)

    def _delete_interrupted_uploads(self, now: float) -> None:
        """Delete each upload that has received no bytes for `_UPLOAD_TIME_S` seconds."""
        for name in names_in(self._uploads):
            folder = self._uploads / name
            with suppress(FileNotFoundError):
                if folder.stat().st_mtime < now - _UPLOAD_TIME_S:
                    shutil.rmtree(folder, ignore_errors=True)

    def _read(self, file_id: str) -> StoredFile | None:
        """Return a file, or None if it has expired, is damaged or cannot be read."""
        try:
            file = self._read_metadata(file_id)
        except OSError:
            return None
        return file if file is not None and file.expires_at > time.time() else None

    def _read_metadata(self, file_id: str) -> StoredFile | None:
        """Return the metadata of a file, or None if the metadata is missing or damaged.

        Raises: OSError if the metadata exists, but cannot be read.
        """
        try:
            return StoredFile(**json.loads((self._files / file_id / "metadata.json").read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


class Upload:
    """An upload: a file that the frontend is receiving from a client.

    Args:
        store: the store to which `finish` adds the file.
        owner: the name of the client that uploads the file.
        file_id: the id of the file.
        folder: the folder of the uploads.
    """

    # An upload computes the size of the whole folder again each time it has received this number of
    # bytes, because other uploads write to the same folder.
    _CHECK_EVERY_BYTES = 16 * 1024 * 1024

    def __init__(self, store: FileStore, owner: str, file_id: str, folder: Path) -> None:
        self.num_bytes = 0  # the bytes of the file that have arrived
        self._store = store
        self._owner = owner
        self._id = file_id
        self._folder = folder / f"{_digest(owner)}-{file_id}"
        self._folder.mkdir(mode=0o700)
        self._file = (self._folder / "content").open("wb")
        self._unchecked_bytes = self._CHECK_EVERY_BYTES  # the first write checks the size

    def write(self, data: bytes) -> None:
        """Append bytes to the upload.

        Raises: ApiError 413 if the folder is full, 507 if the disk is full.
        """
        self.num_bytes += len(data)
        self._unchecked_bytes += len(data)
        is_check_due = self._unchecked_bytes >= self._CHECK_EVERY_BYTES
        # Adding the sizes of all files in the folder is slow, so the folder is checked only after
        # every `_CHECK_EVERY_BYTES` bytes. A file that alone exceeds the limit is rejected at once.
        exceeds_limit_alone = self.num_bytes > self._store.limits.num_bytes
        with disk_errors(self._store.folder):
            if is_check_due or exceeds_limit_alone:
                self._unchecked_bytes = 0
                self._check_folder_size(num_new_bytes=len(data))
            self._file.write(data)

    def _check_folder_size(self, num_new_bytes: int) -> None:
        """Raise an ApiError 413 if the client may not store `num_new_bytes` more bytes."""
        # The sizes of all files on the disk are added, including the file of this upload. Buffered
        # bytes of this file must therefore be written first.
        self._file.flush()
        num_stored, limit = self._store.num_bytes(), self._store.limits.num_bytes
        num_own = self._store.num_bytes_of(self._owner) if self._owner else 0
        if not is_within_share(num_new_bytes, num_own, num_stored, limit):
            sentence = share_sentence(num_own and num_own + num_new_bytes)
            raise ApiError(
                413,
                f"With this file, the server would store {num_stored + num_new_bytes} bytes or "
                f"more, but the limit is {limit} (max_stored_file_bytes). {sentence}Delete files "
                "that are no longer needed, or send a smaller file.",
                code="request_too_large",
                limit="max_stored_file_bytes",
            )

    def finish(self, filename: str, purpose: str, keep_s: int) -> StoredFile:
        """Add the complete file to the store, and return the metadata of the file.

        Raises: ApiError 507 if the disk is full.
        """
        now = int(time.time())
        file = StoredFile(
            id=self._id,
            owner=self._owner,
            bytes=self.num_bytes,
            created_at=now,
            expires_at=now + keep_s,
            filename=filename[:255],
            purpose=purpose,
        )
        with disk_errors(self._store.folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._store.publish(file, self._folder)
        return file

    def discard(self) -> None:
        """Delete the received bytes, unless `finish` has already stored the file."""
        # `close` writes the remaining bytes, and raises an OSError if the disk is full.
        with suppress(OSError):
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to an ApiError. The ApiError names the folder.

    The status is 507 if the disk is full, and 500 otherwise.
    """
    try:
        yield
    except OSError as error:
        status = 507 if error.errno in _DISK_FULL else 500
        raise ApiError(
            status,
            f"The server cannot write into its folder {folder} (batch_folder): {error.strerror}.",
            code="storage_error",
        ) from None


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, or an empty list if the folder does not exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _digest(owner: str) -> str:
    """Return 16 hexadecimal digits that stand for the name of a client in the name of a folder."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]


def _counted_bytes(path: Path) -> int:
    """Return the number of bytes that a file adds to the counted size of the folder.

    The input of a batch is usually a hard link to a stored file. Its bytes are not counted, because
    they are already counted for the stored file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:  # another process has deleted the file
        return 0
    is_link_of_stored_file = path.name == "input" and status.st_nlink > 1
    return 0 if is_link_of_stored_file else status.st_size
