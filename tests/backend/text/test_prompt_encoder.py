import pytest
from backend.text.tokenizers_zoo import ALL, SPECIAL, TEXT
from nereid_backend.errors import RequestError
from nereid_backend.text.prompt_encoder import PromptEncoder
from transformers import PreTrainedTokenizerFast

TOKENIZERS = {
    name: PreTrainedTokenizerFast(tokenizer_object=make(), bos_token=SPECIAL)
    for name, make in ALL.items()
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("adds", [True, False])
def test_the_token_ids_are_those_of_transformers(name, adds):
    tokenizer = TOKENIZERS[name]
    encoder = PromptEncoder(tokenizer)
    for text in (*TEXT, "", f"a{SPECIAL}b", "  x\n\n"):
        expected = tokenizer(text, add_special_tokens=adds)["input_ids"]
        assert encoder.encode(text, add_special_tokens=adds) == expected


@pytest.mark.parametrize("name", ALL)
def test_no_token_has_more_bytes_than_the_longest(name):
    encoder = PromptEncoder(TOKENIZERS[name])
    for text in TEXT:
        assert len(text.encode()) <= encoder.max_token_bytes * len(encoder.encode(text))


def test_a_long_text_is_refused_after_its_beginning():
    encoder = PromptEncoder(TOKENIZERS["byte_level"], max_tokens=1000)
    with pytest.raises(RequestError, match=r"more than (\d+) tokens; the limit is 1000 \(max_mod"):
        encoder.encode("xyz " * 2_000_000)
