"""Tests of when `nereid serve` starts a fork server, and of the fork server's process."""

import subprocess
import sys

import psutil
import pytest
from nereid_client.supervise import start_fork_server as fork_server
from nereid_client.supervise.start_fork_server import (
    ADDRESS_VARIABLE,
    choose_address,
    start_fork_server,
)


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "executor").mkdir()
    return tmp_path


def test_each_address_is_new(repository):
    assert choose_address(repository, {}) != choose_address(repository, {})


@pytest.mark.parametrize("environment", [{ADDRESS_VARIABLE: ""}, {"NEREID_ENGINE": "scripted"}])
def test_no_fork_server_if_there_is_another_one_or_torch_is_not_needed(repository, environment):
    assert choose_address(repository, environment) is None


def test_no_fork_server_for_other_models(tmp_path):
    assert choose_address(tmp_path, {}) is None


def test_no_fork_server_without_the_backend(repository, monkeypatch):
    monkeypatch.setattr(fork_server, "_PACKAGE", "a_package_that_is_not_installed")
    assert choose_address(repository, {}) is None


def test_fork_server_inherits_a_socket_and_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "_MODULES_TO_IMPORT", ())
    with (tmp_path / "log").open("w") as log:
        process = start_fork_server("nereid-test-address", {"PATH": ""}, log, print)
        assert process.exit_code is None
        assert psutil.Process(process.pid).exe() == psutil.Process().exe()
        process.stop(30, lambda timeout: False)
    assert process.exit_code == -15


def test_the_fork_server_imports_the_engine_and_its_libraries():
    program = (
        "import importlib, sys\n"
        f"for name in {fork_server._MODULES_TO_IMPORT!r}: importlib.import_module(name)\n"
        "needed = ['torch', 'transformers', 'nereid_backend.engine.engine']\n"
        "print([name for name in needed if name not in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
