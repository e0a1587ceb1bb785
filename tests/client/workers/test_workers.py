"""Tests of a frontend that consists of several processes on one port, with the echo model.

Each request uses its own connection, so the kernel distributes the requests over the processes.
"""

import concurrent.futures
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from fakes.live_frontend import free_port, wait_for
from nereid_client.settings import Settings
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.workers import worker_pool
from nereid_client.workers.shared_limits import RequestsOfWorkers, open_database
from nereid_client.workers.worker_place import WorkerPlace
from nereid_client.workers.worker_pool import WorkerPool, _Worker

KEYS = """
[limited]
key = "limited"
requests_per_minute = 10

[narrow]
key = "narrow"
max_concurrent_requests = 3

[other]
key = "other"
"""
NUM_WORKERS = 3
TESTS = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


class Pool:
    """A running frontend that consists of several worker processes."""

    def __init__(self, process, port):
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method, path, key="other", **options):
        """Send a request over its own connection, and return the response."""
        headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **options)

    def chat(self, text, key="other", **fields):
        messages = [{"role": "user", "content": text}]
        return self.request("POST", CHAT, key, json={"messages": messages, **fields})

    def workers(self):
        return psutil.Process(self.process.pid).children()

    def num_running(self):
        return self.request("GET", "/health/ready").json()["num_requests"]

    def counter(self, name, **labels):
        """Return the sum of all samples of the metric `name` that have the given labels."""
        text = self.request("GET", "/metrics").text
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for given, value in lines if wanted <= set(given.split(",")))


@contextmanager
def running_pool(folder, *flags, num_workers=NUM_WORKERS, wait_until_ready=True):
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    port = free_port()
    given = {
        "--port": port,
        "--frontend-workers": num_workers,
        "--api-key-file": keys,
        "--served-model-name": "echo",
        "--log-level": "warning",
    }
    words = [str(word) for pair in given.items() for word in pair]
    command = [sys.executable, "-m", "fakes.frontend_worker", *words, *flags]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS)}) as run:
        pool = Pool(run, port)
        try:
            if wait_until_ready:
                wait_for(lambda: run.poll() is None and num_listening(run.pid, port) == num_workers)
            yield pool
        finally:
            run.send_signal(signal.SIGTERM)
            assert run.wait(30) in (0, -signal.SIGKILL)


def num_listening(pid, port):
    """Return how many workers of the pool with the process id `pid` listen on `port`."""
    workers = psutil.Process(pid).children()
    return sum(
        any(c.status == psutil.CONN_LISTEN and c.laddr[1] == port for c in w.net_connections())
        for w in workers
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with running_pool(tmp_path_factory.mktemp("pool"), "--max-concurrent-requests", "20") as pool:
        yield pool


def in_threads(count, function):
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: function(), range(count)))


def test_the_connections_are_distributed_over_all_workers(pool):
    times = [worker.cpu_times().user for worker in pool.workers()]
    in_threads(24, lambda: pool.chat("one two three " * 50))
    assert all(w.cpu_times().user > t for w, t in zip(pool.workers(), times, strict=True))


def test_a_limit_for_each_minute_holds_for_all_workers_together(pool):
    statuses = [answer.status_code for answer in in_threads(16, lambda: pool.chat("a", "limited"))]
    assert (statuses.count(200), statuses.count(429)) == (10, 6)


@pytest.mark.parametrize(("key", "limit"), [("narrow", 3), ("other", 15)])
def test_the_limits_of_running_requests_hold_for_all_workers_together(pool, key, limit):
    # The frontend may run 20 requests. A single client may use only 15 of them, so that other
    # clients can use the rest (shared_budget.py).
    with concurrent.futures.ThreadPoolExecutor(18) as threads:
        sent = [threads.submit(pool.chat, "a <pause 60>", key) for _ in range(18)]
        wait_for(lambda: sum(future.done() for future in sent) >= 18 - limit)
        assert pool.num_running() == limit
        answer = pool.request("POST", "/abort_request", key, json={"abort_all": True})
        assert answer.json() == {"num_aborted": limit}
    statuses = [future.result().status_code for future in sent]
    assert (statuses.count(499), statuses.count(429)) == (limit, 18 - limit)
    assert pool.num_running() == 0


