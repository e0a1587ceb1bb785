"""Fixtures for the tests of templates and checkpoints."""

import json

import pytest


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes the files of a checkpoint and returns the folder.

    Its argument `config` is the content of tokenizer_config.json. Each keyword argument is the
    content of another file. In the name of a keyword argument, "_DOT_" replaces "." and "__"
    replaces "/". Example: `chat_template_DOT_jinja="text"` writes "text" to the file
    chat_template.jinja.
    """

    def write(config=None, **files):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write
