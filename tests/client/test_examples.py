"""Tests of the error messages of the programs in client/examples."""

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend

FOLDER = Path(__file__).parents[2] / "client" / "examples"
OPENAI_EXAMPLES = ("chat_openai", "rag", "structured_openai", "tools_openai")


def run_example(name, *arguments):
    """Run an example that must fail with a message of one line, and return the message."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.mark.parametrize("name", OPENAI_EXAMPLES)
def test_a_server_that_cannot_be_reached_is_an_error_of_one_line(name):
    assert "cannot be reached" in run_example(name, "--base-url", "http://127.0.0.1:1/v1")


@pytest.mark.parametrize("name", OPENAI_EXAMPLES)
def test_a_refused_request_is_an_error_of_one_line(name):
    with live_frontend(FakeBackend(), api_key="s3cret") as port:
        message = run_example(name, "--base-url", f"http://127.0.0.1:{port}/v1")
    assert message.startswith("The server refused the request: ")


def test_a_triton_server_that_cannot_be_reached_is_an_error_of_one_line():
    message = run_example("stream_grpc", "--url", "127.0.0.1:1")
    assert message.startswith(("The server cannot be reached", "The server returned an error"))


def test_passages_that_cannot_be_read_are_named(tmp_path):
    message = run_example("rag", "--passages", str(tmp_path))
    assert f"--passages: {tmp_path} cannot be read" in message
