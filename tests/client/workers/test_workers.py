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

    def num_listening(self):
        """Return how many workers listen on the port."""
        return sum(
            any(
                connection.status == psutil.CONN_LISTEN and connection.laddr[1] == self.port
                for connection in worker.net_connections()
            )
            for worker in self.workers()
        )

    def num_running(self):
        """Return the number of running requests of all workers."""
        return self.request("GET", "/health/ready").json()["num_requests"]

    def counter(self, name, **labels):
        """Return the sum of all samples of the metric `name` that have the given labels."""
        text = self.request("GET", "/metrics").text
        lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for given, value in lines if wanted <= set(given.split(",")))


@contextmanager
def running_pool(folder, *flags, num_workers=NUM_WORKERS, wait_until_ready=True):
    """Run a frontend with several workers and the API keys `KEYS`, and yield its `Pool`."""
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    port = free_port()
    command = [
        *(sys.executable, "-m", "fakes.frontend_worker"),
        *("--port", str(port)),
        *("--frontend-workers", str(num_workers)),
        *("--api-key-file", str(keys)),
        *("--served-model-name", "echo"),
        *("--log-level", "warning"),
        *flags,
    ]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS)}) as process:
        pool = Pool(process, port)
        try:
            if wait_until_ready:
                wait_for(lambda: process.poll() is None and pool.num_listening() == num_workers)
            yield pool
        finally:
            process.send_signal(signal.SIGTERM)
            # A test may have killed the process.
            assert process.wait(30) in (0, -signal.SIGKILL)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with running_pool(tmp_path_factory.mktemp("pool"), "--max-concurrent-requests", "20") as pool:
        yield pool


def in_threads(count, function):
    """Call a function in `count` threads at once, and return the results."""
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
    num_sent = 18
    with concurrent.futures.ThreadPoolExecutor(num_sent) as threads:
        chats = [threads.submit(pool.chat, "a <pause 60>", key) for _ in range(num_sent)]
        wait_for(lambda: sum(chat.done() for chat in chats) >= num_sent - limit)
        assert pool.num_running() == limit
        abortion = pool.request("POST", "/abort_request", key, json={"abort_all": True})
        assert abortion.json() == {"num_aborted": limit}

    statuses = [chat.result().status_code for chat in chats]
    assert statuses.count(499) == limit  # the aborted requests
    assert statuses.count(429) == num_sent - limit
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


def response_id(events):
    """Return the id of the response in the first event of a streamed response."""
    return json.loads(events.split("data: ")[1].split("\n\n")[0])["response"]["id"]


def test_a_background_response_is_followed_and_cancelled_through_any_worker(pool):
    streamed = {"input": "one <pause 0.2>two", "background": True, "stream": True}
    events = pool.request("POST", "/v1/responses", json=streamed).text
    path_of_streamed = f"/v1/responses/{response_id(events)}"
    slow = {"input": "one <pause 60>two", "background": True}
    slow_id = pool.request("POST", "/v1/responses", json=slow).json()["id"]
    path_of_slow = f"/v1/responses/{slow_id}"

    states = in_threads(9, lambda: pool.request("GET", path_of_slow).json()["status"])
    assert set(states) <= {"queued", "in_progress"}
    next_turn = {"input": "and?", "previous_response_id": slow_id}
    answers = in_threads(6, lambda: pool.request("POST", "/v1/responses", json=next_turn))
    assert [answer.status_code for answer in answers] == [400] * 6  # the response is running

    assert pool.request("POST", f"{path_of_slow}/cancel").json()["status"] == "cancelled"
    for _ in range(6):  # more requests than workers, each over its own connection
        assert pool.request("GET", path_of_slow).json()["status"] == "cancelled"
        assert pool.request("GET", f"{path_of_streamed}?stream=true").text == events


