"""Stores batches on disk.

FOLDER/batches/BATCH_ID/batch.json       the batch; only the process that runs the batch changes it
FOLDER/batches/BATCH_ID/input            a link to the content of the input file
FOLDER/batches/BATCH_ID/cancel           exists if a client has cancelled the batch
FOLDER/batches/BATCH_ID/output/content   the responses so far
FOLDER/batches/BATCH_ID/errors/content   the errors so far
"""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from nereid_client.batches.stored_files import (
    KEEP_S,
    FileStore,
    StoredFile,
    disk_errors,
    names_in,
    new_id,
    write_json,
)
from nereid_client.errors import ApiError
from nereid_client.middleware.shared_budget import is_within_share, share_sentence
from nereid_client.protocol.batch_requests import CreateBatchRequest

WINDOW_S = 24 * 3600
"""A batch expires this number of seconds after its creation."""

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"
]
_ENDED = ("completed", "failed", "expired", "cancelled")


class RequestCounts(BaseModel):
    """The number of requests in a batch, and the numbers of completed and failed requests.

    Attributes:
        total: all lines.
        completed: the lines with a successful response.
        failed: the lines with an error.
    """

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    """A batch, with the fields of OpenAI's API and three fields that clients do not receive.

    Attributes:
        owner: the name of the client that created the batch.
        keep_output_s: the seconds after which the result files are deleted.
        outcome: the final status of a batch whose present status is "finalizing".
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    owner: str
    keep_output_s: int
    outcome: Literal["completed", "expired", "cancelled"] = "completed"

    @property
    def has_ended(self) -> bool:
        """Whether the batch will not change any more."""
        return self.status in _ENDED

    def set_status(self, status: Status) -> None:
        """Set the status of the batch, and store the time at which the batch reached this status.

        Example: the status "failed" also sets `failed_at`.
        """
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def as_json(self) -> dict[str, Any]:
        """Return the batch object that clients receive."""
        fields = self.model_dump(exclude={"owner", "keep_output_s", "outcome"})
        if self.cancelling_at is not None and self.status in ("validating", "in_progress"):
            fields["status"] = "cancelling"
        return fields


class BatchStore:
    """The batches that are stored in the folder of a file store.

    All methods access the disk, so call them in a thread.

    Args:
        files: the file store, which contains the input files and receives the result files.
    """

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._folder = files.folder / "batches"

    def folder(self, batch_id: str) -> Path:
        """Return the folder of a batch."""
        return self._folder / batch_id

    def create(self, request: CreateBatchRequest, file: StoredFile) -> Batch:
        """Store a new batch. The batch runner later finds and starts the batch.

        If the number of batches has reached the limit, an ended batch is deleted first.

        Raises: ApiError if there are too many unfinished batches, in total or of this client, or if
            the folder cannot be written.
        """
        self._make_space(file.owner)
        batch = _new_batch(request, file)
        folder = self.folder(batch.id)
        with disk_errors(self.files.folder):
            folder.mkdir(mode=0o700, parents=True)
            try:
                _link_or_copy(self.files.content(file.id), folder / "input")
                self.save(batch)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return batch

    def _make_space(self, owner: str) -> None:
        """Delete an ended batch if the number of stored batches has reached the limit.

        The limit is the setting `max_stored_files`. The oldest ended batch of the client that has
        the most batches is deleted. Its result files stay in the file store.

        Raises: ApiError 400 if the unfinished batches leave no space for a batch of `owner`.
        """
        batches = list(self.all())  # the newest batch first
        limit = self.files.limits.count
        unfinished = [batch.owner for batch in batches if not batch.has_ended]
        num_own = unfinished.count(owner) if owner else 0
        if not is_within_share(1, num_own, len(unfinished), limit):
            raise ApiError(
                400,
                f"The server stores {len(unfinished)} batches that have not ended, and the limit "
                f"is {limit} (max_stored_files). {share_sentence(num_own)}Wait until a batch has "
                "ended, or cancel one.",
                limit="max_stored_files",
            )
        ended = [batch for batch in reversed(batches) if batch.has_ended]
        if len(batches) >= limit and ended:
            num_of_owner = Counter(batch.owner for batch in batches)
            # If several batches have the same owner, `max` returns the first one, the oldest.
            oldest = max(ended, key=lambda batch: num_of_owner[batch.owner])
            shutil.rmtree(self.folder(oldest.id), ignore_errors=True)

    def find(self, batch_id: str, owner: str) -> Batch | None:
        """Return the batch with this id, or None if the client `owner` has no such batch."""
        if not re.fullmatch(r"batch_[0-9a-f]{24}", batch_id):
            return None
        batch = self._read(batch_id)
        return batch if batch is not None and batch.owner == owner else None

    def all(self) -> Iterator[Batch]:
        """Yield the batches of all clients, the newest batch first."""
        for batch_id in sorted(names_in(self._folder), reverse=True):
            batch = self._read(batch_id)
            if batch is not None:
                yield batch

    def unfinished(self, ended: Set[str]) -> list[Batch]:
        """Return the batches that have not ended, the oldest batch first.

        Args:
            ended: the ids of batches that are known to have ended. These batches are not read from
                the disk.
        """
        batches = [self._read(batch_id) for batch_id in sorted(set(names_in(self._folder)) - ended)]
        return [batch for batch in batches if batch is not None and not batch.has_ended]

    def save(self, batch: Batch) -> None:
        """Write the file batch.json of a batch.

        After `create`, only the process that runs the batch may call this method.

        Raises: OSError.
        """
        write_json(
            self.folder(batch.id) / "batch.json", batch.model_dump(exclude={"cancelling_at"})
        )

    def cancel(self, batch: Batch) -> Batch:
        """Request the cancellation of a batch, and return the updated batch.

        Raises: ApiError if the folder cannot be written.
        """
        with disk_errors(self.files.folder):
            (self.folder(batch.id) / "cancel").touch()
        return self._read(batch.id) or batch

    def is_cancelled(self, batch: Batch) -> bool:
        """Return whether a client has cancelled a batch."""
        return (self.folder(batch.id) / "cancel").exists()

    def publish(self, batch: Batch) -> None:
        """Move the result files of a batch to the file store, so that clients can read them.

        The ids of the result files must be set. Files that an interrupted call has moved already
        are skipped.

        Raises: OSError.
        """
        self._publish_file(batch, "output", batch.output_file_id)
        self._publish_file(batch, "errors", batch.error_file_id)

    def _publish_file(self, batch: Batch, name: str, file_id: str | None) -> None:
        """Move a result file of a batch to the file store, unless this has already been done."""
        if file_id is None:
            return
        folder = self.folder(batch.id) / name
        if not folder.exists():  # an interrupted call has moved the file, before a restart
            return
        now = int(time.time())
        file = StoredFile(
            id=file_id,
            owner=batch.owner,
            bytes=(folder / "content").stat().st_size,
            created_at=now,
            expires_at=now + batch.keep_output_s,
            filename=f"{batch.id}_{name}.jsonl",
            purpose="batch_output",
        )
        self.files.publish(file, folder)

    def delete_expired(self, now: float) -> None:
        """Delete the ended batches whose time `expires_at` is more than KEEP_S seconds ago.

        Also delete old folders without a valid batch, because they count towards the limit.
        """
        for batch in self.all():
            if batch.has_ended and batch.expires_at + KEEP_S <= now:
                shutil.rmtree(self.folder(batch.id), ignore_errors=True)
        for batch_id in names_in(self._folder):
            # Another process may delete the folder, or too many files may be open.
            with suppress(OSError):
                self._delete_if_invalid(batch_id, now)

    def _delete_if_invalid(self, batch_id: str, now: float) -> None:
        """Delete the folder of a batch if batch.json has been missing or damaged for a long time.

        `create` leaves a folder without batch.json if the process is killed. Such a folder is
        deleted after WINDOW_S seconds. A folder with a damaged file is deleted after KEEP_S
        seconds. The time starts at the last change in the folder.

        Raises: OSError if the folder or the file cannot be read.
        """
        folder = self.folder(batch_id)
        keep_s = KEEP_S if (folder / "batch.json").exists() else WINDOW_S
        cutoff = now - keep_s
        if folder.stat().st_mtime < cutoff and self._read_valid(batch_id) is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, batch_id: str) -> Batch | None:
        """Return a batch, or None if the batch is damaged or cannot be read."""
        try:
            return self._read_valid(batch_id)
        except OSError:
            return None

    def _read_valid(self, batch_id: str) -> Batch | None:
        """Return a batch, or None if its file batch.json is missing or damaged.

        Raises: OSError if the batch exists, but cannot be read.
        """
        folder = self.folder(batch_id)
        try:
            batch = Batch.model_validate_json((folder / "batch.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None  # the batch is incomplete, or another process is deleting it
        with suppress(FileNotFoundError):
            batch.cancelling_at = int((folder / "cancel").stat().st_mtime)
        return batch


def _new_batch(request: CreateBatchRequest, file: StoredFile) -> Batch:
    """Create the batch object for a request. The batch has not started yet."""
    now = int(time.time())
    expiry = request.output_expires_after
    return Batch(
        id=new_id("batch_"),
        endpoint=request.endpoint,
        input_file_id=file.id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=request.metadata,
        owner=file.owner,
        keep_output_s=expiry.seconds if expiry is not None else KEEP_S,
    )


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a file. If the file system has no hard links, copy the file."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