def test_every_worker_knows_the_stored_responses(pool):
    made = pool.request("POST", "/v1/responses", json={"input": "one two"}).json()
    path = f"/v1/responses/{made['id']}"
    answers = in_threads(12, lambda: pool.request("GET", path).json())
    assert answers == [made] * 12
    body = {"input": "three", "previous_response_id": made["id"]}
    follow = in_threads(6, lambda: pool.request("POST", "/v1/responses", json=body).status_code)
    assert follow == [200] * 6
    assert pool.request("GET", path, "narrow").status_code == 404
    assert pool.request("DELETE", path).json()["deleted"]
    assert in_threads(6, lambda: pool.request("GET", path).status_code) == [404] * 6


def test_a_background_response_is_followed_and_cancelled_through_any_worker(pool):
    body = {"input": "one <pause 0.2>two", "background": True, "stream": True}
    text = pool.request("POST", "/v1/responses", json=body).text
    response_id = json.loads(text.split("data: ")[1].split("\n\n")[0])["response"]["id"]
    body = {"input": "one <pause 60>two", "background": True}
    made = pool.request("POST", "/v1/responses", json=body).json()
    path = f"/v1/responses/{made['id']}"
    states = in_threads(9, lambda: pool.request("GET", path).json()["status"])
    assert set(states) <= {"queued", "in_progress"}
    follow = {"input": "and?", "previous_response_id": made["id"]}
    refused = in_threads(6, lambda: pool.request("POST", "/v1/responses", json=follow).status_code)
    assert refused == [400] * 6
    assert pool.request("POST", f"{path}/cancel").json()["status"] == "cancelled"
    for _ in range(6):
        assert pool.request("GET", path).json()["status"] == "cancelled"
        events = pool.request("GET", f"/v1/responses/{response_id}?stream=true").text
        assert events == text


def test_the_events_of_a_running_response_reach_a_client_of_another_worker(pool):
    body = {"input": "one <pause 0.5>two <pause 0.5>three", "background": True, "stream": True}
    started = threading.Event()
    texts = []

    def create():
        path = pool.url + "/v1/responses"
        headers = {"Authorization": "Bearer other"}
        with httpx.stream("POST", path, json=body, headers=headers, timeout=60) as stream:
            for part in stream.iter_text():
                texts.append(part)
                started.set()

    creator = threading.Thread(target=create)
    creator.start()
    assert started.wait(30)
    response_id = json.loads(texts[0].split("data: ")[1].split("\n\n")[0])["response"]["id"]
    path = f"/v1/responses/{response_id}?stream=true"
    followed = in_threads(8, lambda: pool.request("GET", path).text)
    creator.join()
    assert followed == ["".join(texts)] * 8


def test_an_abort_reaches_the_worker_of_the_request(pool):
    for number in range(4):
        headers = {"X-Request-Id": f"abort-{number}"}
        messages = [{"role": "user", "content": "one <pause 60>two"}]
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            late = threads.submit(
                pool.request, "POST", CHAT, json={"messages": messages}, headers=headers
            )
            wait_for(lambda: pool.num_running() == 1)
            answer = pool.request("POST", "/abort_request", json={"rid": f"abort-{number}"})
            assert answer.json() == {"num_aborted": 1}
            assert late.result().status_code == 499


def test_the_metrics_are_the_sums_of_all_workers(pool):
    labels = {"route": CHAT, "status": "200"}
    before = pool.counter("nereid_frontend_requests_total", **labels)
    refused = pool.counter("nereid_frontend_refused_requests_total", status="429")
    answers = in_threads(18, lambda: pool.chat("a <pause 0.3>", "narrow").status_code)
    after = [pool.counter("nereid_frontend_requests_total", **labels) for _ in range(4)]
    assert after == [before + answers.count(200)] * 4
    now_refused = pool.counter("nereid_frontend_refused_requests_total", status="429")
    assert now_refused == refused + answers.count(429)
    assert pool.counter("nereid_frontend_running_requests") == 0


