"""The stub of a pooling model on a real worker, with the server's Python API replaced.

Whatever becomes of the worker, every request ends and service comes back.
"""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from backend.serving.pipeline import Tensor
from fakes.live_frontend import wait_for
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving.pooling.embedding_model import EmbeddingModel

DEMO = Path(__file__).resolve().parents[4] / "demo" / "embed"
HANG_TIMEOUT_S = 3


class Sender:
    """A request for embeddings that records its responses."""

    def __init__(self, *texts):
        self.inputs = {names.TEXTS: Tensor(names.TEXTS, np.array([t.encode() for t in texts]))}
        self.error, self.rows = None, None
        self._started, self.elapsed_s = time.monotonic(), 0.0
        self._ended = threading.Event()

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return False

    def send(self, reply=None, flags=0):
        assert not self._ended.is_set(), "answered twice"
        if reply.error is not None:
            self.error = reply.error.text
        else:
            found = {tensor.name: tensor.as_numpy() for tensor in reply.tensors}
            self.rows = found[names.EMBEDDINGS]
        self.elapsed_s = time.monotonic() - self._started
        self._ended.set()

    def wait(self, limit_s=120.0):
        assert self._ended.wait(limit_s), "the request hangs"
        return self


@pytest.fixture
def stub(monkeypatch, tmp_path):
    for variable in os.environ:
        if variable.startswith("NEREID_EMBEDDING_"):
            monkeypatch.delenv(variable)
    values = {"model": str(DEMO), "hang_timeout_s": str(HANG_TIMEOUT_S), "num_threads": "1"}
    config = {"parameters": {name: {"string_value": value} for name, value in values.items()}}
    made = EmbeddingModel()
    made.initialize(
        {"model_config": json.dumps(config), "model_repository": str(tmp_path / "embedding")}
    )
    yield made
    made.finalize()


def ask(stub, *texts):
    sender = Sender(*texts)
    stub.execute([sender])
    return sender


def answers_again(stub, limit_s=200.0):
    deadline = time.monotonic() + limit_s
    while (sender := ask(stub, "x").wait()).error is not None:
        assert "restarting" in sender.error
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return sender.rows.shape == (1, 128)


def test_a_worker_that_hangs_ends_its_requests_in_time_and_is_started_again(stub):
    victim = stub._worker.pid
    os.kill(victim, signal.SIGSTOP)
    senders = [ask(stub, "Hugo"), ask(stub, "lives", "here")]
    for sender in senders:
        sender.wait()
        assert "during one step and the limit is 3 s (hang_timeout_s)" in sender.error
        assert sender.elapsed_s < HANG_TIMEOUT_S + 30
    assert answers_again(stub)
    assert stub._worker.pid != victim


def test_a_worker_that_dies_ends_its_requests_at_once_and_is_started_again(stub):
    os.kill(stub._worker.pid, signal.SIGSTOP)  # so that the request is surely in work
    sender = ask(stub, "Hugo")
    wait_for(lambda: stub._waiting)
    os.kill(stub._worker.pid, signal.SIGKILL)
    assert "the worker process ended (signal 9)" in sender.wait().error
    assert answers_again(stub)


def test_a_worker_without_requests_may_be_silent(stub):
    victim = stub._worker.pid
    time.sleep(1.5 * HANG_TIMEOUT_S)
    assert ask(stub, "x").wait().error is None
    assert stub._worker.pid == victim


def test_a_defect_in_writing_an_answer_ends_that_request_alone(stub, monkeypatch):
    def broken(outcome):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(stub, "build_outputs", broken)
        assert "ZeroDivisionError: a bug" in ask(stub, "x").wait().error
    assert ask(stub, "x").wait().rows.shape == (1, 128)


def test_a_defect_in_the_loop_ends_what_is_in_flight_and_no_more(stub, monkeypatch):
    os.kill(stub._worker.pid, signal.SIGSTOP)
    sender = ask(stub, "x")
    with monkeypatch.context() as patched:
        patched.setattr(stub, "_drop_cancelled", None)
        assert "embedding failed: TypeError" in sender.wait().error
    os.kill(stub._worker.pid, signal.SIGCONT)
    assert ask(stub, "x").wait().rows.shape == (1, 128)


def test_a_worker_that_cannot_be_started_again_is_given_up_with_the_reason(
    tmp_path, monkeypatch, capsys
):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    monkeypatch.setenv("NEREID_EMBEDDING_MODEL", str(model))
    monkeypatch.setenv("NEREID_EMBEDDING_MAX_RESTARTS", "1")
    stub = EmbeddingModel()
    stub.initialize({"model_config": "{}", "model_repository": str(tmp_path / "embedding")})
    try:
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        os.kill(stub._worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 200
        while "Restart the server" not in (error := ask(stub, "x").wait().error):
            assert time.monotonic() < deadline, error
            time.sleep(0.1)
        assert "could not be restarted in 1 attempts (max_restarts)" in error
        # By this line `nereid serve` knows that the server has to be started again.
        assert "nereid: error: embedding: the worker process could not" in capsys.readouterr().out
    finally:
        stub.finalize()


def test_an_answer_without_room_in_shared_memory_is_refused_and_small_ones_go_on(stub, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        assert "/dev/shm is full" in ask(stub, *["x"] * 300).wait().error
        assert ask(stub, "x").wait().rows.shape == (1, 128)
    assert ask(stub, *["x"] * 300).wait().rows.shape == (300, 128)
