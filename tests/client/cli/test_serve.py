"""Tests of `nereid serve` with a real Triton server and the echo model."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.live_frontend import wait_for
from fakes.live_server import ECHO_REPOSITORY, serve

pytestmark = pytest.mark.triton

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"


@pytest.fixture
def bash():
    """A function that runs a command and returns the ended process with its output."""

    def run(command, **environment):
        return subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | environment,
        )

    return run


def test_the_printed_command_and_every_example_work_until_a_signal_stops_all_processes(
    tmp_path, bash
):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        answer = json.loads(bash(running.curl).stdout)
        assert answer["model"] == "echo-model"
        assert answer["choices"][0]["message"]["content"] == "Hello! Who are you?"
        assert "nereid: echo model loaded for " + str(tmp_path / "echo-model") in running.lines

        ports = running.ports
        python = f"{sys.executable} {EXAMPLES}"
        openai_url = f"--base-url http://127.0.0.1:{ports['openai']}/v1"
        assert bash(f"{python}/chat_openai.py 'one two' {openai_url}").stdout == "one two\n"

        stream_grpc = f"{python}/stream_grpc.py --url 127.0.0.1:{ports['grpc']}"
        assert bash(f"{stream_grpc} 'one two'").stdout == "one two\n"
        assert bash(f"{stream_grpc} --chat 'one two'").stdout == "one two\n"
        failure = bash(f"{stream_grpc} '<fail INTERNAL it broke>'")
        assert failure.returncode == 1
        assert "it broke" in failure.stderr

        http_url = f"http://127.0.0.1:{ports['http']}"
        stream = bash(f"""{EXAMPLES}/generate_stream.sh 'say "hi"'""", HTTP_URL=http_url).stdout
        lines = [line for line in stream.splitlines() if line]
        texts = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
        assert "".join(texts) == 'say "hi"'

        # The Triton server, the stub, the child process of the stub, and the frontend.
        assert len(running.descendants) >= 4
        assert running.shared_memory()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert running.left() == []
        assert running.shared_memory() == []
        assert running.lines[-1] == "nereid: stopped"


def test_a_frontend_that_dies_is_reported_and_all_processes_end(tmp_path):
    with serve(tmp_path, "--max-restarts=0") as running:
        running.wait_until_ready()
        running.child("nereid_client").terminate()
        assert running.wait() == 1
        assert "the OpenAI frontend ended with exit code 0" in "\n".join(running.lines)
        assert running.left() == []


def test_killing_the_command_itself_ends_the_servers(tmp_path):
    with serve(tmp_path) as running:
        running.wait_until_ready()
        running.signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        wait_for(lambda: running.left() == [] == running.shared_memory())


def test_a_model_that_does_not_load_is_reported_with_its_error(tmp_path):
    repository = tmp_path / "repository"
    shutil.copytree(ECHO_REPOSITORY, repository)
    (repository / "llm" / "1" / "model.py").write_text("raise RuntimeError('no weights here')\n")
    with serve(tmp_path, f"--model-repository={repository}") as running:
        assert running.wait() == 1
        output = "\n".join(running.lines)
        assert "tritonserver ended with exit code 1" in output
        assert "RuntimeError: no weights here" in output


def test_a_server_program_of_another_kind_of_machine_is_a_wrong_setting(tmp_path):
    program = tmp_path / "tritonserver"
    program.write_bytes(b"no program\n")
    program.chmod(0o755)
    with serve(tmp_path, f"--tritonserver={program}") as running:
        assert running.wait() == 2
        output = "\n".join(running.lines)
        assert "nereid serve: tritonserver cannot be started: the operating" in output
        assert f"{program} (Exec format error)" in output
        assert "Traceback" not in output


def test_ctrl_c_while_the_model_loads_stops_cleanly(tmp_path):
    repository = tmp_path / "repository"
    shutil.copytree(ECHO_REPOSITORY, repository)
    model = repository / "llm" / "1" / "model.py"
    model.write_text("import time\ntime.sleep(3)\n" + model.read_text())
    with serve(tmp_path, f"--model-repository={repository}") as running:
        wait_for(lambda: any("starting tritonserver" in line for line in running.lines))
        running.signal(signal.SIGINT)
        running.signal(signal.SIGINT)  # with the second signal, the server stops at once
        assert running.wait() == 0
        assert running.lines[-1] == "nereid: stopped"
        assert running.shared_memory() == []
