"""Tests that a tokenizer is refused if its vocabulary is missing or cannot be read."""

import base64
import json

import pytest
from backend.text.tokenizers_zoo import byte_level
from nereid_backend.errors import ModelError
from nereid_backend.serving.tokenizer.prompt_builder import load_tokenizer
from nereid_backend.text.load_decoder import load_decoder


@pytest.fixture
def folder(tmp_path):
    """A folder with the config of a model, but without a vocabulary."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    config = {"tokenizer_class": "Qwen2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("load", [load_tokenizer, load_decoder])
def test_a_tokenizer_without_a_vocabulary_is_refused_instead_of_having_no_tokens(load, folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json and no other file"):
        load(str(folder))


def test_vocab_and_merges_replace_tokenizer_json(folder):
    tokenizer = byte_level()
    tokenizer.model.save(str(folder))
    assert len(load_tokenizer(str(folder))) >= tokenizer.get_vocab_size()


def test_a_tokenizer_of_mistral_with_only_a_vocabulary_adds_a_bos_token(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (folder / "tokenizer_config.json").unlink()
    entries = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()}
        for byte in range(256)
    ]
    specials = ["<unk>", "<s>", "</s>", "[INST]"]
    content = {
        "config": {
            "pattern": r"\p{L}+|\s+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 260,
            "default_num_special_tokens": 4,
            "version": "v7",
        },
        "vocab": entries,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(specials)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("[INST]a") == [1, 3, 4 + ord("a")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_the_error_about_a_sentencepiece_file_contains_a_command_for_tokenizer_json(folder):
    (folder / "tokenizer.model").write_bytes(b"\n\x0enot a vocabulary")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json\. Download.* python -c"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("has_json", [False, True])
def test_python_code_of_a_tokenizer_is_not_run_even_if_the_terminal_answers_yes(
    has_json, folder, monkeypatch
):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ran = folder / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if has_json:
        byte_level().save(str(folder / "tokenizer.json"))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    remedy = "Remove auto_map" if has_json else "has no tokenizer"
    with pytest.raises(ModelError, match=f"Python file of the .* is not run.*{remedy}"):
        load_tokenizer(str(folder))
    assert not ran.exists()
