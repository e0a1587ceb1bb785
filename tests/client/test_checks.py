"""What `nereid serve` refuses before it starts anything: one line, exit code 2."""

import socket

import pytest
from fakes.live_frontend import free_port
from nereid_client.cli import checks
from nereid_client.cli.console import CliError
from nereid_client.cli.main import main


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_numpy_2_is_refused_before_the_embedded_server():
    with pytest.raises(CliError, match=r"numpy 2.4.6 does not work .* pip install 'numpy<2'"):
        checks.check_embedded_numpy("2.4.6")
    checks.check_embedded_numpy("1.26.4")


def test_a_good_checkpoint_passes(checkpoint):
    checks.check_checkpoint(checkpoint)


def test_a_missing_checkpoint_says_how_to_get_one(tmp_path):
    with pytest.raises(CliError, match=r"there is no .*/nowhere; .*\(hf download"):
        checks.check_checkpoint(tmp_path / "nowhere")


def test_a_file_is_no_checkpoint(checkpoint):
    with pytest.raises(CliError, match="is not a folder"):
        checks.check_checkpoint(checkpoint / "config.json")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", "save_pretrained")],
)
def test_a_folder_with_a_part_missing_is_no_checkpoint(checkpoint, missing, message):
    (checkpoint / missing).unlink()
    with pytest.raises(CliError, match=message):
        checks.check_checkpoint(checkpoint)


def test_a_taken_port_names_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=rf"port {port} on 127.0.0.1 .* give another with --x"):
            checks.check_ports("127.0.0.1", {"--x": port})


def test_a_port_taken_on_every_address_is_taken_here_too():
    with (
        socket.create_server(("", 0)) as taken,
        pytest.raises(CliError, match="can't be used"),
    ):
        checks.check_ports("127.0.0.1", {"--x": taken.getsockname()[1]})


def test_free_ports_pass():
    checks.check_ports("127.0.0.1", {"--x": free_port()})


def test_one_port_for_two_doors_is_refused():
    port = free_port()
    with pytest.raises(CliError, match=f"--y and --x are both {port}"):
        checks.check_ports("127.0.0.1", {"--x": port, "--y": port})


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(CliError, match=f"from 1 to 65535, got {port}"):
        checks.check_ports("127.0.0.1", {"--x": port})


@pytest.mark.parametrize("version", [(3, 10), (3, 13)])
def test_another_python_version_is_refused(version):
    with pytest.raises(CliError, match=r"needs 3\.11 or 3\.12"):
        checks.check_python_version(version)


def test_a_folder_without_the_ensemble_is_no_model_repository(tmp_path):
    with pytest.raises(CliError, match=r"has no llm/config\.pbtxt"):
        checks.check_model_repository(tmp_path)


def test_the_command_prints_one_line_and_ends_with_2(tmp_path, capsys):
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.pbtxt").touch()
    nowhere = tmp_path / "nowhere"
    arguments = ["--model", str(nowhere), "--model-repository", str(tmp_path)]
    assert main(["serve", *arguments, "--tritonserver", "/bin/true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nereid serve: --model: there is no {nowhere}")
    assert error.count("\n") == 1
