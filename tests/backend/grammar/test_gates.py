"""Tests of reasoning gates and thinking budgets: where a grammar begins, and what is forced."""

import json

import pytest
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.errors import EngineError, RequestError

EOS = {2, 0}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
GATED = GrammarSpec("json_schema", SCHEMA, "</think>")


@pytest.fixture
def tokens(vocabulary):
    return vocabulary.encode


def test_only_stop_tokens_are_forbidden_while_the_model_reasons(guide, allowed, vocabulary):
    start = guide(GATED)
    assert allowed(start) == set(range(vocabulary.size)) - EOS
    assert start.forced() == []


def test_the_grammar_begins_after_an_end_marker_of_one_token(guide, allowed, tokens):
    held = guide(GATED)
    held.accept(tokens("I think {nothing}</think>"))
    free = allowed(held)
    assert tokens("{")[0] in free
    assert tokens("hello")[0] not in free
    held.accept(tokens("\n\n"))
    held.accept(tokens('{"a": 1}'))
    assert allowed(held) >= EOS


def test_the_grammar_begins_after_an_end_marker_of_several_tokens(guide, allowed, tokens):
    held = guide(GrammarSpec("json_schema", SCHEMA, "END OF THOUGHT"))
    held.accept(tokens("so END OF THOU"))
    assert tokens("hello")[0] in allowed(held)
    held.accept(tokens("GHT"))
    assert tokens("hello")[0] not in allowed(held)
    held.accept(tokens(' \n{"a": 1}'))
    assert allowed(held) >= EOS


def test_a_token_that_spans_the_marker_and_wrong_text_is_not_allowed(guide, allowed, vocabulary):
    spanning = next(
        (number, data)
        for data, number in vocabulary.sorted_tokens
        if len(data) > 2 and data.isalpha() and number not in vocabulary.special_ids
    )
    number, data = spanning
    marker = "<" + data[:1].decode()
    held = guide(GrammarSpec("regex", "Z+", marker))
    held.accept(vocabulary.encode("<"))
    assert number not in allowed(held)
    fitting = guide(GrammarSpec("regex", data[1:].decode() + "Z+", marker))
    fitting.accept(vocabulary.encode("<"))
    assert number in allowed(fitting)
    fitting.accept([number])
    assert allowed(fitting) == {vocabulary.encode("Z")[0]} | {
        one
        for text, one in vocabulary.starting_with(b"Z")
        if not text.strip(b"Z") and one != vocabulary.encode("Z")[0]
    }


def test_the_answer_cannot_end_before_the_grammar_is_complete(guide, tokens):
    held = guide(GATED)
    held.accept(tokens("hm"))
    with pytest.raises(EngineError, match="not allowed"):
        held.accept([2])


def test_a_prompt_that_closed_thinking_leaves_the_grammar_from_the_first_token(
    guide, allowed, tokens
):
    spec = ThinkingSpec("<think>", "</think>", (2043,), False, 5)
    held = guide(GrammarSpec("json_schema", SCHEMA), spec)
    assert tokens("hello")[0] not in allowed(held)
    held.accept(tokens('{"a": 1}'))
    assert allowed(held) >= EOS


def test_a_budget_forces_the_end_marker(guide, allowed, tokens):
    ends = tuple(tokens("\n</think>\n\n"))
    held = guide(None, ThinkingSpec("<think>", "</think>", ends, True, 3))
    held.accept(tokens("a")[:1] * 2)
    assert allowed(held) is None
    assert held.forced() == []
    held.accept(tokens("a")[:1])
    for at, token in enumerate(ends):
        assert held.forced() == list(ends[at:])
        assert allowed(held) == {token}
        held.accept([token])
    assert allowed(held) is None
    assert held.forced() == []


def test_another_token_than_the_forced_one_is_an_error(guide, tokens):
    held = guide(None, ThinkingSpec("<think>", "</think>", (2043,), True, 0))
    with pytest.raises(EngineError, match="next token must be 2043"):
        held.accept(tokens("a"))


def test_reasoning_that_ends_within_the_budget_is_not_changed(guide, allowed, tokens):
    held = guide(None, ThinkingSpec("<think>", "</think>", (2043,), True, 4))
    held.accept(tokens("a</think>"))
    held.accept(tokens("a")[:1] * 9)
    assert allowed(held) is None


def test_the_budget_counts_from_the_opening_marker_that_the_model_generates(guide, allowed, tokens):
    spec = ThinkingSpec("<think>\n", "\n</think>\n\n", (2043,), False, 2)
    held = guide(None, spec)
    held.accept(tokens("\n<think>"))
    held.accept(tokens("a"))
    assert allowed(held) is None
    held.accept(tokens("b"))
    assert allowed(held) == {2043}


def test_an_answer_without_reasoning_has_no_budget(guide, allowed, tokens):
    held = guide(None, ThinkingSpec("<think>", "</think>", (2043,), False, 1))
    held.accept(tokens("The <think> marker is text here, and long"))
    assert allowed(held) is None


def test_a_budget_ends_the_reasoning_before_a_grammar(guide, allowed, tokens):
    held = guide(GATED, ThinkingSpec("<think>", "</think>", (2043,), True, 1))
    held.accept(tokens("a"))
    assert allowed(held) == {2043}
    held.accept([2043])
    assert tokens("a")[0] not in allowed(held)
    assert tokens("{")[0] in allowed(held)


def test_a_budget_without_an_end_is_refused(guide):
    with pytest.raises(RequestError, match="requires end_token_ids"):
        guide(None, ThinkingSpec("<think>", "</think>", (), True, 1))


def test_forks_are_independent(guide, allowed, tokens):
    first = guide(GATED, ThinkingSpec("<think>", "</think>", (2043,), True, 6))
    first.accept(tokens("a"))
    second = first.fork()
    first.accept([2043])
    assert tokens("a")[0] in allowed(second)
    assert tokens("a")[0] not in allowed(first)
    second.accept(tokens("a")[:1] * 5)
    assert allowed(second) == {2043}
    third = first.fork()
    first.accept(tokens('{"a": 1}'))
    assert allowed(first) >= EOS
    assert not allowed(third) & EOS
