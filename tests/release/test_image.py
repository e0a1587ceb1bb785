"""The CPU image, built without a container engine, serves a request from a read-only root."""

import json
import os
import shutil
import signal
import subprocess
import urllib.request

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


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    return Image("cpu", folder / "root")


def test_the_image_serves_a_request_as_an_unprivileged_user_on_a_read_only_root(image, tmp_path):
    assert image.user != 0
    server = subprocess.Popen(
        image.command([*image.entrypoint], tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        assert any(line.startswith("curl ") for line in server.stdout)
        health = subprocess.run(
            image.command(image.health_check, tmp_path), check=False, timeout=60
        )
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
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