def test_the_events_of_a_running_response_reach_a_client_of_another_worker(pool):
    body = {"input": "one <pause 0.5>two <pause 0.5>three", "background": True, "stream": True}
    has_started = threading.Event()
    texts = []

    def create():
        url = pool.url + "/v1/responses"
        headers = {"Authorization": "Bearer other"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as stream:
            for text in stream.iter_text():
                texts.append(text)
                has_started.set()

    creator = threading.Thread(target=create)
    creator.start()
    assert has_started.wait(30)
    path = f"/v1/responses/{response_id(texts[0])}?stream=true"
    followed = in_threads(8, lambda: pool.request("GET", path).text)
    creator.join()

    assert followed == ["".join(texts)] * 8


def test_an_abort_reaches_the_worker_of_the_request(pool):
    chat = {"messages": [{"role": "user", "content": "one <pause 60>two"}]}
    for number in range(4):
        request_id = f"abort-{number}"
        headers = {"X-Request-Id": request_id}
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            answer = threads.submit(pool.request, "POST", CHAT, json=chat, headers=headers)
            wait_for(lambda: pool.num_running() == 1)
            abortion = pool.request("POST", "/abort_request", json={"rid": request_id})
            assert abortion.json() == {"num_aborted": 1}
            assert answer.result().status_code == 499


def test_the_metrics_are_the_sums_of_all_workers(pool):
    labels = {"route": CHAT, "status": "200"}
    num_before = pool.counter("nereid_frontend_requests_total", **labels)
    num_refused_before = pool.counter("nereid_frontend_refused_requests_total", status="429")
    statuses = in_threads(18, lambda: pool.chat("a <pause 0.3>", "narrow").status_code)
    # The four requests reach different workers, but each worker reports the sums of all workers.
    sums = [pool.counter("nereid_frontend_requests_total", **labels) for _ in range(4)]
    assert sums == [num_before + statuses.count(200)] * 4
    num_refused = pool.counter("nereid_frontend_refused_requests_total", status="429")
    assert num_refused == num_refused_before + statuses.count(429)
    assert pool.counter("nereid_frontend_running_requests") == 0


@pytest.mark.long
def test_a_dead_worker_is_restarted_and_its_requests_no_longer_count(tmp_path):
    with running_pool(tmp_path, num_workers=2) as pool:
        num_early, num_running, num_late = 5, 8, 8
        for _ in range(num_early):
            assert pool.chat("one").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(num_running) as threads:
            chats = [threads.submit(pool.chat, "one <pause 3>") for _ in range(num_running)]
            wait_for(lambda: pool.num_running() == num_running)
            victim = pool.workers()[0]
            victim.kill()
            wait_for(lambda: victim.pid not in [worker.pid for worker in pool.workers()])
            wait_for(lambda: pool.num_listening() == 2)
        num_lost = sum(chat.exception() is not None for chat in chats)

        assert 0 <= num_lost < num_running
        assert pool.num_running() == 0
        statuses = in_threads(num_late, lambda: pool.chat("one").status_code)
        assert statuses == [200] * num_late
        num_counted = pool.counter("nereid_frontend_requests_total", route=CHAT)
        # The sum includes the requests that the dead worker had counted.
        assert num_counted == num_early + num_running - num_lost + num_late


def test_a_worker_that_is_starting_is_drained_too(tmp_path):
    with running_pool(tmp_path, num_workers=2, wait_until_ready=False) as pool:
        wait_for(lambda: pool.process.poll() is None and len(pool.workers()) == 2)
        workers = {worker.pid for worker in pool.workers()}
        pool.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: pool.num_listening() == 2)
        assert {worker.pid for worker in pool.workers()} == workers
        assert in_threads(6, lambda: pool.chat("late").status_code) == [503] * 6


@contextmanager
def restored_signal_handlers():
    """Restore the signal handlers of this process after the `with` block."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("num_starts", [1, 2], ids=["start", "restart"])
def test_a_signal_during_the_start_of_a_worker_drains_the_worker(monkeypatch, tmp_path, num_starts):
    pool = WorkerPool(Settings(frontend_workers=2), [])
    numbers_of_starts, signalled_processes = [], []

    def start(place):
        # The pool assumes that a worker without a socket file has failed to start.
        Path(place.socket_path(place.number)).touch()
        numbers_of_starts.append(place.number)
        if place.number == 1 and numbers_of_starts.count(1) == num_starts:
            # The process of the second worker exists, but the pool does not know it yet.
            os.kill(os.getpid(), signal.SIGUSR1)
            pool._stop.set()
        process = subprocess.Popen(["true"])
        process.send_signal = lambda _: signalled_processes.append(process)
        return process

    monkeypatch.setattr(pool, "_start", start)
    with restored_signal_handlers():
        pool._handle_signals()
        pool._run_in_folder(tmp_path, 1)
    processes = [worker.process for worker in pool._workers]
    for process in processes:
        process.wait()
    assert all(process in signalled_processes for process in processes)


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

    def start_another_pool_and_lock(path):
        path.touch()
        monkeypatch.setattr(worker_pool, "open_locked", open_locked)
        worker_pool._delete_abandoned_folders()  # as another pool does when it starts
        return open_locked(path)

    monkeypatch.setattr(worker_pool, "open_locked", start_another_pool_and_lock)
    pool = WorkerPool(Settings(frontend_workers=2), [])
    files = []
    monkeypatch.setattr(pool, "_handle_signals", lambda: None)
    monkeypatch.setattr(pool, "_run_in_folder", lambda folder, _: files.extend(folder.iterdir()))
    pool._run_on_port(1)
    assert [file.name for file in files] == ["lock"]
    assert not any(tmp_path.iterdir())  # the pool deletes its folder when it ends


def test_the_requests_of_a_worker_that_dies_while_the_server_stops_are_not_waited_for(tmp_path):
    pool = WorkerPool(Settings(frontend_workers=2), [])
    pool._is_draining = True
    place = WorkerPlace(number=0, count=2, folder=str(tmp_path), port=1)
    # The pool assumes that a worker without a socket file has failed to start.
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
            chats = [threads.submit(pool.chat, "one <pause 1>two") for _ in range(6)]
            wait_for(lambda: pool.num_running() == 6)
            pool.process.send_signal(signal.SIGUSR1)
            wait_for(lambda: pool.request("GET", "/health/ready").status_code == 503)
            time.sleep(0.1)  # the other worker gets the signal too
            assert in_threads(6, lambda: pool.chat("late").status_code) == [503] * 6
            assert [chat.result().status_code for chat in chats] == [200] * 6

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
    all_flags = ["--port", str(free_port()), "--frontend-workers", "2", *flags]
    command = [sys.executable, "-m", "nereid_client", *all_flags]
    frontend = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert frontend.returncode == 2
    assert reason in frontend.stderr


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
