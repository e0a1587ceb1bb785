"""Tests of the bytes of tokens, for each way in which tokenizers write bytes as text."""

import pytest
from backend.text.tokenizers_zoo import byte_fallback, byte_level, unigram
from nereid_backend.errors import RequestError
from nereid_backend.grammar.vocabulary import mask_of, vocabulary_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXTS = ["hello wörld", " a  b\n", '{"k": [1, 2]}', "日本 🎉"]


def test_the_tokens_of_a_text_spell_its_bytes(vocabulary):
    for text in TEXTS:
        spelled = b"".join(vocabulary.tokens[token] for token in vocabulary.encode(text))
        assert spelled == text.encode()


def test_byte_fallback_pieces_are_bytes():
    vocab = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{n:02X}>": 3 + n for n in range(256)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>")])
    vocabulary = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend), 300)
    assert (vocabulary.tokens[1], vocabulary.tokens[3 + 0xC3]) == (b" a", b"\xc3")
    assert vocabulary.tokens[259] == b"<s>"
    assert 259 in vocabulary.special_ids
    # The model has logits for 300 tokens, and the tokenizer has 260 tokens.
    assert vocabulary.tokens[299] == b""
    assert 299 in vocabulary.unusable_ids


def test_the_logits_may_be_narrower_than_the_vocabulary(vocabulary):
    from backend.grammar.conftest import MODEL
    from transformers import AutoTokenizer

    narrow = vocabulary_of(AutoTokenizer.from_pretrained(MODEL), 100)
    assert narrow.tokens == vocabulary.tokens[:100]


def test_a_tokenizer_that_does_not_define_bytes_is_refused():
    with pytest.raises(RequestError, match="does not define the bytes of its tokens"):
        vocabulary_of(object(), 10)


def test_texts_are_neither_truncated_nor_padded():
    backend = Tokenizer.from_str(byte_level().to_str())
    expected = backend.encode("the brown fox").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    vocabulary = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend), 500)
    assert vocabulary.encode("the brown fox") == expected


@pytest.mark.parametrize("create", [byte_level, byte_fallback, unigram])
@pytest.mark.parametrize("content", ["▁▁", "Ġx", "\n\n", "日本"])
def test_the_bytes_of_an_added_token_are_those_that_the_decoder_returns(create, content):
    backend = Tokenizer.from_str(create().to_str())
    backend.add_tokens([AddedToken(content, normalized=False)])
    vocabulary = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend), 500)
    token_id = backend.token_to_id(content)
    # The decoder may remove a space at the start of a text, so the token follows the letter a.
    decoded = backend.decode([backend.token_to_id("a"), token_id])
    assert vocabulary.tokens[token_id].decode() == decoded.removeprefix("a")


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder()])
def test_a_tokenizer_whose_decoder_adds_spaces_between_tokens_is_refused(decoder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Sequence([decoder])
    name = type(decoder).__name__
    with pytest.raises(RequestError, match=f"the decoder {name} of its tokenizer adds spaces"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 2)


def test_bytes_can_be_spelled_with_any_tokens(vocabulary):
    data = "Zoë {".encode()
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.spell(data)) == data


def test_bytes_without_a_token_cannot_be_spelled():
    vocab = {"a": 0, "b": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    vocabulary = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 2)
    with pytest.raises(KeyError, match="z"):
        vocabulary.spell(b"az")


def test_rows_have_a_bit_for_each_token():
    assert mask_of([0, 31, 33], 40).tolist() == [-(2**31) + 1, 2]
