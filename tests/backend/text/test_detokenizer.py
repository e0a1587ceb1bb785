import pytest
from backend.text import tokenizers_zoo as zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.text.detokenizer import Detokenizer

KINDS = sorted(zoo.ALL)
SAMPLES = [
    "Hello, world",
    "emoji 🎉👩‍👩‍👧 and 你好，世界",
    "a  b\n\n    indented\ttabs",
    " leading space",
    "日本語",
    "ünï",
]


def decode_with(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def pieces(decode, ids, sizes):
    detokenizer, given, at, turn = Detokenizer(decode), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        given.append(detokenizer.feed(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*given, detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [7]])
def test_the_joined_pieces_equal_the_text_of_all_tokens(kind, text, sizes):
    tokenizer = zoo.ALL[kind]()
    decode = decode_with(tokenizer)
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(decode, ids, sizes)) == decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_contains_half_a_character(kind):
    tokenizer = zoo.ALL[kind]()
    ids = tokenizer.encode("🎉 你好 👩‍👩‍👧 é").ids
    assert all("�" not in piece for piece in pieces(decode_with(tokenizer), ids, [1]))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
    text=st.text(max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_any_text_is_unchanged_for_any_division_into_pieces(kind, text, sizes):
    tokenizer = zoo.ALL[kind]()
    decode = decode_with(tokenizer)
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(decode, ids, sizes)) == decode(ids)


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 350), max_size=60), sizes=st.lists(st.integers(1, 4), min_size=1)
)
def test_any_token_ids_give_a_text(ids, sizes):
    tokenizer = zoo.byte_level()
    given_text = "".join(pieces(decode_with(tokenizer), ids, sizes))
    # In pieces, invalid bytes may become more or fewer U+FFFD than at once. All valid characters
    # are the same.
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert given_text.replace("�", "") == whole.replace("�", "")


def test_a_completion_keeps_the_space_before_its_first_word():
    tokenizer = zoo.byte_fallback()
    prompt, answer = tokenizer.encode("The").ids, tokenizer.encode("quick").ids
    decode = decode_with(tokenizer)
    seeded = Detokenizer(decode, prompt)
    assert seeded.feed(answer) + seeded.finish() == " quick"
    assert Detokenizer(decode).feed(answer) == "quick"


def test_a_special_token_in_the_middle_removes_no_space():
    tokenizer = zoo.byte_fallback()
    decode = decode_with(tokenizer)
    end = tokenizer.token_to_id(zoo.SPECIAL)
    ids = [*tokenizer.encode("the").ids, end, *tokenizer.encode("the").ids]
    assert "".join(pieces(decode, ids, [1])) == decode(ids)


def test_endless_invalid_bytes_are_returned_and_not_stored():
    tokenizer = zoo.byte_level()
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    wrong = tokenizer.encode("é").ids[0]
    byte = next(i for i in range(400) if decode([i]) == "�")
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.feed([byte]) for _ in range(500))
    assert "�" in text
    assert max(calls) < 40, f"windows grow: {max(calls)} (probe token {wrong})"


def test_the_cost_of_a_token_does_not_grow_with_the_answer():
    tokenizer = zoo.byte_level()
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200).ids
    detokenizer = Detokenizer(decode)
    for token_id in ids:
        detokenizer.feed([token_id])
    assert sum(decoded) < 8 * len(ids)
