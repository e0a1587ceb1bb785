"""Tests of the text offsets of tokens in the log-probabilities of a text completion."""

import pytest
from nereid_client.streaming.openai_logprobs import CompletionLogprobs, join_logprobs


def entry(token, raw=None):
    raw = token.encode() if raw is None else raw
    return {
        "token": token,
        "token_id": 1,
        "logprob": -1.0,
        "rank": 1,
        "bytes": list(raw),
        "top_logprobs": [],
    }


def offsets(text, entries, **options):
    part = CompletionLogprobs(**options).add(text, entries, is_last=True)
    return part["text_offset"]


def test_tokens_follow_one_another():
    assert offsets("Hello world", [entry("Hello"), entry(" world")]) == [0, 5]


def test_offsets_count_characters_not_bytes():
    assert offsets("日本語", [entry("日本"), entry("語")]) == [0, 2]


def test_tokens_that_share_a_character_have_the_offset_of_its_beginning():
    cat = "🐈".encode()
    pieces = [entry("a"), entry("\ufffd", cat[:2]), entry("\ufffd", cat[2:]), entry("b")]
    assert offsets("a🐈b", pieces) == [0, 1, 1, 2]


def test_an_incomplete_character_belongs_to_its_own_token():
    pieces = [entry("a"), entry("\ufffd", "🐈".encode()[:2]), entry(" know"), entry("!")]
    assert offsets("a\ufffd know!", pieces) == [0, 1, 2, 7]


def test_the_first_tokens_blank_may_be_missing_in_the_text():
    assert offsets("Hello you", [entry(" Hello"), entry(" you")]) == [0, 5]


def test_a_token_that_is_not_in_the_text_does_not_advance_the_offset():
    pieces = [entry("a"), entry("<|hidden|>"), entry(" b"), entry("</s>")]
    assert offsets("a b", pieces) == [0, 1, 1, 3]


def test_tokens_that_a_stop_string_cut_off_have_the_offset_of_the_end():
    assert offsets("one ", [entry("one"), entry(" END"), entry(" more")]) == [0, 3, 3]


def test_a_prompt_token_without_bytes_does_not_shift_the_next_offsets():
    scores = CompletionLogprobs(echoed_prompt="ab🐈c")
    tokens = ["a", "b", "\ufffd", "\ufffd", "c"]
    facts = [
        {str(n): {"logprob": -1.0, "rank": 1, "decoded_token": token}}
        for n, token in enumerate(tokens)
    ]
    part = scores.add_prompt([0, 1, 2, 3, 4], [None, *facts[1:]])
    assert part["text_offset"] == [0, 1, 2, 2, 3]
    assert part["tokens"][0] == "a"


@pytest.mark.parametrize(
    ("prompt", "later_tokens", "first_token"),
    [
        ("Hello world", [" world"], "Hello"),
        ("Hello", ["Hello"], ""),  # the first token is not in the text
        ("aaaa", ["aa"], "aa"),
        ("one", [], "one"),
        ("x 日y", [" ", "\ufffd", "y"], "x"),
        ("日y", ["", "\ufffd", "y"], ""),  # the second token has no text
    ],
)
def test_the_prompts_first_token_is_what_comes_before_the_second(prompt, later_tokens, first_token):
    # The engine reports no log probability, and therefore no text, for the first token.
    prompt_logprobs = [None] + [
        {str(token_id): {"logprob": -1.0, "rank": 1, "decoded_token": token}}
        for token_id, token in enumerate(later_tokens, 1)
    ]
    token_ids = list(range(len(prompt_logprobs)))

    logprobs = CompletionLogprobs(echoed_prompt=prompt).add_prompt(token_ids, prompt_logprobs)

    assert logprobs["tokens"][0] == first_token
    assert logprobs["token_logprobs"] == [None, *[-1.0] * len(later_tokens)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_text_that_comes_late_changes_no_offset(size):
    text = "one two three four"
    entries = [entry("one"), entry(" two"), entry(" three"), entry(" four")]
    scores = CompletionLogprobs()
    parts = [
        scores.add(text[n * size : (n + 1) * size], [entries[n]], is_last=False) for n in range(4)
    ]
    parts.append(scores.add(text[4 * size :], [], is_last=True))
    assert join_logprobs(parts)["text_offset"] == [0, 3, 7, 13]
