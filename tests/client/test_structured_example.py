"""Tests the example program client/examples/structured_openai.py with the echo model."""

import subprocess
import sys
from pathlib import Path

from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "structured_openai.py"


def test_the_structured_example_prints_each_answer_with_its_probability():
    prompt = '{"name":"Ada","age":36}'
    with live_frontend(FakeBackend()) as port:
        url = f"http://127.0.0.1:{port}/v1"
        command = [sys.executable, EXAMPLE, prompt, "--n=1", f"--base-url={url}"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "mean token probability 90%: name='Ada' age=36\n", run.stderr
