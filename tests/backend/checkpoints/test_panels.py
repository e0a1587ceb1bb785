"""Tests that the weights of quantised checkpoints are copied into panels as integers.

A panel is the layout of integer weights that the CPU kernels use.
"""

import json

import pytest
import torch
from backend.checkpoints import writers
from backend.checkpoints.load_on_cpu import load
from backend.exactness import PARAMS, open_engine
from backend.tiny_models import BY_NAME
from nereid_backend.errors import ConfigError, ModelError
from nereid_backend.linear.grouped_linear import GroupedLinear
from safetensors.torch import load_file, save_file

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
WRITERS = {
    "awq": writers.awq,
    "gptq": lambda: writers.gptq(4),
    "gptq, 3 bits": lambda: writers.gptq(3, is_v2=True),
    "gptq, 8 bits": lambda: writers.gptq(8),
    "compressed-tensors": lambda: writers.compressed_tensors("pack-quantized", **INT4),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_panels_contain_the_weights_of_the_checkpoint(writer, tmp_path):
    _, quantised = writers.write_pair("llama", tmp_path, *WRITERS[writer]())
    expected = load(quantised, use_panels=False).state_dict()

    model = load(quantised, use_panels=True)

    layers = {
        name: module for name, module in model.named_modules() if type(module) is GroupedLinear
    }
    # There are 7 linear layers in each of 2 decoder layers, and lm_head is not quantised.
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = expected[f"{name}.weight"]
        # The panels store scales and zero points as float16.
        difference = (layer.dequantised() - weight).abs().max()
        assert difference <= 2e-3 * weight.abs().max(), name
    for name, weight in model.state_dict().items():
        if name in expected and "_proj" not in name:
            assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("num_rows", [80, 96])  # The layer has 96 rows, and there are 80 scales.
def test_an_integer_weight_whose_shapes_do_not_match_is_named_with_its_file(num_rows, tmp_path):
    folder = BY_NAME["llama"].save(tmp_path / "llama")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(file)
    tensors[f"{name}.weight"] = torch.ones(num_rows, 64, dtype=torch.int8)
    tensors[f"{name}.SCB"] = torch.ones(80)  # the scales of bitsandbytes
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=rf"{name}\.weight in {file}.* shape"):
        load(folder, use_panels=True)


def test_weight_dtype_is_refused_if_all_linear_layers_already_store_integers(tmp_path):
    settings, encode = writers.awq()
    _, quantised = writers.write_pair(
        "llama",
        tmp_path,
        settings,
        encode,
        is_quantised=lambda name: "_proj" in name or "lm" in name,
    )
    with pytest.raises(ConfigError, match="weight_dtype: the value int4 has no effect, because"):
        open_engine(quantised, weight_dtype="int4")


def test_an_activation_order_is_dequantised(tmp_path):
    _, quantised = writers.write_pair("llama", tmp_path, *writers.gptq(4, desc_act=True))
    expected = load(quantised, use_panels=False).state_dict()
    weights = load(quantised, use_panels=True).state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_merged_experts_are_dequantised(tmp_path):
    _, quantised = writers.write_pair("qwen3_moe", tmp_path, *writers.awq())
    expected = load(quantised, use_panels=False).state_dict()
    model = load(quantised, use_panels=True)
    assert any(type(module) is GroupedLinear for module in model.modules())
    for name, weight in model.state_dict().items():
        if "experts" in name:
            assert torch.equal(weight, expected[name]), name


def test_an_engine_without_panels_generates_the_tokens_of_the_dequantised_model(tmp_path):
    plain, quantised = writers.write_pair("llama", tmp_path, *writers.gptq(8))

    def answers(folder):
        engine = open_engine(folder, prepack=False)
        outputs = engine.generate([[5, 6, 7], [9, 8, 7, 6, 5]], PARAMS)
        engine.close()
        return [output.outputs[0].token_ids for output in outputs]

    assert answers(quantised) == answers(plain)


def test_the_logits_of_panels_are_near_those_of_the_dequantised_model(tmp_path):
    _, quantised = writers.write_pair("llama", tmp_path, *writers.gptq(8))
    ids = torch.tensor([[9, 8, 7, 6, 5]])
    with torch.inference_mode():
        expected = load(quantised, use_panels=False)(ids).logits
        logits = load(quantised, use_panels=True)(ids).logits
    # The kernels round the inputs of each layer to 8 bits.
    assert (logits - expected).square().mean().sqrt() < 0.03 * expected.std()
