"""Tests of `nereid doctor CHECKPOINT`, which describes a checkpoint and its problems."""

import json
import shutil
from pathlib import Path

import pytest
from backend.checkpoints.gguf_writer import write_gguf
from backend.tiny_models import BY_NAME
from nereid_backend.tools.describe_checkpoint import describe, main


def by_check(findings):
    return {finding["check"]: finding for finding in findings}


def test_a_checkpoint_is_described_without_loading_it(checkpoint):
    found = by_check(describe(str(checkpoint("qwen3"))))
    assert found["files"]["finding"] == "a Hugging Face checkpoint. Number of safetensors files: 1"
    assert (
        "Qwen3ForCausalLM (model type qwen3), up to 256 tokens" in found["architecture"]["finding"]
    )
    assert found["weights"]["finding"] == "115,104 weights as F32"
    assert found["memory with dtype=float32"]["finding"] == "449.6 KiB for the weights"
    assert {"memory with weight_dtype=int8", "memory with weight_dtype=int4"} < found.keys()
    assert found["tokenizer"]["finding"].startswith("none")
    assert all(finding["ok"] for finding in found.values())


def test_the_forward_path_is_found_by_loading(checkpoint, capsys):
    main([str(checkpoint("llama")), "--load"])
    found = by_check(json.loads(capsys.readouterr().out))
    assert found["forward path"]["finding"] == "packed. Data type: float32"


@pytest.mark.parametrize(("model", "task"), [("embed", "embed"), ("rerank", "rerank")])
def test_a_pooling_model_is_loaded_as_such(model, task):
    folder = Path(__file__).parents[3] / "demo" / model
    finding = by_check(describe(str(folder), loads=True))["forward path"]
    assert finding["ok"]
    assert finding["finding"].endswith(f"Task: {task}. Data type: float32")


def test_an_embedding_model_in_a_subfolder_is_described(tmp_path):
    demo = Path(__file__).parents[3] / "demo" / "embed"
    shutil.copytree(demo, tmp_path / "0_Transformer")
    modules = [
        {"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    found = describe(str(tmp_path))
    assert all(finding["ok"] for finding in found)
    modules.append({"idx": 1, "path": "1_CNN", "type": "sentence_transformers.models.CNN"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    finding = by_check(describe(str(tmp_path), loads=True))["files"]
    assert "the module CNN is not supported" in finding["finding"]


def test_the_error_of_an_embedding_model_that_cannot_be_loaded_is_its_own(tmp_path):
    demo = Path(__file__).parents[3] / "demo" / "embed"
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 9, "path": "9_CNN", "type": "sentence_transformers.models.CNN"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    finding = by_check(describe(str(tmp_path), loads=True))["forward path"]
    assert "the module CNN is not supported" in finding["finding"]


def test_a_gguf_file_is_described(tmp_path):
    file = write_gguf(BY_NAME["llama"].save(tmp_path / "llama"), "llama", "Q8_0")
    found = by_check(describe(str(file)))
    assert found["files"]["finding"].startswith("a GGUF file")
    assert "LlamaForCausalLM" in found["architecture"]["finding"]


def test_a_damaged_checkpoint_is_a_failed_check(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    [finding] = describe(str(tmp_path))
    assert "is a LoRA adapter. For a language model, set model to" in finding["finding"]
    (tmp_path / "config.json").write_text("{}")
    [finding] = describe(str(tmp_path))
    assert not finding["ok"]
    assert "has no .safetensors files" in finding["finding"]


def test_an_unsupported_quantisation_is_a_failed_check(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "quantised")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "other"}}))
    found = by_check(describe(str(folder)))
    assert not found["weights"]["ok"]
    assert "quantised with the method 'other'" in found["weights"]["finding"]
    assert not any(check.startswith("memory") for check in found)
    assert found["tokenizer"]["ok"]


def test_a_tokenizer_that_cannot_be_loaded_is_a_failed_check(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (folder / "chat_template.json").write_text('{"chat_template": "x"}')
    found = by_check(describe(str(folder)))
    assert not found["tokenizer"]["ok"]
    assert "has no tokenizer.json and no other file" in found["tokenizer"]["finding"]
    assert found["chat template"]["finding"] == "chat_template.json"
