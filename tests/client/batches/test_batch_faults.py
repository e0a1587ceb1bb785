"""Tests that a batch continues after temporary faults, such as a full disk.

A faulty batch must not stop other batches.
"""

import asyncio
import errno
import os
import resource
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.batches import CHAT, jsonl, line
from nereid_client.batches import batch_run, batch_runner
from nereid_client.batches.batch_lines import ResultFile
from nereid_client.batches.batch_runner import BatchRunner
from nereid_client.batches.line_requests import LineResponse, LineSlots
from nereid_client.batches.stored_batches import BatchStore
from nereid_client.batches.stored_files import FileLimits, FileStore
from nereid_client.errors import ApiError
from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.shared_budget import SharedBudget
from nereid_client.protocol.batch_requests import CreateBatchRequest

pytestmark = pytest.mark.anyio


class Sender:
    """A fake sender that answers each request in the next iteration of the event loop."""

    async def send(self, path, body, client):
        await asyncio.sleep(0)
        return LineResponse(200, request_id="a", body={})


class SlowSender(Sender):
    """A fake sender that never answers the requests of the client `slow`."""

    async def send(self, path, body, client):
        if client.name == "slow":
            await asyncio.Event().wait()
        return await super().send(path, body, client)


class Keys:
    """A fake key file that contains every client."""

    def has(self, name):
        return True


@pytest.fixture
def store(tmp_path):
    return BatchStore(FileStore(tmp_path, FileLimits(count=100, num_bytes=1 << 20)))


def upload(store, num_lines, owner=""):
    """Store a batch file with `num_lines` chat requests, and return the file."""
    file = store.files.start_upload(owner)
    file.write(jsonl(map(line, range(num_lines))))
    return file.finish("requests.jsonl", "batch", keep_s=3600)


