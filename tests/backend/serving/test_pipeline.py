"""Tests of the tokenizer, a scripted engine and the postprocessor together, without a server."""

import json

import pytest
from backend.serving.fake_server import DEMO
from backend.serving.pipeline import Pipeline, chat, completion
from nereid_backend import RequestError
from nereid_backend.errors import EngineError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
SCRIPT = [
    {"when": "two", "text": ["First answer.", "Second one STOP never shown"], "tokens_per_step": 2},
    {"when": "json", "text": '<think>\nhm\n</think>\n\n{"a": 5}'},
    {"when": "wrong", "text": '{"a": "five"}'},
    {"when": "refuse", "token_ids": [5], "error": "regex: is too costly", "is_refused": True},
    {"when": "endless", "text": "on and STOP", "ends": False, "tokens_per_step": 1},
    {"when": "cached", "text": "Hello, Ünïcödé 🎉", "num_cached_tokens": 3},
]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Pipeline(DEMO / "chat", SCRIPT, tmp_path_factory.mktemp("pipeline"), patch)


def joined(replies, index=0, key="content"):
    """Return the text of one choice, joined from all responses."""
    deltas = [d for reply in replies for d in reply["delta"] if d.get("index", 0) == index]
    return "".join(delta.get(key, "") for delta in deltas)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_only_the_choice_that_contains_it(pipeline, stream):
    replies = pipeline.ask(**chat("two", stream=stream, n=2, stop=["STOP"]))
    assert stream == (len(replies) > 1)
    assert joined(replies, index=0) == "First answer."
    assert joined(replies, index=1) == "Second one "
    reasons_by_choice = {
        delta.get("index", 0): (delta["finish_reason"], delta.get("stop_reason"))
        for reply in replies
        for delta in reply["delta"]
        if "finish_reason" in delta
    }
    assert reasons_by_choice[0][0] == "stop"
    assert reasons_by_choice[1] == ("stop", "STOP")


def test_generation_stops_within_two_steps_of_a_stop_string(pipeline):
    steps_before = pipeline.num_steps
    replies = pipeline.ask(**chat("endless", stop=["STOP"], max_tokens=2000))
    usage = replies[-1]["delta"][0]["usage"]
    assert joined(replies) == "on and "
    assert pipeline.num_steps - steps_before <= usage["completion_tokens"] + 2


def test_a_valid_strict_answer_is_returned_apart_from_its_reasoning(pipeline):
    replies = pipeline.ask(**chat("json", response_format=STRICT))
    assert json.loads(joined(replies)) == {"a": 5}
    assert joined(replies, key="reasoning").strip() == "hm"


@pytest.mark.parametrize("stream", [True, False])
def test_a_strict_answer_that_violates_the_schema_is_an_error(pipeline, stream):
    with pytest.raises(
        EngineError, match="response_format: the generated text does not match the strict schema"
    ):
        pipeline.ask(**chat("wrong", stream=stream, response_format=STRICT))
    assert joined(pipeline.ask(**chat("wrong"))) == '{"a": "five"}'


def test_a_grammar_that_the_engine_refuses_is_a_request_error(pipeline):
    with pytest.raises(RequestError, match="regex: is too costly"):
        pipeline.ask(**chat("refuse", regex="a{1,2000}"))


def test_the_constraint_reaches_the_engine(pipeline):
    pipeline.ask(**chat("cached", response_format={"type": "json_object"}))
    assert pipeline.params.grammar.kind == "structural_tag"
    without_thinking = {"enable_thinking": False}
    pipeline.ask(**chat("cached", regex="H.*", chat_template_kwargs=without_thinking))
    assert pipeline.params.grammar[:2] == ("regex", "H.*")
    pipeline.ask(**completion("cached", regex="H.*"))
    assert pipeline.params.grammar[:2] == ("regex", "H.*")


def test_a_thinking_budget_reaches_the_engine_with_the_markers_tokens(pipeline):
    pipeline.ask(**chat("cached", reasoning_effort="high", thinking_token_budget=4))
    spec = pipeline.params.thinking
    assert (spec.start.strip(), spec.end.strip(), spec.budget) == ("<think>", "</think>", 4)
    assert spec.end_token_ids


def test_a_budget_does_not_force_a_marker_that_the_grammar_of_a_completion_forbids(pipeline):
    fields = {"thinking_token_budget": 4}
    pipeline.ask(**completion("cached <think>", **fields))
    assert pipeline.params.thinking.is_open
    pipeline.ask(**completion("cached <think>", regex="H.*", **fields))
    assert pipeline.params.thinking is None


def test_every_requested_tensor_has_one_element_for_each_choice(pipeline):
    returns = ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens")
    (reply,) = pipeline.ask(**completion("two", stream=False, n=2, returns=returns))
    assert reply["finish_reason"] == ["stop", "stop"]
    # The scripted engine reports the log-probability -0.5 for every token.
    assert reply["cumulative_logprob"] == [-0.5 * count for count in reply["num_output_tokens"]]
    logprobs_of_choices = [json.loads(text) for text in reply["logprobs"]]
    assert [len(logprobs) for logprobs in logprobs_of_choices] == reply["num_output_tokens"]
    assert {len(entry) for logprobs in logprobs_of_choices for entry in logprobs} == {1}


def test_bytes_of_log_probabilities_join_to_the_text(pipeline):
    replies = pipeline.ask(**completion("cached", logprobs=2, return_token_ids=True))
    deltas = [delta for reply in replies for delta in reply["delta"]]
    # The last token is the end-of-sequence token, which is not part of the text.
    *entries, _ = [entry for delta in deltas for entry in delta.get("logprobs", [])]
    *token_ids, _ = [token for delta in deltas for token in delta.get("token_ids", [])]

    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text == joined(replies) == "Hello, Ünïcödé 🎉"
    assert token_ids == [entry["token_id"] for entry in entries]
    assert deltas[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("keepalive_ms", ["0", "30"])
def test_a_stream_without_tokens_sends_empty_responses_if_keepalive_ms_is_set(
    tmp_path, monkeypatch, keepalive_ms
):
    script = [{"when": "", "token_ids": [300, 301], "delay_ms": 120}]
    pipeline = Pipeline(DEMO / "chat", script, tmp_path, monkeypatch, keepalive_ms=keepalive_ms)

    replies = pipeline.ask(**completion("x"))
    empty_replies = [reply for reply in replies if reply["delta"] == [{}]]
    assert all(reply["text_output"] == [""] for reply in empty_replies)
    assert len(empty_replies) >= 3 if keepalive_ms == "30" else not empty_replies

    (whole_reply,) = pipeline.ask(**completion("x", stream=False))
    assert whole_reply["delta"][0]["finish_reason"] == "stop"
