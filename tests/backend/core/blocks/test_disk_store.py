import errno
import logging
import os

import pytest
from nereid_backend.core.blocks import disk_store
from nereid_backend.core.blocks.disk_store import DiskStore

IDENTITY = {"model": "m", "dtype": "float32", "layout": "rows"}


def open_store(folder, max_bytes=10**6, **identity):
    return DiskStore(folder, max_bytes, {**IDENTITY, **identity})


def written(folder, contents, **settings):
    """Write files, and return the store after all files are written."""
    store = open_store(folder, **settings)
    for key, content in contents.items():
        assert store.write(key, content)
    store.flush(10)
    return store


def files_of(folder):
    return sorted(folder.glob("*.prefix"), key=lambda path: path.stat().st_mtime_ns)


def test_a_new_store_reads_what_an_earlier_store_has_written(tmp_path):
    written(tmp_path / "new folder", {b"a": b"1" * 100, b"b": b"", b"c": b"with\nnewlines\n"})
    store = open_store(tmp_path / "new folder")
    assert [store.read(key) for key in (b"a", b"b", b"c", b"d")] == [
        b"1" * 100,
        b"",
        b"with\nnewlines\n",
        None,
    ]
    assert (b"a" in store, b"d" in store) == (True, False)


def test_bytes_can_be_read_before_they_are_written(tmp_path):
    store = open_store(tmp_path)
    store.write(b"a", b"content")
    assert b"a" in store
    assert store.read(b"a") == b"content"
    store.delete(b"a")
    assert b"a" not in store
    store.flush(10)
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"x" + data[1:],
        lambda data: data.partition(b"\n")[0],
        lambda _: b"",
    ],
)
def test_a_damaged_file_is_deleted_and_reported_once(tmp_path, caplog, damage):
    written(tmp_path, {b"a": b"1" * 100, b"b": b"2" * 100})
    for path in files_of(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    caplog.set_level(logging.WARNING)
    store = open_store(tmp_path)
    assert [store.read(b"a"), store.read(b"b")] == [None, None]
    assert len(caplog.records) == 1
    assert files_of(tmp_path) == []
    assert store.num_bytes == 0


@pytest.mark.parametrize("name", IDENTITY)
def test_the_files_of_another_model_data_type_or_layout_are_not_read(tmp_path, name):
    written(tmp_path, {b"a": b"1"})
    assert b"a" not in open_store(tmp_path, **{name: "other"})
    assert open_store(tmp_path).read(b"a") == b"1"


def test_a_file_of_another_model_with_the_expected_name_is_not_used(tmp_path):
    written(tmp_path / "ours", {b"a": b"1"})
    written(tmp_path / "theirs", {b"a": b"1"}, model="other")
    (ours,), (theirs,) = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    ours.write_bytes(theirs.read_bytes())
    assert open_store(tmp_path / "ours").read(b"a") is None


def test_files_on_a_disk_that_became_read_only_are_used(tmp_path, monkeypatch):
    store = written(tmp_path, {b"a": b"content"})

    def fail(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "utime", fail)
    assert store.read(b"a") == b"content"


def test_the_files_that_were_not_used_for_the_longest_time_are_deleted(tmp_path):
    size = written(tmp_path, {b"a": b"1" * 1000}).num_bytes
    store = open_store(tmp_path, max_bytes=3 * size)
    for key in (b"b", b"c"):
        store.write(key, b"1" * 1000)
    store.flush(10)
    for number, path in enumerate(files_of(tmp_path)):
        os.utime(path, ns=(number, number))
    store = open_store(tmp_path, max_bytes=3 * size)
    assert all(key in store for key in (b"a", b"b", b"c"))

    store.read(b"a")
    store.write(b"d", b"1" * 1000)
    store.flush(10)
    remaining = [key for key in (b"a", b"b", b"c", b"d") if key in store]
    assert len(remaining) == 3
    assert {b"a", b"d"} < set(remaining)
    assert sum(path.stat().st_size for path in files_of(tmp_path)) == store.num_bytes == 3 * size


def test_a_file_that_is_larger_than_the_limit_is_not_written(tmp_path):
    store = written(tmp_path, {b"a": b"1" * 1000}, max_bytes=500)
    assert files_of(tmp_path) == []
    assert store.read(b"a") is None


def test_old_unfinished_files_are_deleted_and_other_files_stay(tmp_path):
    for name in ("old.prefix-part", "new.prefix-part", "notes.txt"):
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / "old.prefix-part", (0, 0))
    open_store(tmp_path)
    # Another process may still be writing the new file.
    assert {path.name for path in tmp_path.iterdir()} == {"new.prefix-part", "notes.txt"}


def test_two_stores_can_share_a_folder(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    for store in (first, second):
        store.write(b"a", b"1" * 1000)
        store.flush(10)
    assert [store.read(b"a") for store in (first, second)] == [b"1" * 1000] * 2
    for path in files_of(tmp_path):
        path.unlink()
    assert [store.read(b"a") for store in (first, second)] == [None, None]


def test_the_files_of_two_models_that_share_a_folder_stay_below_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "_RESCAN_AFTER_S", 0)
    stores = [open_store(tmp_path, max_bytes=2000, model=model) for model in "ab"]
    for store in stores:
        for number in range(20):
            store.write(bytes([number]), b"1" * 100)
        store.flush(10)
        assert 1000 < sum(path.stat().st_size for path in files_of(tmp_path)) <= 2000


def test_a_file_that_another_process_has_deleted_is_no_reason_for_a_warning(tmp_path, caplog):
    store = written(tmp_path, {b"a": b"1"})
    for path in files_of(tmp_path):
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert store.read(b"a") is None
    assert b"a" not in store
    assert not caplog.records


def test_writes_are_refused_while_too_many_bytes_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "_MAX_PENDING_BYTES", 1000)
    store = open_store(tmp_path)
    # The fake queue drops all items, so the store never writes them and their bytes stay pending.
    monkeypatch.setattr(store, "_queue", type("Queue", (), {"put": lambda *_: None})())
    assert store.write(b"a", b"1" * 600)
    assert not store.write(b"b", b"1" * 600)


def test_a_folder_that_disappears_is_reported_once(tmp_path, caplog):
    folder = tmp_path / "folder"
    store = written(folder, {b"a": b"1"})
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert store.read(b"a") is None
    assert b"a" not in store
    assert len(caplog.records) == 1


def test_only_the_owner_can_read_the_files(tmp_path):
    written(tmp_path, {b"a": b"1"})
    (path,) = files_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
