"""Tests of `nereid convert`, which rounds the weights of a checkpoint to integers."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from backend.checkpoints.gguf_writer import write_gguf
from backend.exactness import open_engine, reference, run_alone
from backend.tiny_models import BY_NAME
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.tools import convert_checkpoint
from nereid_backend.tools.convert_checkpoint import convert, main
from safetensors import SafetensorError
from safetensors.torch import load_file

EMBEDDING_MODEL = Path(__file__).parents[3] / "demo" / "embed"


def modules_of(engine):
    return engine._parts.runner._path._model.modules()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "int4"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("qwen3", "int8"), ("qwen3_moe", "int4"), ("qwen3_moe", "int8")]
        ),
    ],
)
def test_integers_load_into_panels_and_back_into_the_same_numbers(
    family, dtype, checkpoint, tmp_path
):
    convert(str(checkpoint(family)), str(tmp_path / "integers"), dtype)
    convert(str(tmp_path / "integers"), str(tmp_path / "back"), "float32")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    exact = open_engine(tmp_path / "integers", prepack=False)
    assert run_alone(exact) == reference(tmp_path / "back")
    exact.close()
    engine = open_engine(tmp_path / "integers")
    assert any(isinstance(module, GroupedLinear) for module in modules_of(engine))
    engine.close()


def test_the_integers_are_those_of_the_setting_weight_dtype(checkpoint, tmp_path):
    convert(str(checkpoint("llama")), str(tmp_path / "integers"), "int4")
    engines = [
        open_engine(tmp_path / "integers"),
        open_engine(checkpoint("llama"), weight_dtype="int4"),
    ]
    layers = [
        [module for module in modules_of(engine) if isinstance(module, GroupedLinear)]
        for engine in engines
    ]
    assert len(layers[0]) > 10
    for converted, rounded in zip(*layers, strict=False):
        assert torch.equal(converted.values, rounded.values)
        assert torch.equal(converted.scales, rounded.scales)
        assert torch.equal(converted.zeros, rounded.zeros)
    for engine in engines:
        engine.close()


def test_a_gguf_file_is_converted_to_floats(tmp_path):
    file = write_gguf(BY_NAME["llama"].save(tmp_path / "llama"), "llama", "Q8_0")
    convert(str(file), str(tmp_path / "floats"), "bfloat16")
    [weights] = (tmp_path / "floats").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    open_engine(tmp_path / "floats").close()


def test_an_embedding_model_keeps_its_modules(tmp_path, capsys):
    assert main([str(EMBEDDING_MODEL), str(tmp_path / "new"), "bfloat16"]) == 0
    assert capsys.readouterr().err.startswith("nereid convert: wrote 0.00 GiB of weights")
    pooling = "1_Pooling/config.json"
    assert (tmp_path / "new" / pooling).read_text() == (EMBEDDING_MODEL / pooling).read_text()


def test_a_checkpoint_without_weights_that_become_integers_is_refused(tmp_path, capsys):
    assert main([str(EMBEDDING_MODEL), str(tmp_path / "new"), "int8"]) == 2
    error = capsys.readouterr().err
    assert f"No weight of {EMBEDDING_MODEL} can become int8" in error
    assert "Convert the checkpoint to bfloat16 or float32" in error
    assert not (tmp_path / "new").exists()


def test_a_target_that_is_a_file_is_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([str(checkpoint("llama")), str(tmp_path / "file"), "int4"]) == 2
    assert "/file is not a folder. Choose an empty or a new folder." in capsys.readouterr().err


def test_a_full_disk_is_an_error_of_one_line(checkpoint, tmp_path, capsys, monkeypatch):
    full = SafetensorError("I/O error: No space left on device")
    monkeypatch.setattr(convert_checkpoint, "save_file", Mock(side_effect=full))
    assert main([str(checkpoint("llama")), str(tmp_path / "new"), "int8"]) == 2
    error = capsys.readouterr().err
    assert "/new cannot be written (I/O error: No space left on device). Delete the fold" in error
    assert error.count("\n") == 1


def test_a_folder_with_files_is_not_overwritten(checkpoint, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([str(checkpoint("llama")), str(tmp_path), "int4"]) == 2
    assert f"nereid convert: {tmp_path} is not empty" in capsys.readouterr().err
