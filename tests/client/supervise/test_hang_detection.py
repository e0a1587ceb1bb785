"""Tests that `nereid serve` detects a hanging model although the rest of the server answers."""

import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from nereid_client.supervise.frontend_client import FrontendClient
from nereid_client.supervise.hang_detection import PROBES, HangWatch


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to a `Server`. A POST request is a probe."""

    def do_GET(self):
        page = "nereid:generation_tokens_total 5\n"
        if self.path == "/health/ready":
            page = json.dumps({"num_requests": self.server.owner.num_requests})
        self.answer(200, page)

    def do_POST(self):
        owner = self.server.owner
        owner.probes.append(self.rfile.read(int(self.headers["content-length"])))
        if owner.is_blocked:
            owner.has_ended.wait(20)
        self.answer(owner.status, "{}")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


class Server:
    """An HTTP server that stands for a frontend, a metrics page and a Triton server.

    Attributes:
        num_requests: the number of running requests that the frontend reports.
        is_blocked: whether the server leaves small requests (probes) without an answer.
        status: the HTTP status of the answer to a small request.
        probes: the bodies of the small requests.
        has_ended: an event that ends the blocked requests.
        watch: the hang detection that watches this server.
    """

    def __init__(self):
        self.num_requests, self.is_blocked, self.status = 1, False, 200
        self.probes = []
        self.has_ended = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.owner = self
        self.http.handle_error = lambda *args: None
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.http.server_port}"
        client = FrontendClient(url, "m", "")
        self.watch = HangWatch(client, f"{url}/metrics", url, PROBES["llm"], 0.8)

    def close(self):
        self.watch.stop()
        self.has_ended.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server():
    with closing(Server()) as server:
        yield server


def test_a_model_that_does_not_answer_is_found_although_metrics_and_frontend_answer(server):
    server.is_blocked = True
    server.watch.start()
    server.watch.join(20)
    assert "the model llm did not answer a small request" in server.watch.finding


@pytest.mark.parametrize("status", [200, 503])
def test_any_answer_proves_that_the_model_works(server, status):
    server.status = status
    server.watch.start()
    while len(server.probes) < 2:
        time.sleep(0.02)
    assert server.watch.finding is None
    assert b"nereid-serve" in server.probes[0]


def test_a_server_without_requests_gets_no_small_requests(server):
    server.num_requests = 0
    server.watch.start()
    time.sleep(0.7)
    assert (server.probes, server.watch.finding) == ([], None)
