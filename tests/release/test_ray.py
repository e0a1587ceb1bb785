"""Tests of Nereid on a Ray cluster of two nodes. A scripted engine takes the place of a model."""

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
# By default, Ray kills a proxy that does not answer within 5 s of its start. On a busy machine, the
# start takes longer. Ray reads the variable when it is imported, and its processes inherit it.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "120"
with warnings.catch_warnings(action="ignore"):  # the import of Ray causes warnings
    import ray.serve

import httpx
from nereid.ray import Options, app
from nereid.ray.routing import prefix_hashes
from nereid.ray.scaling import ScaleWithLoad
from nereid.ray.server import REPLICA_HEADER
from pydantic import ValidationError
from ray import serve
from ray.cluster_utils import Cluster

from loadtest.server.served import ALONE, free_ports

pytestmark = [
    pytest.mark.long,
    pytest.mark.triton,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).resolve().parents[2]
NODE = {"num_cpus": 4, "resources": {"server": 1}, "object_store_memory": 100 * 2**20}
# Each server generates one token for each of at most 4 sequences every 500 ms, which is at most 8
# tokens per second.
STEP_MS = 500
MAX_NUM_SEQS = 4
# The default length of an answer.
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def cluster():
    nodes = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    nodes.add_node(**NODE)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def url(cluster):
    (port,) = free_ports(1)
    # Ray waits at most 60 s for its proxy. On a busy machine, the proxy needs more time, and its
    # start continues after the TimeoutError.
    with contextlib.suppress(TimeoutError):
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    wait_until(lambda: accepts_connections(port))
    return f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options that place one server on each node. The scripted answers of the servers never end."""
    folder = tmp_path_factory.mktemp("model")
    rule = {"when": "", "text": "a b c d", "delay_ms": STEP_MS, "ends": False}
    (folder / "script.json").write_text(json.dumps([rule]))
    return Options(
        model=str(ROOT / "demo" / "chat"),
        settings={
            "NEREID_ENGINE": "scripted",
            "NEREID_SCRIPT": str(folder / "script.json"),
            "NEREID_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
        },
        arguments=list(ALONE),
        resources={"server": 1},
        num_cpus=0,
        ingress_replicas=2,
    )


@pytest.fixture(scope="module")
def deploy(options):
    """A function that deploys the application with changes to `options`.

    The function does nothing if the same changes are already deployed.
    """
    deployed = []

    def run(**changes):
        if deployed != [changes]:
            serve.run(app(options.model_copy(update=changes)), route_prefix="/")
            deployed[:] = [changes]

    return run


class Stream:
    """A streamed chat completion that is read in a thread.

    Attributes:
        replica: the id of the replica that answers.
        num_tokens: the number of chunks with content so far.
        error: the error object that ended the stream, or None.
        is_complete: whether the stream ended with `[DONE]`.
    """

    def __init__(self, url, text, max_tokens=NUM_TOKENS):
        self.replica, self.num_tokens, self.error, self.is_complete = None, 0, None, False
        self._url, self._text, self._max_tokens = url, text, max_tokens
        self._has_to_stop = threading.Event()

    def read(self):
        """Send the request, and read the stream until it ends or `disconnect` is called.

        Return `self`.
        """
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": self._text}],
            "max_tokens": self._max_tokens,
            "stream": True,
        }
        url = f"{self._url}/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=600) as response:
            if response.status_code != 200:
                self.error = json.loads(response.read())["error"]
                return self
            self.replica = response.headers[REPLICA_HEADER]
            for line in response.iter_lines():
                self._read_line(line.removeprefix("data: "))
                if self._has_to_stop.is_set():
                    break
        return self

    def _read_line(self, data):
        if data == "[DONE]":
            self.is_complete = True
        elif data:
            chunk = json.loads(data)
            self.error = chunk.get("error")
            self.num_tokens += bool(chunk.get("choices") and chunk["choices"][0]["delta"])

    def disconnect(self):
        self._has_to_stop.set()


@contextlib.contextmanager
def reading(streams, one_by_one=False):
    """Read streams in threads during the `with` block. Then wait until all streams have ended.

    With `one_by_one`, each stream begins after the first token of the previous stream, so that both
    servers get the same number of streams.
    """
    with ThreadPoolExecutor(len(streams)) as threads:
        futures = []
        for stream in streams:
            futures.append(threads.submit(stream.read))
            if one_by_one:
                wait_until(lambda stream=stream: stream.num_tokens)
        yield
        for future in futures:
            future.result()


def tokens_per_s(url, num_clients=16, duration_s=20):
    """Return the number of tokens per second that `num_clients` clients receive together.

    Each client sends its next request when it has received the response to its previous request.
    """
    started = time.monotonic()
    are_complete = []

    def send_requests(client):
        while time.monotonic() < started + duration_s:
            stream = Stream(url, f"{client} {time.time()}").read()
            are_complete.append(stream.is_complete)

    with ThreadPoolExecutor(num_clients) as threads:
        list(threads.map(send_requests, range(num_clients)))
    return NUM_TOKENS * sum(are_complete) / (time.monotonic() - started)


def wait_until(is_true, limit_s=600.0):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def accepts_connections(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def num_servers():
    deployment = serve.status().applications["default"].deployments["Server"]
    return deployment.replica_states.get("RUNNING", 0)


def test_two_servers_generate_nearly_twice_as_many_tokens_as_one(url, deploy):
    deploy(replicas=1)
    one = tokens_per_s(url)
    deploy(replicas=2)
    two = tokens_per_s(url)
    assert one > 0.5 * MAX_NUM_SEQS * 1000 / STEP_MS
    assert two >= 1.8 * one, f"one server: {one:.1f} tokens/s, two servers: {two:.1f} tokens/s"


def test_a_prompt_with_a_known_prefix_goes_to_the_same_server(url, deploy):
    deploy(replicas=2)
    servers = {}
    for conversation in range(6):
        text = f"{time.time()} {conversation} " + "A long system prompt. " * 40
        turns = [Stream(url, text + " and more" * turn, 1).read().replica for turn in range(4)]
        assert len(set(turns)) == 1
        servers[conversation] = turns[0]
    assert len(set(servers.values())) == 2


def test_a_request_is_aborted_when_its_client_disconnects(url, deploy):
    deploy(replicas=2)
    streams = [Stream(url, f"{time.time()} {n}", 3000) for n in range(2 * MAX_NUM_SEQS)]
    with reading(streams, one_by_one=True):
        for stream in streams:
            stream.disconnect()
    started = time.monotonic()
    with reading(after := [Stream(url, f"{time.time()} {n}", 2) for n in range(4)]):
        pass
    assert all(stream.is_complete for stream in after)
    assert time.monotonic() - started < 30  # without the aborts, the first streams take 1500 s


def test_errors_of_a_server_and_of_the_ingress_reach_the_client(url, deploy):
    deploy(replicas=2)
    body = {"model": "chat", "messages": [], "max_tokens": 0}
    response = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    stored = {"model": "chat", "input": "a", "previous_response_id": "resp_1"}
    response = httpx.post(f"{url}/responses", json=stored, timeout=60)
    assert response.status_code == 501
    assert response.json()["error"]["message"].startswith("previous_response_id: ")
    assert httpx.get(f"{url}/models", timeout=60).json()["data"][0]["id"] == "chat"


def wait_for_more_tokens(stream):
    """Wait until a stream has received three more tokens. This shows that the stream still runs."""
    num_tokens = stream.num_tokens + 3
    wait_until(lambda: stream.num_tokens >= num_tokens)


def test_only_the_streams_of_a_lost_node_fail_and_its_server_is_replaced(cluster, url, deploy):
    deploy(replicas=2)
    streams = [Stream(url, f"{time.time()} {n}", 3000) for n in range(2 * MAX_NUM_SEQS)]
    with reading(streams, one_by_one=True):
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: any(stream.error for stream in streams))
        (lost_replica,) = {stream.replica for stream in streams if stream.error}
        lost_streams = [stream for stream in streams if stream.replica == lost_replica]
        other_streams = [stream for stream in streams if stream.replica != lost_replica]
        wait_until(lambda: all(stream.error for stream in lost_streams))
        for stream in other_streams:
            wait_for_more_tokens(stream)
        for stream in other_streams:
            stream.disconnect()
    assert lost_streams
    assert other_streams
    assert not any(stream.error for stream in other_streams)
    assert {stream.error["code"] for stream in lost_streams} == {"server_lost"}

    # The server on the head node still answers. After a new node is added, two servers answer.
    assert Stream(url, "alone", 2).read().is_complete
    cluster.add_node(**NODE)
    wait_until(lambda: num_servers() == 2)
    wait_until(lambda: len({Stream(url, f"{time.time()}", 2).read().replica for _ in "ab"}) == 2)


def test_a_server_is_added_while_requests_wait(url, deploy):
    deploy(replicas=1, max_replicas=2, waiting_requests=2, downscale_delay_s=5)
    assert num_servers() == 1
    streams = [Stream(url, f"{time.time()} {n}", 20) for n in range(8 * MAX_NUM_SEQS)]
    with reading(streams):
        wait_until(lambda: num_servers() == 2)
    assert all(stream.is_complete for stream in streams)
    wait_until(lambda: num_servers() == 1)


@pytest.mark.parametrize(
    ("waiting", "usage", "expected"),
    [
        ([12, 12, 12, 12], [0.1] * 4, 6),  # 12 waiting requests per server; the target is 8
        ([0, 0], [0.9, 0.7], 2),  # the mean use of the KV caches equals the target of 0.8
        ([0, 0], [1.0, 1.0], 2.5),  # all KV caches are full
        ([0, 0, 0, 0], [0.2] * 4, 1),
    ],
)
def test_waiting_requests_and_the_use_of_the_kv_cache_decide_the_number_of_servers(
    waiting, usage, expected
):
    metrics = {
        "num_requests_waiting": dict(enumerate(waiting)),
        "kv_cache_usage_perc": dict(enumerate(usage)),
    }
    num_servers_now = len(waiting)
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=num_servers_now,
        target_num_replicas=num_servers_now,
    )
    num_wanted_servers, _ = ScaleWithLoad(waiting_requests=8, kv_cache_usage=0.8)(context)
    assert num_wanted_servers == pytest.approx(expected)


def test_wrong_options_are_rejected():
    with pytest.raises(ValidationError, match="max_replicas must be at least replicas"):
        Options(model="a", replicas=3, max_replicas=2)
    with pytest.raises(ValidationError, match="gpus"):
        Options(model="a", gpus=1)


def test_prompts_have_as_many_hashes_in_common_as_they_have_text():
    long = "x" * 1000
    first, second, third = (
        prefix_hashes(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
        for text in (long, long + "y" * 300, "z" + long)
    )
    common = [one == other for one, other in zip(first, second, strict=False)]
    assert common[:3] == [True, True, True]
    assert not set(first) & set(third)
    assert prefix_hashes(b"no JSON") == prefix_hashes(b"[]") == prefix_hashes(b"{}") == ()
