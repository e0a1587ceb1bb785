"""Tests of the databases with which several frontend processes share limits and responses.

Two connections to a database stand for two processes.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
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


def test_a_worker_that_ended_no_longer_counts(tmp_path):
    path = str(tmp_path / "requests.db")
    databases = [open_database(path) for _ in range(2)]
    first, second = (RequestsOfWorkers(4, one, n) for n, one in enumerate(databases))
    first.add("a", 2)
    second.add("a", 1)
    assert (first.used, second.used, first.used_by("a"), first.used_by("b")) == (3, 3, 3, 0)
    forget_worker(path, 0)
    assert (first.used, second.used) == (1, 1)
    second.remove("a", 1)
    assert second.used == 0
    for database in databases:
        database.close()


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
    databases = [open_database(path) for _ in range(2)]
    first, second = (RequestsOfWorkers(4, one, n) for n, one in enumerate(databases))
    usages = UsagesOfWorkers(databases[0])
    with full_disk(tmp_path):
        for number in range(500):
            first.add(f"client {number % 50}", 1)
            second.add("", 1)
            usages.add(f"requests of client {number % 50}", 1, 1, now=0.0)
            assert first.used == 2
            first.remove(f"client {number % 50}", 1)
            second.remove("", 1)
    for database in databases:
        database.close()


def change_often(store) -> None:
    for _ in range(1000):
        store.begin(Run(), 100)
        store.delete(Run.id)


@pytest.mark.anyio
async def test_a_response_is_not_stored_while_the_disk_is_full(tmp_path):
    limits = Limits(count=3, num_bytes=1_000_000, age_s=60)
    store = Store(limits, path=str(tmp_path / "responses.db"))
    record = StoredResponse("r1", b"{}", b"[" + b"0," * 50_000 + b"0]", ())
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
    stores = [Store(limits, path=path, worker=number) for number in (0, 1)]
    for number in range(6):
        assert stores[number % 2].add(StoredResponse(f"r{number}", b"{}", b"[]", ()))
    assert [stores[0].find(f"r{number}") is None for number in range(6)] == [True] * 3 + [False] * 3
    stores[0].begin(Run(), 100)
    assert len(stores[1]) == 3
    assert stores[1].find("resp_1").worker == 0
    delete_running(path, 0)
    assert stores[1].find("resp_1") is None
    assert stores[1].num_bytes == sum(stores[1].find(f"r{number}").num_bytes for number in (4, 5))
    for store in stores:
        store.close()


@pytest.mark.anyio
async def test_a_response_of_a_worker_that_ended_is_unavailable(tmp_path):
    place = WorkerPlace(0, 2, str(tmp_path), 0)
    app = create_app(Settings(served_model_name="echo"), FakeBackend, place)
    limits = Limits(count=3, num_bytes=10_000, age_s=60)
    other = Store(limits, path=place.responses_path, worker=1)
    other.begin(Run(), 100)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://frontend") as client,
    ):
        answer = await client.get("/v1/responses/resp_1")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        aborted = await client.post("/abort_request", json={"abort_all": True})
        assert aborted.json() == {"num_aborted": 0}
    other.close()
