"""Tests that the load test finds each kind of fault in an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.reply import Reply
from loadtest.load import numbered_answers
from loadtest.load.check_reply import ReplyChecker
from loadtest.load.load_requests import bad, chat, embedding
from loadtest.load.prompts import Question

NUMBERS = numbered_answers.tokens(3)
QUESTION = Question(numbered_answers.prompt(3), NUMBERS)
LENGTH = 40
ASK = chat(QUESTION, LENGTH, ignore_eos=True)


def reply(texts, *, end="whole", finish="length", **fields):
    """Return a reply with these pieces of text."""
    fields.setdefault("num_tokens", None)
    made = Reply(status=200, finish_reasons=[finish] if finish else [], end=end, **fields)
    for text in texts:
        made.add_text(text)
    return made


def kinds(texts, ask=ASK, **fields):
    return {fault.kind for fault in ReplyChecker().faults(ask, reply(texts, **fields))}


def test_the_whole_answer_is_fine():
    assert kinds(NUMBERS[:LENGTH], num_tokens=LENGTH) == set()


@given(st.data())
def test_the_pieces_of_an_answer_do_not_matter(data):
    said = "".join(NUMBERS[:LENGTH])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1))))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert kinds(pieces) == set()


@given(st.integers(0, LENGTH - 2))
def test_a_token_that_is_missing_in_the_middle_is_lost(place):
    said = [*NUMBERS[:place], *NUMBERS[place + 1 : LENGTH]]
    [fault] = ReplyChecker().faults(ASK, reply(said))
    assert (fault.kind, fault.detail) == ("lost", NUMBERS[place])


@given(st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1))
def test_a_token_that_comes_again_is_doubled(place, again):
    said = list(NUMBERS[:LENGTH])
    said.insert(max(place, again) + 1, NUMBERS[min(place, again)])
    assert kinds(said) == {"doubled"}


@given(st.integers(0, LENGTH - 2), st.data())
def test_two_tokens_in_the_wrong_order_are_reordered(place, data):
    other = data.draw(st.integers(place + 1, LENGTH - 1))
    said = list(NUMBERS[:LENGTH])
    said[place], said[other] = said[other], said[place]
    assert kinds(said) == {"reordered"}


@given(st.integers(0, LENGTH - 1))
def test_an_answer_that_stops_early_is_truncated(length):
    assert kinds(NUMBERS[:length]) == {"truncated"}


@given(st.integers(0, LENGTH))
def test_a_token_of_another_answer_is_foreign(place):
    said = [*NUMBERS[:place], numbered_answers.tokens(4)[place], *NUMBERS[place:LENGTH]]
    assert kinds(said) == {"foreign"}


def test_a_token_after_the_last_is_foreign():
    assert kinds(NUMBERS[: LENGTH + 1]) == {"foreign"}


@given(st.integers(0, LENGTH * len(NUMBERS[0]) - 1))
def test_half_a_token_is_garbled(place):
    said = "".join(NUMBERS[:LENGTH])
    assert "garbled" in kinds([said[:place] + said[place + 1 :]])


def test_several_faults_are_all_reported():
    assert kinds([*NUMBERS[:5], *NUMBERS[4:10], *NUMBERS[11:20]]) == {
        "doubled",
        "lost",
        "truncated",
    }


@given(st.integers(0, LENGTH))
def test_a_client_that_disconnected_has_the_beginning_of_the_answer(length):
    said = NUMBERS[:length]
    assert kinds(said, end="cancelled", finish=None) == set()


def test_a_client_that_disconnected_must_not_miss_an_earlier_token():
    said = [*NUMBERS[:5], *NUMBERS[6:9]]
    assert kinds(said, end="cancelled", finish=None) == {"lost"}


def test_a_stream_without_a_finish_reason_is_unended():
    assert kinds(NUMBERS[:LENGTH], finish=None) == {"unended"}


def test_a_stream_that_ends_twice_is_unended():
    said = reply(NUMBERS[:LENGTH])
    said.finish_reasons.append("length")
    assert [fault.kind for fault in ReplyChecker().faults(ASK, said)] == ["unended"]


def test_a_stream_that_breaks_off_is_broken_even_if_all_its_tokens_came():
    assert kinds(NUMBERS[:LENGTH], end="broken") == {"broken"}


def test_another_finish_reason_is_different():
    assert kinds(NUMBERS[:LENGTH], finish="stop") == {"different"}


def test_a_wrong_count_of_tokens_is_miscounted():
    assert kinds(NUMBERS[:LENGTH], num_tokens=LENGTH - 1) == {"miscounted"}


def test_an_answer_that_ends_by_itself_counts_the_end_as_a_token():
    ask = chat(QUESTION, 4 * numbered_answers.LENGTH)
    assert kinds(NUMBERS, ask, finish="stop", num_tokens=numbered_answers.LENGTH + 1) == set()


def test_an_error_in_the_middle_is_an_error():
    assert kinds(NUMBERS[:5], error="the engine failed", finish=None) == {"error"}


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [(400, "temperature", set()), (500, "oops", {"error"}), (404, "no", {"error"})],
)
def test_bad_input_must_be_refused_as_such(status, error, expected):
    said = Reply(status=status, error=error, end="whole")
    assert {f.kind for f in ReplyChecker().faults(bad(ASK, temperature=-1), said)} == expected


def test_bad_input_that_is_answered_is_a_fault():
    assert kinds(NUMBERS[:LENGTH], bad(ASK, temperature=-1)) == {"accepted"}


PLAIN = chat(Question("Hello!"), 10)


@given(st.text(min_size=1), st.text(min_size=1))
def test_every_answer_must_equal_the_first_answer(first, other):
    judge = ReplyChecker()
    assert judge.faults(PLAIN, reply([first])) == []
    found = [fault.kind for fault in judge.faults(PLAIN, reply([other]))]
    if other == first:
        assert found == []
    else:
        assert found == ["truncated" if first.startswith(other) else "different"]


def test_a_wrong_answer_is_not_used_as_the_first_answer():
    judge = ReplyChecker()
    assert judge.faults(PLAIN, reply(["half an ans"], finish=None))
    assert judge.faults(PLAIN, reply(["an answer"])) == []


def test_a_client_that_disconnected_sets_no_first_answer():
    judge = ReplyChecker()
    assert judge.faults(PLAIN, reply(["an"], end="cancelled", finish=None)) == []
    assert judge.faults(PLAIN, reply(["an answer"])) == []
    assert judge.faults(PLAIN, reply(["a"], end="cancelled", finish=None)) == []
    [fault] = judge.faults(PLAIN, reply(["the"], end="cancelled", finish=None))
    assert fault.kind == "different"


def test_vectors_may_differ_by_rounding_and_no_more():
    judge, ask = ReplyChecker(), embedding("embed", ["Hugo"])
    for numbers, expected in (
        ([0.5, 0.25], []),
        ([0.5, 0.25001], []),
        ([0.5, 0.26], ["different"]),
        ([0.5], ["different"]),
    ):
        said = Reply(status=200, numbers=numbers, end="whole")
        assert [fault.kind for fault in judge.faults(ask, said)] == expected


def test_between_reasoning_and_content_there_is_no_order():
    judge = ReplyChecker()
    for order in (("reasoning", "content", "reasoning"), ("reasoning", "reasoning", "content")):
        said = reply([])
        for channel in order:
            said.add_text({"reasoning": "hm ", "content": "Hello!"}[channel], channel)
        assert judge.faults(PLAIN, said) == []
    other = reply([])
    other.add_text("hm hm Hello!", "reasoning")
    assert [fault.kind for fault in judge.faults(PLAIN, other)] == ["different"]
