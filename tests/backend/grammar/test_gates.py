"""Tests of reasoning gates and thinking budgets: where a grammar begins, and what is forced."""

import json

import pytest
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.errors import EngineError, RequestError

EOS = {2, 0}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
GATED = GrammarSpec("json_schema", SCHEMA, after="</think>")
END_ID = 2043  # the token "</think>"


@pytest.fixture
def tokens(vocabulary):
    return vocabulary.encode


def test_only_stop_tokens_are_forbidden_while_the_model_reasons(guide, allowed, vocabulary):
    start = guide(GATED)
    assert allowed(start) == set(range(vocabulary.size)) - EOS
    assert start.forced() == []


def test_the_grammar_begins_after_an_end_marker_of_one_token(guide, allowed, tokens):
    state = guide(GATED)
    state.accept(tokens("I think {nothing}</think>"))
    free = allowed(state)
    assert tokens("{")[0] in free
    assert tokens("hello")[0] not in free
    state.accept(tokens("\n\n"))
    state.accept(tokens('{"a": 1}'))
    assert allowed(state) >= EOS


def test_the_grammar_begins_after_an_end_marker_of_several_tokens(guide, allowed, tokens):
    state = guide(GrammarSpec("json_schema", SCHEMA, "END OF THOUGHT"))
    state.accept(tokens("so END OF THOU"))
    assert tokens("hello")[0] in allowed(state)
    state.accept(tokens("GHT"))
    assert tokens("hello")[0] not in allowed(state)
    state.accept(tokens(' \n{"a": 1}'))
    assert allowed(state) >= EOS


def test_a_token_that_spans_the_marker_and_wrong_text_is_not_allowed(guide, allowed, vocabulary):
    # The first letter of this token is the end of the marker, and its other letters are the start
    # of the answer.
    spanning_token, text = next(
        (token, data.decode())
        for data, token in vocabulary.sorted_tokens
        if len(data) > 2 and data.isalpha() and token not in vocabulary.special_ids
    )
    marker, rest = "<" + text[0], text[1:]

    wrong = guide(GrammarSpec("regex", "Z+", after=marker))
    wrong.accept(vocabulary.encode("<"))
    assert spanning_token not in allowed(wrong)

    fitting = guide(GrammarSpec("regex", rest + "Z+", after=marker))
    fitting.accept(vocabulary.encode("<"))
    assert spanning_token in allowed(fitting)
    fitting.accept([spanning_token])
    tokens_of_z = {token for data, token in vocabulary.starting_with(b"Z") if not data.strip(b"Z")}
    assert allowed(fitting) == tokens_of_z | {vocabulary.encode("Z")[0]}


def test_the_answer_cannot_end_before_the_grammar_is_complete(guide, tokens):
    state = guide(GATED)
    state.accept(tokens("hm"))
    with pytest.raises(EngineError, match="not allowed"):
        state.accept([2])


def test_a_prompt_that_closed_thinking_leaves_the_grammar_from_the_first_token(
    guide, allowed, tokens
):
    spec = ThinkingSpec("<think>", "</think>", (END_ID,), is_open=False, budget=5)
    state = guide(GrammarSpec("json_schema", SCHEMA), spec)
    assert tokens("hello")[0] not in allowed(state)
    state.accept(tokens('{"a": 1}'))
    assert allowed(state) >= EOS


def test_a_budget_forces_the_end_marker(guide, allowed, tokens):
    end_ids = tuple(tokens("\n</think>\n\n"))
    state = guide(None, ThinkingSpec("<think>", "</think>", end_ids, is_open=True, budget=3))
    state.accept(tokens("a")[:1] * 2)
    assert allowed(state) is None
    assert state.forced() == []
    state.accept(tokens("a")[:1])
    for index, token in enumerate(end_ids):
        assert state.forced() == list(end_ids[index:])
        assert allowed(state) == {token}
        state.accept([token])
    assert allowed(state) is None
    assert state.forced() == []


def test_another_token_than_the_forced_one_is_an_error(guide, tokens):
    state = guide(None, ThinkingSpec("<think>", "</think>", (END_ID,), is_open=True, budget=0))
    with pytest.raises(EngineError, match=f"next token must be {END_ID}"):
        state.accept(tokens("a"))


def test_reasoning_that_ends_within_the_budget_is_not_changed(guide, allowed, tokens):
    state = guide(None, ThinkingSpec("<think>", "</think>", (END_ID,), is_open=True, budget=4))
    state.accept(tokens("a</think>"))
    state.accept(tokens("a")[:1] * 9)
    assert allowed(state) is None


def test_the_budget_counts_from_the_opening_marker_that_the_model_generates(guide, allowed, tokens):
    spec = ThinkingSpec("<think>\n", "\n</think>\n\n", (END_ID,), is_open=False, budget=2)
    state = guide(None, spec)
    state.accept(tokens("\n<think>"))
    state.accept(tokens("a"))
    assert allowed(state) is None
    state.accept(tokens("b"))
    assert allowed(state) == {END_ID}


def test_an_answer_without_reasoning_has_no_budget(guide, allowed, tokens):
    state = guide(None, ThinkingSpec("<think>", "</think>", (END_ID,), is_open=False, budget=1))
    state.accept(tokens("The <think> marker is text here, and long"))
    assert allowed(state) is None


def test_a_budget_ends_the_reasoning_before_a_grammar(guide, allowed, tokens):
    state = guide(GATED, ThinkingSpec("<think>", "</think>", (END_ID,), is_open=True, budget=1))
    state.accept(tokens("a"))
    assert allowed(state) == {END_ID}
    state.accept([END_ID])
    assert tokens("a")[0] not in allowed(state)
    assert tokens("{")[0] in allowed(state)


def test_a_budget_without_an_end_is_refused(guide):
    with pytest.raises(RequestError, match="requires end_token_ids"):
        guide(None, ThinkingSpec("<think>", "</think>", (), is_open=True, budget=1))


def test_forks_are_independent(guide, allowed, tokens):
    first = guide(GATED, ThinkingSpec("<think>", "</think>", (END_ID,), is_open=True, budget=6))
    first.accept(tokens("a"))
    second = first.fork()
    first.accept([END_ID])
    assert tokens("a")[0] in allowed(second)
    assert tokens("a")[0] not in allowed(first)
    second.accept(tokens("a")[:1] * 5)
    assert allowed(second) == {END_ID}
    third = first.fork()
    first.accept(tokens('{"a": 1}'))
    assert allowed(first) >= EOS
    assert not allowed(third) & EOS
