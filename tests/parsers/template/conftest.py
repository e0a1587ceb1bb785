"""Fixtures for the tests of templates and checkpoints."""

import json

import pytest


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes the files of a checkpoint and returns its folder."""

    def write(config=None, **files):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write
