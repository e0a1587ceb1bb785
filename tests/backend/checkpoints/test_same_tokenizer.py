import json

import pytest
from nereid_backend import ModelError
from nereid_backend.checkpoints.same_tokenizer import check_same_tokenizer, hash_tokenizer_files

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
VOCABULARY = {"model": {"vocab": {"a": 0, "b": 1}}, "padding": {"length": 8}}


def write_files(folder, contents):
    """Write files into a new folder, and return the hashes of the tokenizer's files."""
    folder.mkdir()
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return hash_tokenizer_files(str(folder))


@pytest.mark.parametrize(
    "contents",
    [
        {},
        {"config.json": {"other": 1}},
        {"tokenizer.json": {"padding": None, "model": {"vocab": {"b": 1, "a": 0}}}},
        {"tokenizer.json": VOCABULARY, "tokenizer_config.json": {"name_or_path": "x", "eos": "b"}},
        {"chat_template.jinja": "{{ messages }}"},
    ],
)
def test_an_equal_tokenizer_is_accepted(contents, tmp_path):
    served = {
        "tokenizer.json": VOCABULARY,
        "tokenizer_config.json": {"eos": "b"},
        "chat_template.jinja": "{{ messages }}",
    }
    check_same_tokenizer(write_files(tmp_path / "a", served), write_files(tmp_path / "b", contents))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 1, "b": 0}}}}, r"tokenizer\.json .* differs"),
        ({"tokenizer_config.json": {"eos": "a"}}, r"tokenizer_config\.json .* differs"),
        ({"chat_template.jinja": "other"}, r"chat_template\.jinja .* differs"),
        ({TOOL_TEMPLATE: "other"}, r"additional_chat_templates/tool_use\.jinja .* differs"),
        ({"vocab.txt": "a"}, r"vocab\.txt, .* cannot be compared"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json .* differs"),
    ],
)
def test_another_tokenizer_is_refused(contents, message, tmp_path):
    served = {
        "tokenizer.json": VOCABULARY,
        "tokenizer_config.json": {"eos": "b"},
        "chat_template.jinja": "{{ messages }}",
        TOOL_TEMPLATE: "{{ tools }}",
    }
    with pytest.raises(ModelError, match=message):
        check_same_tokenizer(
            write_files(tmp_path / "a", served), write_files(tmp_path / "b", contents)
        )
