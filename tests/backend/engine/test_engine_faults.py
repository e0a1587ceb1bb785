"""Tests of steps that fail: which requests end, when the engine continues, and when it stops."""

import pytest
import torch
from backend.exactness import open_engine
from nereid_backend import EngineError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture
def engine(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64, max_step_failures=3)
    yield engine
    engine.close()


def fail_with(engine, monkeypatch, error):
    """Let each forward pass of the engine raise `error`."""

    def start(plan):
        raise error

    monkeypatch.setattr(engine._parts.runner, "start", start)


def finish(engine):
    """Run the engine until it is idle, and return all updates."""
    updates = []
    while engine.has_work():
        updates += engine.step()
    return updates


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shape mismatch")],
)
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(engine, monkeypatch, error):
    engine.add_request("a", PROMPT, GREEDY)
    with monkeypatch.context() as broken:
        fail_with(engine, broken, error)
        (update,) = engine.step()
    assert update.finish_reason == "error"
    assert type(error).__name__ in update.error
    assert engine.stats().kv_cache_blocks_used == 0
    engine.check()
    engine.add_request("b", PROMPT, GREEDY)
    assert finish(engine)[-1].finish_reason == "length"


def test_repeated_failures_of_steps_end_the_engine(engine, monkeypatch):
    with monkeypatch.context() as broken:
        fail_with(engine, broken, MemoryError("no room"))
        for name in ("a", "b"):
            engine.add_request(name, PROMPT, GREEDY)
            assert engine.step()[0].finish_reason == "error"

    engine.add_request("good", PROMPT, GREEDY)
    finish(engine)  # A successful step resets the number of consecutive failures.

    fail_with(engine, monkeypatch, MemoryError("no room"))
    for name in ("c", "d"):
        engine.add_request(name, PROMPT, GREEDY)
        engine.step()
    engine.add_request("e", PROMPT, GREEDY)
    message = r"3 consecutive steps have failed \(max_step_failures\).*no room"
    with pytest.raises(EngineError, match=message):
        engine.step()


def test_a_lost_device_ends_the_engine_at_once(engine, monkeypatch):
    fail_with(engine, monkeypatch, RuntimeError("CUDA error: an illegal memory access"))
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(EngineError, match="the device is lost"):
        engine.step()


def test_a_step_reports_the_requests_that_it_has_started(engine):
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    assert [name for name, _ in engine.started] == ["a"]
    engine.step()
    assert engine.started == []
    finish(engine)
