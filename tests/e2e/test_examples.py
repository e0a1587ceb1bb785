"""The examples in client/examples run as they are, one for each door."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"


def run(served, *command):
    environment = os.environ | {
        "NEREID_GRPC_URL": served.grpc_url,
        "HTTP_URL": served.http_url,
        "OPENAI_BASE_URL": served.openai_url,
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_example_prints_an_answer(served):
    assert run(served, sys.executable, str(EXAMPLES / "chat_openai.py")).strip()


def test_the_grpc_example_prints_an_answer(served):
    assert run(served, sys.executable, str(EXAMPLES / "stream_grpc.py"), "--chat", "Hello!").strip()


def test_the_curl_example_prints_events(served):
    assert "data: " in run(served, "bash", str(EXAMPLES / "generate_stream.sh"))
