"""Tests that models and settings that tensor parallelism does not support are refused."""

import json
from dataclasses import replace

import pytest
import torch
from backend.tiny_models import BY_NAME
from nereid_backend import Engine, EngineConfig
from nereid_backend.errors import ConfigError, UnsupportedModelError
from nereid_backend.parallel.check_support import check_checkpoint, check_settings


def config(folder="/checkpoint", **settings):
    return EngineConfig(str(folder), **{"tensor_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_dtype", "int8"),
        ("compile_forward", True),
        ("measure_attention", True),
        ("async_scheduling", True),
        ("lora_adapters", {"style": "/adapter"}),
    ],
)
def test_a_setting_that_needs_whole_layers_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: .* tensor_parallel_size=2"):
        check_settings(config(**{name: value}), torch.device("cpu"))


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(ConfigError, match="the value is 4, but torch finds 0 GPUs"):
        check_settings(config(tensor_parallel_size=4), torch.device("cuda:0"))


def test_a_single_selected_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"^device: .*CUDA_VISIBLE_DEVICES"):
        check_settings(config(device="cuda:1"), torch.device("cuda:1"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_architecture_without_a_plan_is_refused_by_the_engine(checkpoint):
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel .* has no plan"):
        Engine(config(checkpoint("gpt2")))


def test_query_heads_that_cannot_be_divided_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="num_attention_heads, which is 4, but it is 3"):
        check_checkpoint(config(checkpoint("llama"), tensor_parallel_size=3))


def test_kv_heads_that_are_neither_divided_nor_shared_equally_are_refused(tmp_path):
    extra = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
    folder = replace(BY_NAME["llama"], extra=extra).save(tmp_path)
    with pytest.raises(ConfigError, match="number of KV heads, which is 4, but it is 6"):
        check_checkpoint(config(folder, tensor_parallel_size=6))
    check_checkpoint(config(folder, tensor_parallel_size=12))


def test_a_plan_that_fits_is_accepted(checkpoint):
    check_checkpoint(config(checkpoint("llama")))


def test_quantised_weights_are_refused(checkpoint, tmp_path):
    for file in checkpoint("llama").iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    settings["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="quantised weights cannot be combined"):
        check_checkpoint(config(tmp_path))
