"""Tests that the routers of SGLang and vLLM can distribute requests to two Nereid servers."""

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from loadtest.server import gauges
from loadtest.server.served import ALONE, Served, free_ports

ROUTERS = {"sglang-router": ["sglang-router", "launch"], "vllm-router": ["vllm-router"]}

pytestmark = [pytest.mark.long, pytest.mark.triton, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers():
    with Served(arguments=ALONE) as first, Served(arguments=ALONE) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def routers(servers, tmp_path_factory):
    """The base URL of each router: name -> URL. Both routers use both servers."""
    folder = tmp_path_factory.mktemp("routers")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *ROUTERS], check=True)
    workers = [f"http://127.0.0.1:{served.openai_port}" for served in servers]
    urls = {}
    with contextlib.ExitStack() as stack:
        for name, (program, *words) in ROUTERS.items():
            port, metrics_port = free_ports(2)
            flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
            # A router must stop using a failed server before it has used up its retries. Therefore,
            # two failures are enough to exclude a server.
            flags += ["--cb-failure-threshold", "2"]
            flags += ["--prometheus-port", str(metrics_port), "--worker-urls", *workers]
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            command = [folder / "bin" / program, *words, *flags]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            urls[name] = f"http://127.0.0.1:{port}/v1"
        for url in urls.values():
            wait_until(lambda url=url: ask(url, "Hello") == 200)
        yield urls


def ask(url, text, system="", **fields):
    """Send a chat completion. Return the HTTP status, or 0 if the connection failed."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    body = {"model": "chat", "messages": messages, "max_tokens": 4, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_until(is_true, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def share_of_hits(url, servers, salt):
    """Send six turns of eight conversations, and return the hit rate of the prefix caches.

    The hit rate is the share of the prompt tokens that the prefix caches contained.

    Args:
        url: the base URL to which the requests are sent.
        servers: the servers that answer.
        salt: the first word of each conversation. It must be a new word, so that no earlier request
            has filled the prefix caches with these conversations.
    """
    num_queries_before, num_hits_before = counters(servers)
    for turn, conversation in itertools.product(range(6), range(8)):
        system = f"{salt} {conversation} " + f"rule {conversation} of the house. " * 40
        assert ask(url, f"Question {turn}", system) == 200
    num_queries, num_hits = counters(servers)
    assert num_queries > num_queries_before
    return (num_hits - num_hits_before) / (num_queries - num_queries_before)


def counters(servers):
    """Return the numbers of prefix cache queries and prefix cache hits, summed over the servers."""
    pages = []
    for served in servers:
        url = f"http://127.0.0.1:{served.metrics_port}/metrics"
        assert gauges.wait_for_rest(url) is None
        time.sleep(1.2)  # a server publishes its counters once a second
        pages.append(gauges.read(url))
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    return [sum(page[name] for page in pages) for name in names]


@pytest.fixture(scope="module")
def share_of_one_server(servers):
    return share_of_hits(servers[0].openai_url, servers[:1], "alone")


@pytest.mark.parametrize("name", ROUTERS)
def test_the_prefix_hits_are_within_5_percent_of_those_of_one_server(
    name, routers, servers, share_of_one_server
):
    share = share_of_hits(routers[name], servers, name)
    assert share_of_one_server > 0.5
    assert share > 0.95 * share_of_one_server


def test_no_request_fails_while_a_server_drains_and_stops(routers, servers):
    statuses = {name: [] for name in routers}
    has_ended = threading.Event()

    def send(name, url):
        while not has_ended.is_set():
            statuses[name].append(ask(url, f"Request {len(statuses[name])}", stream=True))

    threads = [threading.Thread(target=send, args=item) for item in routers.items()]
    for thread in threads:
        thread.start()
    try:
        time.sleep(3)  # some requests before the stop
        assert servers[1].stop() == 0
        time.sleep(5)  # some requests after the stop
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()

    for name, statuses_of_router in statuses.items():
        assert len(statuses_of_router) > 10, name
        assert set(statuses_of_router) == {200}, name