def create(store, num_lines, owner=""):
    file = upload(store, num_lines, owner)
    request = CreateBatchRequest(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return store.create(request, file)


@asynccontextmanager
async def running(store, num_slots, sender=None, key_file=None):
    """Run the batches of a store, and yield the runner. At most `num_slots` lines run at once."""
    gate = Gate(SharedBudget(100))
    runner = BatchRunner(
        store,
        sender=sender or Sender(),
        slots=LineSlots(num_slots, gate),
        gate=gate,
        key_file=key_file,
        max_line_bytes=1000,
    )
    yield runner
    await runner.close()


async def ended(store, batch):
    async with asyncio.timeout(5):
        while not (found := store.find(batch.id, batch.owner)).has_ended:
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
def full_disk(monkeypatch):
    """A list of exceptions that a test fills. Each write to a result file raises one of them.

    An exception is removed from the list when it is raised. If the list is empty, writes succeed.
    """
    failures = []
    append = ResultFile.append

    def fail_or_append(self, result):
        if failures:
            raise failures.pop()
        append(self, result)

    monkeypatch.setattr(ResultFile, "append", fail_or_append)
    return failures


async def test_a_batch_continues_after_the_disk_was_full_many_times(store, full_disk, monkeypatch):
    monkeypatch.setattr(batch_run, "_RETRY_STORAGE_S", 0.01)
    full_disk += [OSError(errno.ENOSPC, "No space left on device")] * 8
    batch = create(store, num_lines=20)
    async with running(store, num_slots=2):
        found = await ended(store, batch)
    assert found.request_counts.completed == 20


async def test_a_cancelled_batch_on_a_full_disk_does_not_stop_other_batches(
    store, full_disk, monkeypatch
):
    monkeypatch.setattr(batch_run, "_RETRY_STORAGE_S", 0.5)
    full_disk.append(OSError(errno.ENOSPC, "No space left on device"))
    cancelled = create(store, num_lines=20)
    async with running(store, num_slots=2) as runner:
        while full_disk:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the batch is now waiting for its next attempt
        store.cancel(cancelled)
        runner.wake_up()
        await asyncio.sleep(0.05)
        later = create(store, num_lines=1)
        runner.wake_up()
        assert (await ended(store, later)).status == "completed"
        assert (await ended(store, cancelled)).status == "cancelled"


@pytest.mark.parametrize(("num_lines", "status"), [(1, "completed"), (0, "failed")])
async def test_a_batch_ends_although_its_final_status_could_not_be_stored_at_first(
    store, monkeypatch, num_lines, status
):
    monkeypatch.setattr(batch_run, "_RETRY_STORAGE_S", 0.01)
    failures = [OSError(errno.ENOSPC, "No space left on device")]
    save = BatchStore.save

    def fail_or_save(self, batch):
        if batch.has_ended and failures:
            raise failures.pop()
        save(self, batch)

    monkeypatch.setattr(BatchStore, "save", fail_or_save)
    batch = create(store, num_lines)
    async with running(store, num_slots=1):
        assert (await ended(store, batch)).status == status
    assert not failures


async def test_many_long_batches_of_a_client_do_not_stop_the_batches_of_another_client(store):
    for _ in range(20):
        create(store, num_lines=1, owner="slow")
    quick = create(store, num_lines=1, owner="quick")
    async with running(store, num_slots=100, sender=SlowSender(), key_file=Keys()):
        assert (await ended(store, quick)).status == "completed"


def test_a_batch_that_cannot_be_saved_leaves_no_file(store, monkeypatch):
    batch = create(store, num_lines=1)
    names = {path.name for path in store.folder(batch.id).iterdir()}

    def fail(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        store.save(batch)
    assert {path.name for path in store.folder(batch.id).iterdir()} == names


def test_the_folder_of_a_batch_whose_creation_was_interrupted_is_deleted_after_a_day(store):
    batch = create(store, num_lines=1)
    interrupted = create(store, num_lines=1)
    (store.folder(interrupted.id) / "batch.json").unlink()
    store.delete_expired(time.time())
    assert store.folder(interrupted.id).exists()  # another process may be creating the batch
    store.delete_expired(time.time() + 2 * 24 * 3600)
    assert not store.folder(interrupted.id).exists()
    assert store.find(batch.id, "") is not None


def test_a_damaged_batch_is_deleted_after_30_days(store):
    batch, damaged = create(store, num_lines=1), create(store, num_lines=1)
    os.truncate(store.folder(damaged.id) / "batch.json", 20)
    store.delete_expired(time.time() + 29 * 24 * 3600)
    assert store.folder(damaged.id).exists()
    store.delete_expired(time.time() + 31 * 24 * 3600)
    assert not store.folder(damaged.id).exists()
    assert store.find(batch.id, "") is not None


def test_a_new_batch_replaces_the_oldest_ended_batch_of_the_client_with_the_most_batches(tmp_path):
    store = BatchStore(FileStore(tmp_path, FileLimits(count=6, num_bytes=1 << 20)))
    files = {owner: upload(store, num_lines=1, owner=owner) for owner in ("a", "b", "c")}

    def create_batch(owner):
        time.sleep(0.002)  # an id contains the time in milliseconds, and gives the order
        request = CreateBatchRequest(
            input_file_id=files[owner].id, endpoint=CHAT, completion_window="24h"
        )
        return store.create(request, files[owner])

    batches = [create_batch(owner) for owner in ("b", "a", "a", "a", "b", "c")]
    with pytest.raises(ApiError, match=r"6 batches that have not ended, and the limit is 6"):
        create_batch("b")
    for batch in (batches[0], batches[2], batches[3]):
        batch.set_status("completed")
        store.save(batch)
    new = create_batch("b")
    remaining = [*batches[:2], *batches[3:], new]
    assert {batch.id for batch in store.all()} == {batch.id for batch in remaining}


def test_a_client_with_a_key_cannot_fill_the_store_with_files(tmp_path):
    store = BatchStore(FileStore(tmp_path, FileLimits(count=8, num_bytes=1 << 20)))
    for _ in range(6):
        upload(store, num_lines=1, owner="a")
    with pytest.raises(ApiError, match=r"6 files, and the limit is 8 .* 6 of them belong to this"):
        upload(store, num_lines=1, owner="a")
    upload(store, num_lines=1, owner="b")


def test_a_client_with_a_key_cannot_fill_the_store_with_batches(tmp_path):
    store = BatchStore(FileStore(tmp_path, FileLimits(count=4, num_bytes=1 << 20)))
    files = {owner: upload(store, num_lines=1, owner=owner) for owner in ("a", "b")}
    request = CreateBatchRequest(input_file_id="file", endpoint=CHAT, completion_window="24h")
    for _ in range(3):
        store.create(request, files["a"])
    with pytest.raises(ApiError, match=r"3 batches .* limit is 4 .* 3 of them belong to this"):
        store.create(request, files["a"])
    store.create(request, files["b"])


def test_a_client_with_a_key_cannot_fill_the_store_with_bytes(tmp_path):
    files = FileStore(tmp_path, FileLimits(count=8, num_bytes=4 << 24))
    uploads = [files.start_upload("a") for _ in range(2)]
    for _ in range(3):  # the first upload receives two parts of 16 MiB, the second receives one
        uploads[0].write(b"a" * (1 << 24))
        uploads.reverse()
    with pytest.raises(ApiError, match=r"67108864 bytes or more.* 67108864 of them belong to this"):
        uploads[0].write(b"a" * (1 << 24))
    uploads.append(files.start_upload("b"))
    uploads[-1].write(b"a" * (1 << 23))
    for started in uploads:
        started.discard()


def test_a_full_disk_is_named_when_buffered_bytes_of_an_upload_are_written(store):
    started = store.files.start_upload("")
    started.write(b"a" * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # simulates a full disk
    try:
        with pytest.raises(ApiError, match="cannot write into its folder"):
            started.write(b"a" * (16 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    started.discard()


def test_a_file_that_cannot_be_read_for_a_moment_is_not_deleted(store, monkeypatch):
    file = upload(store, num_lines=1)

    def fail(self):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        store.files.delete_expired(time.time())
    assert store.files.find(file.id, "") == file


async def test_a_runner_that_is_woken_while_it_is_closed_ends(store):
    async with asyncio.timeout(5), running(store, num_slots=1) as runner:
        await asyncio.sleep(0.1)  # the runner is now waiting for its next check
        runner.wake_up()


async def test_batches_continue_after_files_were_deleted_although_the_clock_was_set_back(
    store, monkeypatch
):
    monkeypatch.setattr(batch_runner, "_CLEAN_UP_EVERY_S", 0.01)
    batch = create(store, num_lines=1)
    store.files.limits = FileLimits(count=100, num_bytes=1)  # with this limit, all batches wait
    async with running(store, num_slots=2) as runner:
        while not runner._slots.is_paused:
            await asyncio.sleep(0.01)
        yesterday = time.time() - 86400
        monkeypatch.setattr(batch_runner.time, "time", lambda: yesterday)
        store.files.limits = FileLimits(count=100, num_bytes=1 << 20)
        await asyncio.sleep(0.05)
        runner.wake_up()
        assert (await ended(store, batch)).status == "completed"
