"""The engine client with an engine process that works, dies, hangs or fails."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from nereid_backend import EngineConfig, EngineError, SamplingParams
from nereid_backend.serving.executor.engine_client import EngineClient, RequestStarted
from nereid_backend.serving.executor.scripted_engine import SCRIPT_VARIABLE
from nereid_backend.serving.process.process_handle import EngineDiedError, Refusal
from nereid_backend.serving.wire import pack_params

DEMO = Path(__file__).resolve().parents[3] / "demo" / "chat"
PROMPT = np.array([5, 6, 7], dtype=np.int32)
MODULE = "nereid_backend.serving.executor.scripted_engine"


@pytest.fixture
def start(tmp_path, monkeypatch):
    clients = []

    def make(*rules, **config):
        path = tmp_path / "script.json"
        path.write_text(json.dumps([{"when": ""} | rule for rule in rules]))
        monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
        client = EngineClient(EngineConfig(model=str(DEMO), **config), lambda _: None, MODULE)
        clients.append(client)
        client.start(300)
        return client

    yield make
    for client in clients:
        client.stop()


def receive_until(client, is_enough, limit_s=120.0):
    answers, deadline = [], time.monotonic() + limit_s
    while not is_enough(answers):
        assert time.monotonic() < deadline, answers
        answers += client.receive(0.05)
    return answers


def watch(client, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        client.receive(0.05)
        client.kill_if_hanging(1.0, is_working=True)


def packed(**params):
    """Return packed sampling parameters."""
    return pack_params(SamplingParams(**params))


def submit_again_and_again(client):
    for _ in range(1000):
        client.submit("b", PROMPT, packed())
        time.sleep(0.01)


def test_requests_begin_in_their_order_and_the_rest_waits(start):
    client = start({"token_ids": [10], "ends": False, "delay_ms": 1}, max_num_seqs=1)
    client.submit("a", PROMPT, packed(max_tokens=3))
    client.submit("b", PROMPT, packed(max_tokens=3))
    answers = receive_until(
        client, lambda all_: sum(getattr(a, "finish_reason", None) is not None for a in all_) == 2
    )
    kinds = [(type(a).__name__, a.request_id) for a in answers]
    assert kinds.index(("RequestStarted", "b")) > max(
        at for at, kind in enumerate(kinds) if kind == ("RequestUpdate", "a")
    )
    begun = [a.at for a in answers if isinstance(a, RequestStarted)]
    assert begun == sorted(begun)
    assert abs(begun[0] - time.monotonic()) < 120


def test_a_refused_request_leaves_the_engine_alive(start):
    client = start({"token_ids": [10]}, max_model_len=2)
    client.submit("a", PROMPT, packed())
    (answer,) = receive_until(client, len)
    assert isinstance(answer, Refusal)
    assert "max_model_len" in str(answer.error)


def test_a_lost_device_ends_the_process_with_its_last_words(start):
    client = start({"token_ids": [10], "fault": "CUDA error: an illegal memory access"})
    client.submit("a", PROMPT, packed())
    with pytest.raises(EngineDiedError, match=r"\(exit code 1\): CUDA error: an illegal"):
        receive_until(client, lambda _: False)


def test_an_engine_that_hangs_is_killed_even_when_it_reads_nothing(start):
    client = start({"token_ids": [10], "ends": False})
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    # More than the socket between the two holds: nobody here may wait for it.
    for number in range(200):
        client.submit(str(number), np.zeros(10_000, dtype=np.int32), packed())
        client.abort(str(number))
    assert time.monotonic() - started < 20
    with pytest.raises(EngineDiedError, match=r"sent no message for .*\(engine_hang_timeout_s\)"):
        watch(client, 120.0)
    assert not psutil.pid_exists(pid)
    client.start(300)
    client.submit("a", PROMPT, packed(max_tokens=1))
    assert receive_until(client, lambda all_: len(all_) >= 2)


def test_an_engine_that_computes_for_long_is_left_alone(start):
    client = start({"token_ids": [10], "fault": "busy 3"})
    client.submit("a", PROMPT, packed(max_tokens=1))
    answers, deadline = [], time.monotonic() + 120
    while not answers and time.monotonic() < deadline:
        answers += client.receive(0.05)
        client.kill_if_hanging(1.0, is_working=True)
    assert answers


def test_an_engine_without_work_may_be_silent(start):
    client = start({"token_ids": [10]})
    for _ in range(6):
        client.receive(0.1)
        client.kill_if_hanging(0.2, is_working=False)
    client.submit("a", PROMPT, packed(max_tokens=1))
    assert receive_until(client, lambda all_: len(all_) >= 2)


def test_a_killed_engine_is_noticed_at_once_and_can_be_started_again(start):
    client = start({"token_ids": [10], "ends": False, "delay_ms": 5})
    client.submit("a", PROMPT, packed())
    receive_until(client, len)
    os.kill(client.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"ended \(signal 9\)"):
        receive_until(client, lambda _: False)
    assert time.monotonic() - killed < 60
    with pytest.raises(EngineDiedError):
        submit_again_and_again(client)
    client.start(300)
    assert client.receive(0.5) == []


def test_a_checkpoint_that_cannot_be_loaded_is_one_clear_line(tmp_path):
    for path in DEMO.glob("*.json"):
        shutil.copy(path, tmp_path)
    whole = (DEMO / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    client = EngineClient(EngineConfig(model=str(tmp_path)), lambda _: None)
    with pytest.raises(EngineError) as caught:
        client.start(300)
    assert "cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert client.pid is None


def test_what_an_engine_said_last_is_told_while_its_process_still_lingers():
    client = EngineClient(EngineConfig(model=str(DEMO)), lambda _: None, MODULE)
    client._process = subprocess.Popen(["sleep", "60"])
    client._fatal_message = "CUDA error: gone"
    with pytest.raises(
        EngineDiedError, match="the engine process closed its connection: CUDA error: gone"
    ):
        client.receive(0.0)
    client.stop()
