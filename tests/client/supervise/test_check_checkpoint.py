"""Tests that `nereid serve` rejects a path that is no complete checkpoint."""

import errno
import json
from pathlib import Path

import pytest
from nereid_client.console import CliError
from nereid_client.supervise.check_checkpoint import check_checkpoint

from loadtest.faults import broken_checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(broken_checkpoints.join_file({}, b""))
    return folder


def test_a_complete_checkpoint_passes(checkpoint):
    check_checkpoint(checkpoint)


def test_the_message_about_a_missing_checkpoint_names_the_download_command(tmp_path):
    with pytest.raises(CliError, match=r"the folder .*/nowhere does not exist. .* `hf download"):
        check_checkpoint(tmp_path / "nowhere")


def test_a_weight_file_that_may_not_be_read_is_not_called_damaged(checkpoint, monkeypatch):
    file = checkpoint / "model.safetensors"

    open_path = Path.open

    def refuse(path, *args, **kwargs):
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CliError, match=rf"--model: {file} cannot be read \(Permission denied\)"):
        check_checkpoint(checkpoint)


def test_a_file_is_not_a_checkpoint(checkpoint):
    with pytest.raises(CliError, match="is not a folder"):
        check_checkpoint(checkpoint / "config.json")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", r"-m \S+convert_pickle_files ")],
)
def test_an_incomplete_folder_is_not_a_checkpoint(checkpoint, missing, message):
    (checkpoint / missing).unlink()
    with pytest.raises(CliError, match=message):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "snapshots/c1899de/config.json"])
def test_a_checkpoint_inside_the_folder_is_named(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    path = file if file.suffix == ".gguf" else file.parent
    with pytest.raises(CliError, match=rf"has no config\.json\. Give the checkpoint {path}\."):
        check_checkpoint(tmp_path)


def test_the_transformers_model_may_be_in_a_subfolder_that_modules_json_names(checkpoint, tmp_path):
    modules = [{"idx": 1, "path": "1_Pooling"}, {"idx": 0, "path": checkpoint.name}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    check_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CliError, match=r"checkpoint/model\.safetensors"):
        check_checkpoint(tmp_path)


def test_a_lora_adapter_is_called_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CliError, match=rf"LoRA adapter\. .* with --lora NAME={tmp_path}"):
        check_checkpoint(tmp_path)


DEMO = Path(__file__).resolve().parents[3] / "demo"
FOUND_AT_LOAD = ("tensor", "unknown", "hidden size", "tokenizer.json: an empty object")


@pytest.mark.parametrize("damage", list(broken_checkpoints.BREAKS))
def test_a_damaged_file_is_found_without_loading_it(tmp_path, damage):
    broken = broken_checkpoints.make(DEMO / "embed", tmp_path / "broken", damage)
    if any(word in damage for word in FOUND_AT_LOAD):
        check_checkpoint(broken)
    else:
        with pytest.raises(CliError, match="Download it again") as raised:
            check_checkpoint(broken)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("header", [b"[]", b"7", b'{"weight": []}', b'{"weight": {"a": 1}}', b"{"])
def test_a_header_of_the_wrong_structure_is_damage(checkpoint, header):
    length = len(header).to_bytes(8, "little")
    (checkpoint / "model.safetensors").write_bytes(length + header)
    with pytest.raises(CliError, match=r"header of the file .*model\.safetensors cannot be read"):
        check_checkpoint(checkpoint)


def test_git_lfs_pointers_and_missing_files_of_a_sharded_checkpoint_are_named(checkpoint):
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(
        CliError, match=r"model.safetensors is only a pointer of Git LFS. Run `git lfs pull`"
    ):
        check_checkpoint(checkpoint)

    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    empty_file = broken_checkpoints.join_file({}, b"")
    (checkpoint / "1.safetensors").write_bytes(empty_file)
    with pytest.raises(
        CliError, match=r"lacks 1 of 2 weight files. The first missing file is 2\.safetensors"
    ):
        check_checkpoint(checkpoint)

    (checkpoint / "2.safetensors").write_bytes(empty_file)
    check_checkpoint(checkpoint)

    index.write_text('{"weight_map": []}')
    with pytest.raises(CliError, match="is damaged"):
        check_checkpoint(checkpoint)
