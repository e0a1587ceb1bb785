"""Tests of the command line of the parsers."""

import io
import json
import os
import subprocess
import sys

import pytest
from nereid_parsers.__main__ import main

TEXT = (
    '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
)


@pytest.fixture
def transcript(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_formats_are_listed(capsys):
    assert main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["reasoning", "qwen3"] for line in lines)
    assert any(line.split()[:2] == ["tools", "hermes"] for line in lines)


def test_formats_are_listed_as_a_table(capsys):
    assert main(["formats", "--table"]) == 0
    assert "| hermes (= qwen, qwen25, qwen3_json) | tools |" in capsys.readouterr().out


def test_a_transcript_is_shown_as_a_message(capsys, transcript):
    assert main(["parse", "--format", "qwen3+hermes", transcript]) == 0
    out = capsys.readouterr().out
    assert out.startswith(TEXT)
    assert "reasoning  'hm'" in out
    assert "content    'ok'" in out
    assert 'call       f {"a": 1}  (call_0)' in out


def test_a_transcript_is_shown_as_events(capsys, transcript):
    assert main(["parse", "--format", "qwen3+hermes", "--stream", "4", transcript]) == 0
    out = capsys.readouterr().out
    assert "reasoning  'hm'" in out
    assert "call 0     f" in out
    assert out.rstrip().endswith("> end")


def test_faults_and_colours_are_shown(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('<tool_call>no <tool_call>{"name": "f", "argume'))
    flags = ["--format", "hermes", "--stream", "100", "--colour", "always"]
    assert main(["parse", *flags, "-"]) == 0
    out = capsys.readouterr().out
    assert "no call follows the marker" in out
    assert "the text ended inside the call" in out
    assert "\x1b[32m" in out


def test_tools_prompt_and_policy_can_be_given(capsys, tmp_path, transcript):
    tools, prompt = tmp_path / "tools", tmp_path / "prompt"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    prompt.write_text("<think>\n")
    flags = ["--tools", str(tools), "--prompt", str(prompt), "--strict"]
    assert main(["parse", "--format", "qwen3+hermes", *flags, transcript]) == 0
    # Text precedes the call, so the strict policy treats the call as content.
    assert "call       f" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--format", "nope"], ["--format", "hermes", "--stream", "0"], ["--format", "qwen3+nope"]],
)
def test_an_invalid_argument_is_reported_in_one_line(capsys, transcript, arguments):
    assert main(["parse", *arguments, transcript]) == 2
    assert capsys.readouterr().err.startswith("nereid_parsers: ")


@pytest.mark.parametrize("text", ["{}", "[1]", "[" * 100_000])
def test_a_file_of_tools_with_another_value_is_reported_in_one_line(
    capsys, tmp_path, transcript, text
):
    tools = tmp_path / "tools"
    tools.write_text(text)
    assert main(["parse", "--format", "hermes", "--tools", str(tools), transcript]) == 2
    assert capsys.readouterr().err.startswith(f"nereid_parsers: The file {tools} ")


def test_a_missing_file_is_reported_in_one_line(capsys):
    assert main(["parse", "--format", "hermes", "/no/such/file"]) == 2
    assert "no/such/file" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_not_reported_as_a_plain_format(capsys, tmp_path):
    assert main(["template", str(tmp_path)]) == 2
    assert f"The folder {tmp_path} has no chat template and no config" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text("{{")
    assert main(["template", str(tmp_path)]) == 0
    assert "The chat template cannot be analysed" in capsys.readouterr().out


def test_a_template_is_analysed(capsys, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        encoding="utf-8",
    )
    assert main(["template", str(path)]) == 0
    assert "Content is written without markers" in capsys.readouterr().out


def run_program(arguments, **options):
    """Run the program in a new process. Pass `options` to `subprocess.run`."""
    command = [sys.executable, "-m", "nereid_parsers", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=60, **options)


def test_a_closed_pipe_ends_the_program_without_a_message():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run_program(["formats"], stdout=writer)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_output_to_a_full_disk_is_an_error_of_one_line(transcript):
    with open("/dev/full", "w") as full:
        result = run_program(["parse", "--format", "hermes", transcript], stdout=full)
    assert result.returncode == 2
    assert result.stderr == b"nereid_parsers: [Errno 28] No space left on device\n"


def test_a_file_that_is_not_utf_8_is_named(capsys, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a\xff")
    assert main(["parse", "--format", "hermes", str(path)]) == 2
    assert f"{path} is not a text in UTF-8" in capsys.readouterr().err


def test_the_standard_input_is_utf_8_in_every_locale():
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = {"env": os.environ | ascii_locale, "stdout": subprocess.PIPE}
    arguments = ["parse", "--format", "hermes", "-"]
    result = run_program(arguments, input="日".encode(), **options)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"\\u65e5\n\ncontent    '\\u65e5'\n"
    result = run_program(arguments, input=b"a\xff", **options)
    assert result.returncode == 2
    assert b"- is not a text in UTF-8" in result.stderr
