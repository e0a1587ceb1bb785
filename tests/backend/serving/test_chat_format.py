"""Tests that the chat format of a checkpoint is derived once and then read from a cache folder."""

import shutil
import subprocess
import sys

import pytest
from backend.serving.fake_server import DEMO
from nereid_backend import ConfigError
from nereid_backend.serving import chat_format
from nereid_backend.serving.chat_format import choose_format
from nereid_backend.serving.serving_settings import ServingSettings


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(DEMO / "chat" / name, folder)
    return folder


@pytest.fixture
def analyses(monkeypatch):
    """A list that collects the arguments of each analysis of a chat template."""
    recorded_args, analyse = [], chat_format._derive_without_cache

    def record_and_analyse(*args):
        recorded_args.append(args)
        return analyse(*args)

    monkeypatch.setattr(chat_format, "_derive_without_cache", record_and_analyse)
    return recorded_args


def choose(model, **settings):
    """Return the chat format of a checkpoint, and the logged lines."""
    lines = []
    fmt = choose_format(ServingSettings(model=str(model), **settings), lines.append)
    return fmt, lines


def test_a_template_is_analysed_once(model, analyses):
    fmt, logged_lines = choose(model)
    assert fmt.layout.reasoning.open.strip() == "<think>"
    assert logged_lines == ["chat format: The format was inferred from the chat template."]
    assert choose(model) == (fmt, logged_lines)
    assert len(analyses) == 1


def test_a_damaged_cache_file_is_replaced(model, analyses, tmp_path):
    first = choose(model)
    (cached,) = (tmp_path / "cache").rglob("chat-formats/*")
    cached.write_bytes(b"damaged")
    assert choose(model) == first
    assert choose(model) == first
    assert len(analyses) == 2


@pytest.mark.parametrize("wrong", [b"nereid_parsexs", b"nereid_parser\xff"])
def test_a_cache_file_with_wrong_bytes_is_replaced(model, analyses, wrong):
    first = choose(model)
    (cached,) = (model.parent / "cache").rglob("chat-formats/*")
    cached.write_bytes(cached.read_bytes().replace(b"nereid_parsers", wrong))
    assert choose(model) == first
    assert len(analyses) == 2


def test_another_template_or_other_settings_are_analysed_again(model, analyses):
    choose(model)
    choose(model, reasoning_parser="qwen3", tool_parser="hermes")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<think>", "<thought>"))
    assert choose(model)[0].layout.reasoning.open.strip() == "<thought>"
    assert len(analyses) == 3


@pytest.mark.parametrize("content", [b"", b"\x80\x05broken"])
def test_a_damaged_file_in_the_cache_is_ignored(model, analyses, content):
    fmt, _ = choose(model)
    (path,) = (model.parent / "cache").rglob("chat-formats/*")
    path.write_bytes(content)
    assert choose(model)[0] == fmt
    assert len(analyses) == 2


def test_without_a_cache_folder_a_template_is_analysed_each_time(model, analyses):
    (model.parent / "cache").write_text("a file in place of the folder")
    assert choose(model) == choose(model)
    assert len(analyses) == 2


def test_a_process_that_finds_the_format_in_the_cache_does_not_import_the_analysis(model):
    choose(model)  # This process writes the format to the cache folder.
    code = (
        "import sys; import backend.serving.fake_server\n"
        "from nereid_backend.serving.chat_format import choose_format\n"
        "from nereid_backend.serving.serving_settings import ServingSettings\n"
        f"choose_format(ServingSettings(model={str(model)!r}))\n"
        "assert 'nereid_parsers.template' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO.parent / "tests")


def test_both_parsers_can_be_turned_off(model, analyses):
    off = "chat format: none, because reasoning_parser or tool_parser is none"
    assert choose(model, tool_parser="none") == (None, [off])
    assert choose(model, tool_parser="none", reasoning_parser="qwen3")[0].layout.tools is None
    assert not analyses


def test_an_unknown_format_is_refused(model):
    with pytest.raises(ConfigError, match=r"^reasoning_parser, tool_parser: .*'unknown'"):
        choose(model, reasoning_parser="unknown")
