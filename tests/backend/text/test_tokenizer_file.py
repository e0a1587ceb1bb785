"""Tests that a prompt is tokenized by the rules of tokenizer.json.

The class that tokenizer_config.json names must not matter. Some classes of transformers replace the
normalizer and the pre-tokenizer of tokenizer.json by their own.
"""

import json
from types import SimpleNamespace

import pytest
from backend.text.tokenizers_zoo import SPECIAL, TEXT, byte_fallback, byte_level, unigram
from nereid_backend.grammar.vocabulary import load_vocabulary
from nereid_backend.serving.tokenizer.prompt_builder import load_tokenizer
from nereid_backend.vision import load_processor
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, TokenizersBackend


def digits_first() -> Tokenizer:
    """Return a tokenizer that splits a number into digits, like the tokenizer of SmolLM2."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, "a   1\n   2"], trainer)
    return tokenizer


def compatible_characters() -> Tokenizer:
    """Return a tokenizer that replaces a no-break space by a space, like the one of DeBERTa v3."""
    tokenizer = Tokenizer.from_str(unigram().to_str())
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    return tokenizer


def word_pieces(*, lowercase: bool) -> Tokenizer:
    """Return a tokenizer that divides words into pieces, like the one of BERT."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "The", "the", "quick"]
    ids = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def save(tokenizer, folder, class_name, model_type, **settings):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": class_name, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(
    ("create", "class_name", "model_type"),
    [
        (digits_first, "GPT2Tokenizer", "llama"),
        (digits_first, "GPTNeoXTokenizerFast", "gpt_neox"),
        # For the model type "qwen2", transformers creates a Qwen2Tokenizer instead of this class.
        (digits_first, "PreTrainedTokenizerFast", "qwen2"),
        (byte_fallback, "LlamaTokenizerFast", "qwen2"),
        (byte_fallback, "LlamaTokenizer", "llama"),
        (unigram, "PreTrainedTokenizerFast", "qwen2"),
        (compatible_characters, "DebertaV2Tokenizer", "deberta-v2"),
        (compatible_characters, "XLMRobertaTokenizer", "xlm-roberta"),
        (compatible_characters, "T5Tokenizer", "t5"),
    ],
)
def test_the_rules_of_tokenizer_json_are_used(create, class_name, model_type, tmp_path):
    expected = create()
    save(expected, tmp_path, class_name, model_type)
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("a   1\n   2 dogs", " the quick", f"{SPECIAL}the", "the\u00a0quick ½ 你"):
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == expected.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_added_as_in_tokenizer_json(tmp_path):
    expected = Tokenizer.from_str(byte_level().to_str())
    expected.add_special_tokens(["<s>", "</s>"])
    start, end = (expected.token_to_id(token) for token in ("<s>", "</s>"))
    # The class would add two tokens </s> between the texts of a pair.
    expected.post_processor = processors.BertProcessing(("</s>", end), ("<s>", start))
    save(expected, tmp_path, "RobertaTokenizer", "roberta")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("the", "quick")["input_ids"] == expected.encode("the", "quick").ids


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_setting_for_lower_case_of_the_tokenizer_class_has_priority(lowercase, tmp_path):
    save(word_pieces(lowercase=True), tmp_path, "BertTokenizer", "bert", do_lower_case=lowercase)
    tokens = load_tokenizer(str(tmp_path)).tokenize("The quick")
    assert tokens == (["the", "quick"] if lowercase else ["The", "quick"])


def test_a_grammar_reads_the_bytes_of_tokens_by_the_rules_of_tokenizer_json(tmp_path):
    tokenizer = byte_fallback()
    save(tokenizer, tmp_path, "LlamaTokenizerFast", "qwen2")
    vocabulary = load_vocabulary(str(tmp_path), tokenizer.get_vocab_size())
    assert vocabulary.tokens[tokenizer.token_to_id("▁the")] == b" the"
    assert vocabulary.tokens[tokenizer.token_to_id("<0xC3>")] == b"\xc3"


def test_a_class_with_the_rules_of_tokenizer_json_is_used(tmp_path):
    save(byte_level(), tmp_path, "GPT2Tokenizer", "gpt2", add_prefix_space=True)
    tokenizer = load_tokenizer(str(tmp_path))
    assert type(tokenizer) is not TokenizersBackend
    assert tokenizer.encode("the quick") == tokenizer.encode(" the quick")


def test_a_class_creates_the_rules_for_add_prefix_space(tmp_path):
    save(byte_fallback(), tmp_path, "LlamaTokenizer", "llama", add_prefix_space=False)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.tokenize("the quick")[0] == "th"  # "▁the" with a space


def save_mistral(folder):
    """Write a tokenizer.json of Mistral, which divides words by a wrong pattern."""
    content = json.loads(byte_level().to_str())
    # transformers changes only large tokenizers: at least as many tokens as the ones of Mistral.
    content["model"]["vocab"] |= {f"<unused{number}>": number for number in range(400, 100_400)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    words = pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]+"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    save(tokenizer, folder, "LlamaTokenizerFast", "mistral")
    (folder / "tekken.json").write_text("{}")


def words_of(tokenizer, text):
    """Return the words into which a tokenizer divides a text."""
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_the_pattern_of_tekken_json_divides_texts_into_words(tmp_path):
    save_mistral(tmp_path)
    # The pattern of tekken.json splits a word before a capital letter that follows a small letter.
    assert words_of(load_tokenizer(str(tmp_path)), "aBc") == ["a", "Bc"]


def test_a_prompt_with_images_has_the_words_of_a_prompt_without_images(tmp_path, monkeypatch):
    save_mistral(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert words_of(tokenizer, "aBc") == ["aBc"]
    processor = SimpleNamespace(image_processor=object(), tokenizer=tokenizer)
    monkeypatch.setattr(load_processor, "_load", lambda *_: processor)
    loaded = load_processor.load_processor(tmp_path, AutoConfig.from_pretrained(tmp_path))
    assert words_of(loaded.tokenizer, "aBc") == ["a", "Bc"]