@pytest.mark.long
def test_a_dead_worker_is_restarted_and_its_requests_no_longer_count(tmp_path):
    with running_pool(tmp_path, num_workers=2) as pool:
        num_counted = 5
        for _ in range(num_counted):
            assert pool.chat("one").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            late = [threads.submit(pool.chat, "one <pause 3>") for _ in range(8)]
            wait_for(lambda: pool.num_running() == 8)
            victim = pool.workers()[0]
            port = int(pool.url.rpartition(":")[2])
            victim.kill()
            wait_for(lambda: victim.pid not in [worker.pid for worker in pool.workers()])
            wait_for(lambda: num_listening(pool.process.pid, port) == 2)
            results = [future.exception() for future in late]
        num_lost = sum(result is not None for result in results)
        assert 0 <= num_lost < 8
        assert pool.num_running() == 0
        assert in_threads(8, lambda: pool.chat("one").status_code) == [200] * 8
        counted = pool.counter("nereid_frontend_requests_total", route=CHAT)
        # The sum includes the requests that the dead worker had counted.
        assert counted == num_counted + 8 - num_lost + 8


def test_a_worker_that_is_starting_is_drained_too(tmp_path):
    with running_pool(tmp_path, num_workers=2, wait_until_ready=False) as pool:
        wait_for(lambda: pool.process.poll() is None and len(pool.workers()) == 2)
        workers = {worker.pid for worker in pool.workers()}
        pool.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: num_listening(pool.process.pid, pool.port) == 2)
        assert {worker.pid for worker in pool.workers()} == workers
        assert in_threads(6, lambda: pool.chat("late").status_code) == [503] * 6


@pytest.mark.parametrize("num_starts", [1, 2], ids=["start", "restart"])
def test_a_signal_during_the_start_of_a_worker_drains_the_worker(monkeypatch, tmp_path, num_starts):
    pool = WorkerPool(Settings(frontend_workers=2), [])
    starts, drained = [], []

    def start(place):
        # The pool assumes that a worker without a socket file has failed to start.
        Path(place.socket_path(place.number)).touch()
        starts.append(place.number)
        if place.number == 1 and starts.count(1) == num_starts:
            # The process of the second worker exists, but the pool does not know it yet.
            os.kill(os.getpid(), signal.SIGUSR1)
            pool._stop.set()
        process = subprocess.Popen(["true"])
        process.send_signal = lambda _: drained.append(process)
        return process

    monkeypatch.setattr(pool, "_start", start)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        pool._handle_signals()
        pool._run_in_folder(tmp_path, 1)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for worker in pool._workers:
            worker.process.wait()
    assert all(worker.process in drained for worker in pool._workers)


def test_a_worker_is_started_later_if_there_are_too_many_processes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(worker_pool, "_RESTARTS", RestartPolicy(max_restarts=5, backoff_s=0.1))
    pool = WorkerPool(Settings(frontend_workers=1), [])
    num_starts = 0

    def start(place):
        nonlocal num_starts
        num_starts += 1
        if num_starts == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if num_starts == 3:
            pool._stop.set()
        # The pool assumes that a worker without a socket file has failed to start.
        Path(place.socket_path(place.number)).touch()
        return subprocess.Popen(["true"])

    monkeypatch.setattr(pool, "_start", start)
    assert pool._run_in_folder(tmp_path, 1) == 0
    pool._end_all()
    assert num_starts == 3
    assert "cannot be started (Resource temporarily unavailable)" in capsys.readouterr().err


def test_only_the_folders_of_pools_that_have_ended_are_deleted(monkeypatch, tmp_path):
    monkeypatch.setattr(worker_pool, "_parent_folder", lambda: tmp_path)
    # A folder name contains the process id of a pool, possibly in another container. Therefore, the
    # process id proves nothing: a locked folder is in use although no process has its process id.
    names = ("nereid-frontend-999999999-running", f"nereid-frontend-{os.getpid()}-ended")
    running, ended = (tmp_path / name for name in names)
    for folder in (running, ended):
        folder.mkdir()
        (folder / "lock").touch()
    with worker_pool.open_locked(running / "lock"):
        worker_pool._delete_abandoned_folders()
        assert (running.exists(), ended.exists()) == (True, False)


