"""Tests that `nereid serve` rejects wrong settings before it starts a process.

The command prints one line and ends with exit code 2.
"""

import socket
from pathlib import Path

import pytest
from fakes.live_frontend import free_port
from fakes.live_server import make_checkpoint
from nereid_client.cli.main import main
from nereid_client.console import CliError
from nereid_client.supervise import startup_checks as checks

from loadtest.server.served import free_ports


def test_numpy_2_is_refused_for_the_embedded_server():
    with pytest.raises(CliError, match=r"but numpy 2.4.6 is installed. Run: pip install 'numpy<2'"):
        checks.check_embedded_numpy("2.4.6")
    checks.check_embedded_numpy("1.26.4")


@pytest.mark.parametrize("flag", ["--model", "--model-repository", "--tritonserver"])
def test_a_path_that_cannot_be_read_is_named(capsys, flag):
    # This test also runs as root, who may read every file. The path is therefore too long, which
    # the system refuses in the same way as a path that a user may not read.
    path = "/" + "a" * 300
    assert main(["serve", flag, path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nereid serve: {flag}: {path}")
    assert "cannot be read (File name too long). Allow the user that runs nereid" in error


def test_the_message_about_a_port_in_use_names_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            CliError, match=rf"port {port} on 127.0.0.1 .* give another port with --x"
        ):
            checks.check_ports({"--x": ("127.0.0.1", port)})


def test_a_port_that_is_in_use_on_all_addresses_is_refused():
    with (
        socket.create_server(("", 0)) as taken,
        pytest.raises(CliError, match="cannot be used"),
    ):
        checks.check_ports({"--x": ("127.0.0.1", taken.getsockname()[1])})


def test_free_ports_pass():
    checks.check_ports({"--x": ("127.0.0.1", free_port())})


def test_one_port_for_two_servers_is_refused():
    port = free_port()
    with pytest.raises(CliError, match=f"--x and --y are both {port}"):
        checks.check_ports({"--x": ("127.0.0.1", port), "--y": ("0.0.0.0", port)})


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(CliError, match=f"from 1 to 65535, but it is {port}"):
        checks.check_ports({"--x": ("127.0.0.1", port)})


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_an_unsupported_python_version_is_refused(version):
    with pytest.raises(CliError, match=r"requires Python 3\.11, 3\.12 or 3\.13"):
        checks.check_python_version(version)


@pytest.mark.parametrize(("limits", "raised"), [((64, 4096), 1024), ((64, 512), 512)])
def test_a_low_limit_on_open_files_is_raised(monkeypatch, limits, raised):
    changed = []
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(checks.resource, "setrlimit", lambda _, pair: changed.append(pair))
    checks.check_open_files()
    assert changed == [(raised, limits[1])]


def test_a_limit_on_open_files_that_is_too_low_is_refused(monkeypatch):
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(CliError, match=r"at most 64 open files .* up to 256, .*ulimit -n 4096"):
        checks.check_open_files()


def test_a_folder_without_the_ensemble_is_not_a_model_repository(tmp_path):
    with pytest.raises(CliError, match=r"has no llm/config\.pbtxt"):
        checks.check_model_repository(tmp_path)


def test_the_command_prints_one_line_and_ends_with_2(tmp_path, capsys):
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.pbtxt").touch()
    nowhere = tmp_path / "nowhere"
    arguments = ["--model", str(nowhere), "--model-repository", str(tmp_path)]
    assert main(["serve", *arguments, "--tritonserver", "/bin/true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nereid serve: --model: the folder {nowhere} does not exist.")
    assert error.count("\n") == 1


REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--max-model-len=foo"], {}, "max_model_len: the value must be an integer, but it is"),
        (["--log-level=loud"], {}, "NEREID_LOG_LEVEL: the value must be 'debug', 'info', "),
        ([], {"NEREID_BATCH_FOLDER": "/dev/null/a"}, "NEREID_BATCH_FOLDER: files cannot be stored"),
        ([], {"NEREID_MAX_BODY_BYTE": "8"}, "NEREID_MAX_BODY_BYTE: this setting does not exist."),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    tmp_path, capsys, monkeypatch, arguments, variables, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    servers = ("http", "grpc", "metrics", "openai")
    ports = [f"--{name}-port={port}" for name, port in zip(servers, free_ports(4), strict=True)]
    triton_server, start_flag = tmp_path / "tritonserver", tmp_path / "started"
    triton_server.write_text(f"#!/bin/bash\ntouch {start_flag}\nexit 1\n")
    triton_server.chmod(0o755)
    paths = [f"--model={make_checkpoint(tmp_path)}", f"--model-repository={REPOSITORY}"]

    status = main(["serve", *paths, f"--tritonserver={triton_server}", *ports, *arguments])

    assert status == 2
    assert not start_flag.exists()
    error = capsys.readouterr().err
    assert error.startswith(f"nereid serve: {message}")
    assert error.count("\n") == 1


def test_several_models_need_one_frontend_process():
    environment = {"NEREID_FRONTEND_WORKERS": "2", "NEREID_MODELS_FILE": "models.toml"}
    with pytest.raises(CliError, match=r"frontend_workers is 2, but it must be 1 .* --config"):
        checks.check_frontend_settings(environment)


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid", "a..b", "a" * 64])
def test_an_address_of_another_machine_is_refused_with_a_remedy(host):
    with pytest.raises(CliError, match=r"is not an address of this machine .* 0\.0\.0\.0"):
        checks.check_ports({"--http-port": (host, 39999)})
