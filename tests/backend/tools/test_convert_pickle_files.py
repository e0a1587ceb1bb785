"""Tests of the program that converts pickle files to safetensors files."""

import pytest
import torch
from nereid_backend.tools.convert_pickle_files import main
from safetensors.torch import load_file


def test_each_pickle_file_with_weights_is_converted(tmp_path, capsys):
    shared = torch.arange(6.0).view(2, 3)
    weights = [{"a": shared, "b": shared}, {"c": shared.t()}]
    for number, tensors in enumerate(weights):
        torch.save(tensors, tmp_path / f"pytorch_model-{number}.bin")
    torch.save({"step": 1}, tmp_path / "training_args.bin")
    main([str(tmp_path)])
    files = [tmp_path / f"pytorch_model-{number}.safetensors" for number in (0, 1)]
    assert sorted(tmp_path.glob("*.safetensors")) == files
    assert capsys.readouterr().out == f"wrote {files[0]}\nwrote {files[1]}\n"
    for file, tensors in zip(files, weights, strict=True):
        found = load_file(file)
        assert found.keys() == tensors.keys()
        assert all(found[name].equal(weight) for name, weight in tensors.items())


@pytest.mark.parametrize("content", [b"", b"x", {"a": 5}, [torch.ones(2)], {1: "x"}])
def test_nothing_is_written_if_a_file_cannot_be_converted(content, tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    file = tmp_path / "pytorch_model-2.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(SystemExit, match=r"pytorch_model-2\.bin cannot be converted"):
        main([str(tmp_path)])
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_folder_without_pickle_files_is_named(tmp_path):
    with pytest.raises(SystemExit, match="has no pickle files"):
        main([str(tmp_path)])
