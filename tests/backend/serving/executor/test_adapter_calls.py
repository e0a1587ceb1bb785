"""Tests of calls that load, unload or list LoRA adapters in two engine processes."""

import json

import backend.serving.fake_server  # noqa: F401 - installs the server's Python API
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.executor.adapter_calls import AdapterCalls

LOAD = ["load_lora", "a", "/a"]


def names(outputs):
    return json.loads(outputs[tensor_names.STATE].tobytes())["adapters"]


def started():
    """Return an `AdapterCalls` object for two engine processes that started without adapters."""
    calls = AdapterCalls()
    for replica in (0, 1):
        assert calls.record_answer("", replica, []) is None
    return calls


def test_a_change_is_answered_when_every_process_has_made_it():
    calls = started()
    kind, call_id, *values = calls.add(LOAD, "sender", [0, 1])
    assert [kind, *values] == LOAD
    assert calls.record_answer(call_id, 1, ["a"]) is None
    assert names(calls.listing()) == []
    sender, outputs = calls.record_answer(call_id, 0, ["a"])
    assert (sender, names(outputs)) == ("sender", ["a"])
    assert calls.take_waiting() == []


def test_one_refusal_refuses_the_change_and_the_change_is_not_repeated():
    calls = started()
    call_id = calls.add(LOAD, "sender", [0, 1])[1]
    assert calls.record_answer(call_id, 0, ["a"]) is None
    refusal = RequestError("lora_path: wrong")
    assert calls.record_refusal(call_id, 1, refusal) == ("sender", refusal)
    assert calls.messages_for_restart() == []


def test_a_process_that_dies_does_not_stop_a_change_that_another_one_has_made():
    calls = started()
    call_id = calls.add(LOAD, "sender", [0, 1])[1]
    assert calls.record_answer(call_id, 0, ["a"]) is None
    ((sender, outputs),) = calls.record_death(1, EngineError("died"))
    assert (sender, names(outputs)) == ("sender", ["a"])
    assert calls.messages_for_restart() == [["load_lora", "restored", "a", "/a"]]


def test_a_process_that_restarts_while_an_adapter_is_unloaded_loads_and_unloads_it():
    calls = started()
    loading = calls.add(LOAD, "sender", [0, 1])[1]
    calls.record_answer(loading, 0, ["a"])
    calls.record_answer(loading, 1, ["a"])
    calls.record_death(1, EngineError("died"))
    calls.add(["unload_lora", "a"], "sender", [0])
    restored = [["load_lora", "restored", "a", "/a"], ["unload_lora", "restored", "a"]]
    assert calls.messages_for_restart() == restored


def test_an_adapter_of_the_settings_that_was_unloaded_is_unloaded_after_a_restart():
    calls = AdapterCalls(names_at_start=["a"])
    unloading = calls.add(["unload_lora", "a"], "sender", [0])[1]
    calls.record_answer(unloading, 0, [])
    assert calls.messages_for_restart() == [["unload_lora", "restored", "a"]]


def test_a_change_fails_if_every_process_dies():
    calls = started()
    calls.add(LOAD, "sender", [0, 1])
    assert calls.record_death(1, EngineError("first")) == []
    error = EngineError("second")
    assert calls.record_death(0, error) == [("sender", error)]


def test_a_process_that_restarts_during_a_change_gets_the_change():
    calls = started()
    calls.record_death(1, EngineError("died"))
    calls.add(LOAD, "sender", [0])
    assert calls.messages_for_restart() == [["load_lora", "restored", "a", "/a"]]


def test_a_process_that_restarts_gets_the_replaced_weights():
    calls = started()
    call_id = calls.add(["reload_weights", "/new", "finish"], "sender", [0, 1])[1]
    assert calls.record_answer(call_id, 0, []) is None
    assert calls.record_answer(call_id, 1, []) is not None
    calls.record_death(1, EngineError("died"))
    assert calls.messages_for_restart() == [["reload_weights", "restored", "/new", "finish"]]
