"""Tests that `nereid serve` rejects wrong settings before it starts a process.

The command prints one line and ends with exit code 2.
"""

import errno
import json
import socket
from pathlib import Path

import pytest
from fakes.live_frontend import free_port
from nereid_client.cli.main import main
from nereid_client.console import CliError
from nereid_client.supervise import startup_checks as checks

from loadtest.faults import broken_checkpoints
from loadtest.server.served import free_ports


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(broken_checkpoints.join_file({}, b""))
    return folder


def test_numpy_2_is_refused_for_the_embedded_server():
    with pytest.raises(CliError, match=r"but numpy 2.4.6 is installed. Run: pip install 'numpy<2'"):
        checks.check_embedded_numpy("2.4.6")
    checks.check_embedded_numpy("1.26.4")


def test_a_complete_checkpoint_passes(checkpoint):
    checks.check_checkpoint(checkpoint)


def test_the_message_about_a_missing_checkpoint_names_the_download_command(tmp_path):
    with pytest.raises(CliError, match=r"the folder .*/nowhere does not exist. .* `hf download"):
        checks.check_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("flag", ["--model", "--model-repository", "--tritonserver"])
def test_a_path_that_cannot_be_read_is_named(capsys, flag):
    # This test also runs as root, who may read every file. The path is therefore too long, which
    # the system refuses in the same way as a path that a user may not read.
    path = "/" + "a" * 300
    assert main(["serve", flag, path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nereid serve: {flag}: {path}")
    assert "cannot be read (File name too long). Allow the user that runs nereid" in error


def test_a_weight_file_that_may_not_be_read_is_not_called_damaged(checkpoint, monkeypatch):
    file = checkpoint / "model.safetensors"

    open_path = Path.open

    def refuse(path, *args, **kwargs):
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CliError, match=rf"--model: {file} cannot be read \(Permission denied\)"):
        checks.check_checkpoint(checkpoint)


def test_a_file_is_not_a_checkpoint(checkpoint):
    with pytest.raises(CliError, match="is not a folder"):
        checks.check_checkpoint(checkpoint / "config.json")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", r"-m \S+convert_pickle_files ")],
)
def test_an_incomplete_folder_is_not_a_checkpoint(checkpoint, missing, message):
    (checkpoint / missing).unlink()
    with pytest.raises(CliError, match=message):
        checks.check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "snapshots/c1899de/config.json"])
def test_a_checkpoint_inside_the_folder_is_named(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    path = file if file.suffix == ".gguf" else file.parent
    with pytest.raises(CliError, match=rf"has no config\.json\. Give the checkpoint {path}\."):
        checks.check_checkpoint(tmp_path)


def test_the_transformers_model_may_be_in_a_subfolder_that_modules_json_names(checkpoint, tmp_path):
    modules = [{"idx": 1, "path": "1_Pooling"}, {"idx": 0, "path": checkpoint.name}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    checks.check_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CliError, match=r"checkpoint/model\.safetensors"):
        checks.check_checkpoint(tmp_path)


def test_a_lora_adapter_is_called_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CliError, match=rf"LoRA adapter\. .* with --lora NAME={tmp_path}"):
        checks.check_checkpoint(tmp_path)


DEMO = Path(__file__).resolve().parents[3] / "demo"
FOUND_AT_LOAD = ("tensor", "unknown", "hidden size", "tokenizer.json: an empty object")


@pytest.mark.parametrize("damage", list(broken_checkpoints.BREAKS))
def test_a_damaged_file_is_found_without_loading_it(tmp_path, damage):
    broken = broken_checkpoints.make(DEMO / "embed", tmp_path / "broken", damage)
    if any(word in damage for word in FOUND_AT_LOAD):
        checks.check_checkpoint(broken)
    else:
        with pytest.raises(CliError, match="Download it again") as raised:
            checks.check_checkpoint(broken)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("header", [b"[]", b"7", b'{"weight": []}', b'{"weight": {"a": 1}}', b"{"])
def test_a_header_of_the_wrong_structure_is_damage(checkpoint, header):
    length = len(header).to_bytes(8, "little")
    (checkpoint / "model.safetensors").write_bytes(length + header)
    with pytest.raises(CliError, match=r"header of the file .*model\.safetensors cannot be read"):
        checks.check_checkpoint(checkpoint)


def test_git_lfs_pointers_and_missing_files_of_a_sharded_checkpoint_are_named(checkpoint):
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(
        CliError, match=r"model.safetensors is only a pointer of Git LFS. Run `git lfs pull`"
    ):
        checks.check_checkpoint(checkpoint)

    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    empty_file = broken_checkpoints.join_file({}, b"")
    (checkpoint / "1.safetensors").write_bytes(empty_file)
    with pytest.raises(
        CliError, match=r"lacks 1 of 2 weight files. The first missing file is 2\.safetensors"
    ):
        checks.check_checkpoint(checkpoint)

    (checkpoint / "2.safetensors").write_bytes(empty_file)
    checks.check_checkpoint(checkpoint)

    index.write_text('{"weight_map": []}')
    with pytest.raises(CliError, match="is damaged"):
        checks.check_checkpoint(checkpoint)


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
        ([], {"NEREID_MAX_BODY_BYTE": "8"}, "NEREID_MAX_BODY_BYTE: this setting does not exist."),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    tmp_path, checkpoint, capsys, monkeypatch, arguments, variables, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    servers = ("http", "grpc", "metrics", "openai")
    ports = [f"--{name}-port={port}" for name, port in zip(servers, free_ports(4), strict=True)]
    triton_server, start_flag = tmp_path / "tritonserver", tmp_path / "started"
    triton_server.write_text(f"#!/bin/bash\ntouch {start_flag}\nexit 1\n")
    triton_server.chmod(0o755)
    paths = [f"--model={checkpoint}", f"--model-repository={REPOSITORY}"]

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
