"""Tests that each command shown in a program of client/examples runs against a real server."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import run_python

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "client" / "examples").glob("*.*"))
# A line with a command, in a docstring or a comment. Three spaces separate the command from an
# explanation.
_USAGE = re.compile(
    r"^(?:#\s+)?\s*((?:\w+=\S+ )*(?:\.venv/bin/python )?client/examples/.*?)(?:\s{3}.*)?$",
    re.MULTILINE,
)


def usages():
    """Yield all commands that each example shows, and a call of the example without arguments."""
    for example in EXAMPLES:
        commands = [line.strip() for line in _USAGE.findall(example.read_text())]
        assert commands, f"{example.name} does not show how it is used"
        yield from commands
        python = ".venv/bin/python " if example.suffix == ".py" else ""
        yield python + example.relative_to(ROOT).as_posix()


def run(served, command):
    """Run the command of an example against the test's server, and return the ended process."""
    environment = os.environ | {
        "NEREID_GRPC_URL": served.grpc_url,
        "HTTP_URL": served.http_url,
        "OPENAI_BASE_URL": served.openai_url,
    }
    python, *arguments = shlex.split(command)
    if python == ".venv/bin/python":
        return run_python(arguments, environment, ROOT, timeout_s=300)
    command = command.replace("http://127.0.0.1:8000", served.http_url)
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("command", list(usages()))
def test_an_example_runs_as_its_text_says(served, command):
    process = run(served, command)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()


def test_structured_answers_match_the_schema_and_are_sorted(served):
    process = run(served, ".venv/bin/python client/examples/structured_openai.py --n 3")
    lines = process.stdout.splitlines()
    assert len(lines) == 3, process.stderr
    assert all(
        re.fullmatch(r"mean token probability \d+%: name=.+ age=\d+", line) for line in lines
    )
    probabilities = [int(re.search(r"(\d+)%", line)[1]) for line in lines]
    assert probabilities == sorted(probabilities, reverse=True)


def test_an_answer_that_is_cut_off_is_explained(served):
    process = run(served, ".venv/bin/python client/examples/structured_openai.py --max-tokens 2")
    assert process.returncode == 1
    assert "Raise --max-tokens" in process.stderr
    assert "Traceback" not in process.stderr


def test_the_tool_is_called_and_its_result_is_used(served):
    question = "What is the weather in Paris?"
    process = run(served, f'.venv/bin/python client/examples/tools_openai.py "{question}"')
    call, *answer = process.stdout.splitlines()
    assert call.startswith("get_weather({'city': 'Paris'}) -> ")
    assert "21" in " ".join(answer)


def test_an_example_without_its_packages_says_what_to_install(tmp_path):
    for package in ("openai", "tritonclient", "httpx"):
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('No module named {package}')")
    for example in (ROOT / "client" / "examples").glob("*.py"):
        process = subprocess.run(
            [sys.executable, str(example)],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert process.returncode == 1
        assert "pip install" in process.stderr
        assert "Traceback" not in process.stderr
