"""Tests that both container images serve a request on a read-only root file system.

The images are built without a container engine. In the image for GPUs, Debian and the Triton server
of the PyTriton wheel replace NVIDIA's image, and the server uses the CPU.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from release.replay import Image

NEEDED = [program for program in ("debootstrap", "bwrap") if shutil.which(program) is None]

pytestmark = [
    pytest.mark.long,
    pytest.mark.triton,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a root file system"),
    pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}"),
]


@pytest.fixture
def folder():
    """A folder that the image's user can access. Only root can access pytest's own folders."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_the_image_serves_a_request_as_an_unprivileged_user_on_a_read_only_root(stage, folder):
    image = Image(stage, folder / "root")
    assert image.user != 0
    state, log = folder / "state", folder / "log"
    state.mkdir()
    with log.open("w") as output:
        server = subprocess.Popen(
            image.command([*image.entrypoint], state), stdout=output, start_new_session=True
        )
    try:
        while "\ncurl " not in log.read_text():  # `nereid serve` prints an example when it is ready
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
        health = subprocess.run(image.command(image.health_check, state), check=False, timeout=60)
        assert health.returncode == 0

        body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
        request = urllib.request.Request(
            "http://127.0.0.1:9000/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        # The Triton server must write its log to the standard output.
        assert "Started GRPCInferenceService" in log.read_text()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=120)
