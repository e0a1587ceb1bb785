"""Tests of the engine process with a scripted engine: its messages, and its end after a fault."""

import dataclasses
import json
import time

import numpy as np
import pytest
from backend.serving.fake_server import DEMO
from nereid_backend import EngineConfig, SamplingParams
from nereid_backend.serving.executor.scripted.scripted_engine import SCRIPT_VARIABLE
from nereid_backend.serving.process.process_handle import (
    ChildProcess,
    ChildProgram,
    EngineDiedError,
    Limit,
)
from nereid_backend.serving.wire import pack_params, unpack_update

PROMPT = np.array([5, 6, 7], dtype=np.int32).tobytes()
MODULE = "nereid_backend.serving.executor.scripted.scripted_engine"


def start_engine(**config):
    """Start the process of a scripted engine, which has 300 s to load."""
    settings = dataclasses.asdict(EngineConfig(model=str(DEMO / "chat"), **config))
    limits = (Limit("start", 300), Limit("hang", 60), Limit("restarts", 0))
    program = ChildProgram("engine", "engine", MODULE, settings, *limits)
    return ChildProcess.start(program, lambda line: None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The process of a scripted engine that runs one sequence of up to nine tokens at a time."""
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps([{"when": "", "token_ids": [10], "ends": False, "delay_ms": 1}]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCRIPT_VARIABLE, str(path))
        child = start_engine(max_num_seqs=1, max_model_len=9)
    yield child
    child.stop()


def add(child, request_id, prompt=PROMPT, **params):
    checked = SamplingParams(**params)
    child.send(["add", request_id, prompt, pack_params(checked), checked.n])


def receive(child, is_last, limit_s=120.0):
    """Return the messages up to the first one for which `is_last(kind, values)` is true."""
    messages, deadline_s = [], time.monotonic() + limit_s
    while not any(is_last(kind, values) for kind, *values in messages):
        assert time.monotonic() < deadline_s, messages
        messages += child.receive(0.05, is_working=True)
    return messages


def updates_in(kind, values):
    """Return the updates of a message, or an empty list if it is not a message "updates"."""
    return [unpack_update(row) for row in values[0]] if kind == "updates" else []


def receive_until_the_end_of(request_id, child):
    """Return the messages up to the one with the last update of a request."""

    def has_last_update(kind, values):
        updates = updates_in(kind, values)
        return any(one.request_id == request_id and one.finish_reason for one in updates)

    return receive(child, has_last_update)


def test_requests_start_in_their_order_and_the_second_one_waits(engine):
    add(engine, "a", max_tokens=3)
    add(engine, "b", max_tokens=3)
    events = []
    for kind, *values in receive_until_the_end_of("b", engine):
        if kind == "started":
            events += [("started", request_id) for request_id, _ in values[0]]
        events += [("update", update.request_id) for update in updates_in(kind, values)]
    assert events == [
        ("started", "a"),
        *[("update", "a")] * 3,
        ("started", "b"),
        *[("update", "b")] * 3,
    ]


def test_a_refused_request_leaves_the_engine_alive(engine):
    add(engine, "long", PROMPT * 3)
    *_, (_, request_id, kind, text) = receive(engine, lambda kind, values: kind == "refused")
    assert (request_id, kind) == ("long", "RequestError")
    assert "max_model_len" in text
    add(engine, "c", max_tokens=1)
    receive(engine, lambda kind, values: kind == "updates")


def test_an_unforeseen_error_in_adding_a_request_refuses_that_request_alone(engine):
    add(engine, "odd", b"123")
    *_, (_, request_id, kind, text) = receive(engine, lambda kind, values: kind == "refused")
    assert (request_id, kind) == ("odd", "EngineError")
    assert text.startswith("TypeError: ")


def test_an_aborted_request_ends_with_an_update(engine):
    add(engine, "d", ignore_eos=True, max_tokens=5)
    engine.send(["abort", "d", None])
    messages = receive_until_the_end_of("d", engine)
    updates = [update for kind, *values in messages for update in updates_in(kind, values)]
    finish_reasons = [update.finish_reason for update in updates if update.finish_reason]
    assert finish_reasons == ["abort"]


def test_a_lost_device_ends_the_process_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"when": "", "token_ids": [10], "fault": "CUDA error: gone"}]))
    monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
    child = start_engine()
    add(child, "a")
    with pytest.raises(EngineDiedError, match=r"\(exit code 1\): CUDA error: gone"):
        receive(child, is_last=lambda kind, values: False)
    child.stop()
