"""Tests of the commands `nereid serve` and `tritonserver`, called as a user calls them."""

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from loadtest.server.served import ALONE, Served, free_ports

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.long  # short runs test a page of docs/ that also starts and stops `tritonserver`
def test_plain_tritonserver_serves_the_repository(tmp_path):
    http_port, grpc_port = free_ports(2)
    command = [
        *(str(BIN / "tritonserver"), "--model-repository", "model_repository"),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false"),
        *(f"--http-port={http_port}", f"--grpc-port={grpc_port}"),
    ]
    url = f"http://127.0.0.1:{http_port}/v2"

    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until_ready(server, url, tmp_path / "server.log")
            children = psutil.Process(server.pid).children(recursive=True)
            body = b'{"text_input": "Hello", "max_tokens": 4}'
            with urllib.request.urlopen(f"{url}/models/llm/generate", body, timeout=120) as reply:
                assert b'"text_output":"Hello' in reply.read()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(120)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def wait_until_ready(server, url, log):
    """Wait until a process of `tritonserver` is ready. If it ends before, fail with its log."""
    deadline = time.monotonic() + 480
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health/ready", timeout=10).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NEREID_MAX_NUM_SEQ", "3", "Did you mean NEREID_MAX_NUM_SEQS?"),
        (
            "NEREID_KV_CACHE_MEMORY",
            "2 bananas",
            "kv_cache_memory: the value must be a number of bytes",
        ),
        ("NEREID_MAX_MODEL_LEN", "99999999", "max_model_len"),
        ("NEREID_TOOL_PARSER", "hermess", "hermess"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exits_2(variable, value, message):
    served = Served(environment={variable: value}, arguments=ALONE)

    with pytest.raises(RuntimeError) as caught, served:
        pass

    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("nereid serve:")]
    assert message in line
    assert served.process.returncode == 2


def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path):
    shutil.copytree(ROOT / "demo" / "chat", tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    served = Served(tmp_path / "broken", arguments=ALONE)
    with pytest.raises(RuntimeError, match="broken"), served:
        pass


def test_a_second_server_on_a_taken_port_says_so_and_exits_2():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken_port = listener.getsockname()[1]
        serve = subprocess.run(
            [str(BIN / "nereid"), "serve", f"--http-port={taken_port}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert serve.returncode == 2
    (message,) = serve.stderr.strip().splitlines()
    assert str(taken_port) in message