def test_a_pool_that_starts_deletes_no_folder_that_another_pool_has_just_created(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(worker_pool, "_parent_folder", lambda: tmp_path)
    open_locked = worker_pool.open_locked

    def open_later(path):
        path.touch()
        monkeypatch.setattr(worker_pool, "open_locked", open_locked)
        worker_pool._delete_abandoned_folders()  # as if another pool were starting at this moment
        return open_locked(path)

    monkeypatch.setattr(worker_pool, "open_locked", open_later)
    pool = WorkerPool(Settings(frontend_workers=2), [])
    folders = []
    monkeypatch.setattr(pool, "_handle_signals", lambda: None)
    monkeypatch.setattr(pool, "_run_in_folder", lambda folder, _: folders.extend(folder.iterdir()))
    pool._run_on_port(1)
    assert [file.name for file in folders] == ["lock"]
    assert not any(tmp_path.iterdir())


def test_the_requests_of_a_worker_that_dies_while_the_server_stops_are_not_waited_for(tmp_path):
    pool = WorkerPool(Settings(frontend_workers=2), [])
    pool._is_draining = True
    place = WorkerPlace(0, 2, str(tmp_path), 1)
    Path(place.socket_path(0)).touch()
    with closing(open_database(place.requests_path)) as database:
        requests = RequestsOfWorkers(10, database, worker=0)
        requests.add("", 3)
        process = subprocess.Popen(["sleep", "60"])
        pool._workers = [_Worker(place, process)]
        assert pool._handle_ended_workers() is None
        assert requests.used == 3
        process.kill()
        process.wait()
        assert pool._handle_ended_workers() is None
        assert requests.used == 0


@pytest.mark.long
def test_a_drained_pool_finishes_its_requests_and_ends(tmp_path):
    with running_pool(tmp_path, num_workers=2) as pool:
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            running = [threads.submit(pool.chat, "one <pause 1>two") for _ in range(6)]
            wait_for(lambda: pool.num_running() == 6)
            pool.process.send_signal(signal.SIGUSR1)
            wait_for(lambda: pool.request("GET", "/health/ready").status_code == 503)
            time.sleep(0.1)
            assert in_threads(6, lambda: pool.chat("late").status_code) == [503] * 6
            assert [future.result().status_code for future in running] == [200] * 6
        workers = pool.workers()
        pool.process.send_signal(signal.SIGTERM)
        assert pool.process.wait(30) == 0
        assert not any(worker.is_running() for worker in workers)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--models-file", "m.toml"], "must be 1 with a file that describes several models"),
        (["--max-total-body-bytes", "64MiB"], "max_total_body_bytes must be at least 134217728"),
        (["--api-key-file", "/no/such/file"], "cannot be read"),
        (["--frontend-workers", "0"], "--frontend-workers: the value must be"),
    ],
)
def test_what_several_workers_do_not_support_is_refused_at_the_start(flags, reason):
    words = ["--port", str(free_port()), "--frontend-workers", "2", *flags]
    command = [sys.executable, "-m", "nereid_client", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert reason in ended.stderr


def test_a_port_that_is_in_use_is_not_shared_by_mistake(pool):
    port = pool.url.rpartition(":")[2]
    command = [sys.executable, "-m", "nereid_client", "--frontend-workers", "2", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in ended.stderr


def test_the_workers_share_no_file_on_a_disk_that_may_be_full(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_pool(tmp_path, num_workers=2) as pool:
        assert pool.chat("a").status_code == 200
        assert list(temporary.iterdir()) == []


def test_the_files_of_the_metrics_have_space_although_the_disk_becomes_full(tmp_path):
    with running_pool(tmp_path, num_workers=2) as pool:
        in_threads(8, lambda: pool.chat("a"))
        [folder] = Path("/dev/shm").glob(f"nereid-frontend-{pool.process.pid}-*")
        files = [path.stat() for path in (folder / "metrics").iterdir()]
        assert len(files) == 2 * 3  # counters, histograms and gauges of each of two workers
        assert all(file.st_blocks * 512 >= file.st_size for file in files)


@pytest.mark.long
def test_the_workers_end_if_their_pool_is_killed(tmp_path):
    with running_pool(tmp_path, num_workers=2) as pool:
        workers = pool.workers()
        os.kill(pool.process.pid, signal.SIGKILL)
        wait_for(lambda: not any(worker.is_running() for worker in workers))
        folders = list(Path("/dev/shm").glob(f"nereid-frontend-{pool.process.pid}-*"))
        assert len(folders) == 1
    with running_pool(tmp_path, num_workers=2):
        assert not folders[0].exists()  # the new pool has deleted the folder of the killed pool
