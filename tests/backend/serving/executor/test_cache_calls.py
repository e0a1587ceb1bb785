import json

import backend.serving.fake_server  # noqa: F401 - provides triton_python_backend_utils
import pytest
from nereid_backend.errors import EngineError, RequestError
from nereid_backend.serving import tensor_names
from nereid_backend.serving.executor.cache_calls import CacheCalls

SESSION = {"client_id": "", "prompt_cache_key": "a", "num_tokens": 16, "expires_in_s": 5.0}


def started(calls: CacheCalls, parameters: dict[str, str], replicas: range) -> str:
    """Send one call to all replicas, and return its id."""
    calls.put(parameters, "sender")
    ((message, sender),) = calls.take_new()
    return str(calls.add(message, sender, replicas)[1])


def text_of(answer):
    sender, tensors = answer
    assert sender == "sender"
    return json.loads(tensors[tensor_names.STATE].tobytes())


def test_the_numbers_of_all_engine_processes_are_added():
    calls = CacheCalls()
    call_id = started(calls, {"cache": "statistics"}, range(2))
    assert calls.record_answer(call_id, 0, {"num_blocks": 4, "sessions": [SESSION]}) is None
    later = {**SESSION, "expires_in_s": 9.0}
    answer = calls.record_answer(call_id, 1, {"num_blocks": 6, "sessions": [later]})
    expected = [{**SESSION, "num_tokens": 32, "expires_in_s": 9.0}]
    assert text_of(answer) == {"num_blocks": 10, "sessions": expected}


def test_the_death_of_the_last_engine_process_is_the_answer():
    calls = CacheCalls()
    started(calls, {"cache": "drop"}, range(1))
    error = EngineError("died")
    assert calls.record_death(0, error) == [("sender", error)]
    assert not calls.take_waiting()


def test_the_death_of_one_engine_process_leaves_the_other_answers():
    calls = CacheCalls()
    call_id = started(calls, {"cache": "drop"}, range(2))
    assert calls.record_death(1, EngineError("died")) == []
    assert text_of(calls.record_answer(call_id, 0, {"num_dropped_tokens": 3})) == {
        "num_dropped_tokens": 3
    }


def test_a_message_contains_the_arguments_of_the_call():
    calls = CacheCalls()
    parameters = {"cache": "extend", "prompt_cache_key": "a", "seconds": "60", "client_id": "b"}
    calls.put(parameters, "sender")
    ((message, _),) = calls.take_new()
    values = {"prompt_cache_key": "a", "seconds": 60.0, "client_id": "b"}
    assert message == ["extend", values]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cache": "burn"}, "cache: the value must be statistics, extend or drop"),
        ({"cache": "extend", "seconds": "5"}, "prompt_cache_key: the parameter is required"),
        ({"cache": "extend", "prompt_cache_key": "a"}, "seconds: the value must be a number from"),
        (
            {"cache": "extend", "prompt_cache_key": "a", "seconds": "nan"},
            "seconds: the value must be a number from 0 to 86400",
        ),
    ],
)
def test_a_wrong_parameter_is_refused(parameters, message):
    with pytest.raises(RequestError, match=message):
        CacheCalls().put(parameters, "sender")
