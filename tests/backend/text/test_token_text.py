import pytest
from backend.text.tokenizers_zoo import ALL, SPECIAL, TEXT
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.text.logprob_entries import LOWEST, openai_entry, vllm_entry
from nereid_backend.text.token_text import TokenText
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

TEXTS = {
    name: TokenText(PreTrainedTokenizerFast(tokenizer_object=make())) for name, make in ALL.items()
}


@given(st.text(max_size=40))
def test_the_bytes_of_a_byte_level_vocabularys_tokens_join_to_the_text(text):
    ids = ALL["byte_level"]().encode(text).ids
    assert b"".join(TEXTS["byte_level"].data(i) for i in ids) == text.encode()


@pytest.mark.parametrize("line", TEXT[:3])
def test_byte_fallback_tokens_are_single_bytes(line):
    ids = ALL["byte_fallback"]().encode(line).ids
    assert b"".join(TEXTS["byte_fallback"].data(i) for i in ids) == f" {line}".encode()


def test_a_sentencepiece_token_keeps_the_space_before_it():
    tokenizer = ALL["unigram"]()
    ids = tokenizer.encode("over the").ids
    assert b"".join(TEXTS["unigram"].data(i) for i in ids) == b" over the"


@pytest.mark.parametrize("name", ALL)
def test_a_special_token_is_its_own_text(name):
    token_id = ALL[name]().token_to_id(SPECIAL)
    assert TEXTS[name].text(token_id) == SPECIAL


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("content", ["▁▁", "Ġx", "\n\n", "日本"])
def test_the_text_of_an_added_token_is_the_text_in_an_answer(name, content):
    tokenizer = Tokenizer.from_str(ALL[name]().to_str())
    tokenizer.add_tokens([AddedToken(content, normalized=False)])
    texts = TokenText(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    token_id = tokenizer.token_to_id(content)
    # The decoder may remove a space at the start of a text, so the token follows the letter a.
    decoded = tokenizer.decode([tokenizer.token_to_id("a"), token_id])
    assert texts.text(token_id) == decoded.removeprefix("a")


def test_half_a_character_is_a_replacement_character_with_exact_bytes():
    tokenizer = ALL["byte_level"]()
    ids = tokenizer.encode("𝄞").ids
    entry = openai_entry([[ids[0]], [-1.0], 1], TEXTS["byte_level"])
    assert entry["token"] == "\ufffd"
    assert entry["bytes"] == [0xF0]


def test_an_id_outside_of_the_vocabulary_has_no_text():
    assert all(texts.data(10**6) == b"" for texts in TEXTS.values())


def test_a_token_of_probability_zero_has_a_finite_logprob():
    texts = TEXTS["byte_level"]
    entry = openai_entry([[5, 6], [float("-inf"), -1.0], 9], texts)
    assert entry["logprob"] == LOWEST
    assert vllm_entry([[5, 6], [float("-inf"), -1.0], 9], texts)["5"]["logprob"] == LOWEST


def test_the_chosen_token_keeps_its_own_rank_among_the_likeliest():
    entries = vllm_entry([[7, 8, 7], [-2.0, -1.0, -2.0], 2], TEXTS["byte_level"])
    assert [(key, entry["rank"]) for key, entry in entries.items()] == [("7", 2), ("8", 1)]
