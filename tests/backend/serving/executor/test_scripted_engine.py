import json

import pytest
from backend.serving.fake_server import DEMO
from nereid_backend import ConfigError, EngineConfig, RequestError, SamplingParams
from nereid_backend.serving.executor.scripted.scripted_engine import SCRIPT_VARIABLE, ScriptedEngine

PROMPT = [5, 6, 7]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A function that returns a scripted engine with the rules of a script and some settings."""

    def make(*rules, **config):
        path = tmp_path / "script.json"
        path.write_text(json.dumps([{"when": ""} | rule for rule in rules]))
        monkeypatch.setenv(SCRIPT_VARIABLE, str(path))
        config = EngineConfig(model=str(DEMO / "chat"), **config)
        return ScriptedEngine(config, lambda _: None)

    return make


def run(engine):
    updates = []
    while engine.has_work():
        updates += engine.step()
    return updates


def test_the_engine_generates_the_tokens_of_the_script_and_then_eos(engine):
    scripted = engine({"token_ids": [10, 11, 12], "tokens_per_step": 2})
    eos = scripted.info.eos_token_ids[0]
    scripted.add_request("a", PROMPT, SamplingParams())
    updates = run(scripted)
    assert [u.new_token_ids for u in updates] == [[10, 11], [12, eos]]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", eos)
    assert updates[-1].cumulative_logprob == -2.0


def test_each_sequence_has_an_answer_of_its_own_and_may_be_aborted_alone(engine):
    scripted = engine({"token_ids": [[10, 11], [20]], "ends": False})
    scripted.add_request("a", PROMPT, SamplingParams(n=2, max_tokens=4))
    updates = scripted.step()
    scripted.abort("a", index=1)
    updates += run(scripted)
    first_answer = [token for u in updates if u.index == 0 for token in u.new_token_ids]
    assert first_answer == [10, 11, 10, 11]
    finish_reasons = {u.index: u.finish_reason for u in updates if u.finish_reason}
    assert finish_reasons == {0: "length", 1: "abort"}


def test_stop_tokens_wait_for_min_tokens_and_eos_can_be_ignored(engine):
    scripted = engine({"token_ids": [10, 11], "ends": True})
    scripted.add_request("a", PROMPT, SamplingParams(stop_token_ids=[10], min_tokens=2))
    # The answer is 10, 11, 10. Each token has the log-probability -0.5.
    assert run(scripted)[-1].cumulative_logprob == 3 * -0.5

    scripted.add_request("a", PROMPT, SamplingParams(ignore_eos=True, max_tokens=7))
    updates = run(scripted)
    assert (len(updates), updates[-1].finish_reason) == (7, "length")


def test_the_first_rule_whose_text_is_in_the_prompt_applies(engine):
    scripted = engine({"when": "Hello", "token_ids": [1]}, {"when": "", "text": "Hi"})
    scripted.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    assert run(scripted)[0].new_token_ids != [1]


def test_log_probabilities_are_reported_for_tokens_and_prompt(engine):
    scripted = engine({"token_ids": [10], "num_cached_tokens": 2})
    scripted.add_request("a", PROMPT, SamplingParams(logprobs=2, prompt_logprobs=0))
    first, last = run(scripted)
    assert first.logprobs[0].token_ids == [10, 10, 11]
    assert [row and row.token_ids for row in first.prompt_logprobs] == [None, [6], [7]]
    assert last.prompt_logprobs is None
    assert first.num_cached_tokens == 2


def test_a_rule_can_return_an_error(engine):
    scripted = engine({"token_ids": [1], "error": "no such grammar", "is_refused": True})
    scripted.add_request("a", PROMPT, SamplingParams())
    (update,) = run(scripted)
    assert (update.finish_reason, update.error, update.is_refused) == (
        "error",
        "no such grammar",
        True,
    )


def test_a_prompt_without_a_rule_is_refused(engine):
    scripted = engine({"when": "nowhere", "token_ids": [1]})
    with pytest.raises(RequestError, match="does not contain the text `when` of any rule"):
        scripted.add_request("a", PROMPT, SamplingParams())


def test_an_unknown_key_is_refused(engine):
    with pytest.raises(ConfigError, match="a rule has the unknown key 'tokens'"):
        engine({"tokens": [1]})
