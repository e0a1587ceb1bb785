"""Tests of the databases with which several frontend processes share limits and responses.

Two connections to a database stand for two processes.
"""

import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from fakes.app_client import client_of
from fakes.fake_backend import FakeBackend
from nereid_client.app import create_app
from nereid_client.errors import ApiError
from nereid_client.responses.response_store import Limits, Store, delete_running
from nereid_client.responses.stored_response import StoredResponse
from nereid_client.settings import Settings
from nereid_client.workers.shared_limits import (
    RequestsOfWorkers,
    UsagesOfWorkers,
    forget_worker,
    open_database,
)
from nereid_client.workers.worker_place import WorkerPlace


class Run:
    """A background response that is running."""

    id, owner = "resp_1", ""


@contextmanager
def two_workers(path, limit):
    """Yield the counts of the running requests of two workers, which share the database `path`."""
    with closing(open_database(path)) as first, closing(open_database(path)) as second:
        yield RequestsOfWorkers(limit, first, worker=0), RequestsOfWorkers(limit, second, worker=1)


def test_a_worker_that_ended_no_longer_counts(tmp_path):
    path = str(tmp_path / "requests.db")
    with two_workers(path, limit=4) as (first, second):
        first.add("a", 2)
        second.add("a", 1)
        assert (first.used, second.used) == (3, 3)
        assert (first.used_by("a"), first.used_by("b")) == (3, 0)

        forget_worker(path, 0)
        assert (first.used, second.used) == (1, 1)
        second.remove("a", 1)
        assert second.used == 0


@contextmanager
def full_disk(folder) -> Iterator[None]:
    """Simulate a full disk: during the `with` block, the files in `folder` cannot grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    max_size = max(path.stat().st_size for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_requests_are_counted_although_the_disk_is_full(tmp_path):
    path = str(tmp_path / "requests.db")
    with two_workers(path, limit=4) as (first, second), closing(open_database(path)) as database:
        usages = UsagesOfWorkers(database)
        with full_disk(tmp_path):
            for number in range(500):
                client = f"client {number % 50}"
                first.add(client, 1)
                second.add("", 1)
                usages.add(f"requests of {client}", 1, 1, now=0.0)
                assert first.used == 2
                first.remove(client, 1)
                second.remove("", 1)


def change_often(store) -> None:
    for _ in range(1000):
        store.begin(Run(), 100)
        store.delete(Run.id)


@pytest.mark.anyio
async def test_a_response_is_not_stored_while_the_disk_is_full(tmp_path):
    limits = Limits(count=3, num_bytes=1_000_000, age_s=60)
    store = Store(limits, path=str(tmp_path / "responses.db"))
    large_items = b"[" + b"0," * 50_000 + b"0]"
    record = StoredResponse("r1", b"{}", large_items, ())
    with full_disk(tmp_path):
        assert not store.add(record)
        with pytest.raises(ApiError) as raised:
            change_often(store)
        assert raised.value.status == 507
    assert store.add(record)
    store.close()


def test_a_used_amount_decreases_for_all_workers(tmp_path):
    path = str(tmp_path / "requests.db")
    databases = [open_database(path) for _ in range(2)]
    first, second = map(UsagesOfWorkers, databases)
    first.add("requests", 60, 60, now=0.0)
    second.add("requests", 20, 60, now=10.0)
    assert first.used("requests", 60, now=20.0) == 60
    assert second.used("requests", 60, now=1000.0) == 0
    for database in databases:
        database.close()


@pytest.mark.anyio
async def test_the_limits_of_the_response_store_hold_for_all_workers(tmp_path):
    path = str(tmp_path / "responses.db")
    limits = Limits(count=3, num_bytes=10_000, age_s=60)
    first, second = (Store(limits, path=path, worker=number) for number in (0, 1))
    with closing(first), closing(second):
        for number in range(6):
            store = (first, second)[number % 2]
            assert store.add(StoredResponse(f"r{number}", b"{}", b"[]", ()))
        stored_numbers = [number for number in range(6) if first.find(f"r{number}") is not None]
        assert stored_numbers == [3, 4, 5]

        first.begin(Run(), 100)
        assert len(second) == 3
        assert second.find("resp_1").worker == 0

        delete_running(path, 0)
        assert second.find("resp_1") is None
        assert second.num_bytes == second.find("r4").num_bytes + second.find("r5").num_bytes


@pytest.mark.anyio
async def test_a_response_of_a_worker_that_ended_is_unavailable(tmp_path):
    place = WorkerPlace(number=0, count=2, folder=str(tmp_path), port=0)
    app = create_app(Settings(served_model_name="echo"), FakeBackend, place)
    limits = Limits(count=3, num_bytes=10_000, age_s=60)
    store_of_other_worker = Store(limits, path=place.responses_path, worker=1)
    store_of_other_worker.begin(Run(), 100)
    async with client_of(app) as client:
        answer = await client.get("/v1/responses/resp_1")
        abortion = await client.post("/abort_request", json={"abort_all": True})
    store_of_other_worker.close()

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"
    assert abortion.json() == {"num_aborted": 0}
