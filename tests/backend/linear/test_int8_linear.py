"""Linear layers with weights of 8 bits: close to the originals, alike for few and many rows."""

import pytest
import torch
from backend.exactness import open_engine, run_staggered
from backend.tiny_models import BY_NAME
from nereid_backend import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.linear.int8_linear import Int8Linear, quantise_linears
from nereid_backend.model import load_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (37, 21, False)])
def test_a_layer_is_near_the_original_for_few_and_many_rows(dtype, inputs, outputs, bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    rows = torch.randn(2, 60, inputs)
    with torch.inference_mode():
        expected = layer(rows)
        layer = layer.to(dtype)
        assert quantise_linears(torch.nn.Sequential(layer)) == 1
        assert type(layer) is Int8Linear
        many = layer(rows.to(dtype))
        few = torch.cat([layer(part) for part in rows.to(dtype).split(7, dim=1)], dim=1)
    for found in (many, few):
        assert found.shape == expected.shape
        assert found.dtype == dtype
        assert (found.float() - expected).square().mean().sqrt() < 0.015 * expected.std()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(few, many, atol=tolerance, rtol=tolerance)


def test_without_a_compiler_the_result_is_the_same(monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 20)
    quantise_linears(torch.nn.Sequential(layer))
    with torch.inference_mode():
        rows = torch.randn(3, 32)
        native = layer(rows)
        layer.is_native = False
        torch.testing.assert_close(layer(rows), native, atol=1e-5, rtol=1e-5)


def test_a_shared_weight_stays_unchanged_for_the_other_layers():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(40, 32)
    head = torch.nn.Linear(32, 40, bias=False)
    head.weight = embedding.weight
    with torch.inference_mode():
        expected = head(torch.ones(1, 32))
        quantise_linears(torch.nn.ModuleList([embedding, head]))
        assert embedding.weight.isfinite().all()
        torch.testing.assert_close(head(torch.ones(1, 32)), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mistral, sliding window"])
def test_the_tokens_of_an_engine_with_quantised_weights_do_not_depend_on_the_batch(name, tmp_path):
    folder = BY_NAME[name].save(tmp_path / "model")
    plain = open_engine(folder)
    answers = run_staggered(plain)
    engine = open_engine(folder, weight_dtype="int8")
    found = run_staggered(engine)
    assert engine.info.self_check_difference < 1e-3
    assert engine.info.weights_bytes < 0.6 * plain.info.weights_bytes
    firsts = [a[0] == b[0] for a, b in zip(answers, found, strict=True)]
    assert sum(firsts) >= 4
    plain.close()
    engine.close()


def test_unsupported_weight_types_are_refused():
    with pytest.raises(
        ConfigError, match="weight_dtype: the value must be 'auto', 'int8' or 'fp8'"
    ):
        EngineConfig("/model", weight_dtype="int4")
    config = EngineConfig("/model", weight_dtype="int8")
    with pytest.raises(ConfigError, match="weight_dtype: the value int8 requires device=cpu"):
        load_weights._check_weight_dtype(config, torch.device("cuda:0"))
    config = EngineConfig("/model", weight_dtype="fp8")
    with pytest.raises(ConfigError, match="weight_dtype: the value fp8 requires device=cuda"):
        load_weights._check_weight_dtype(config, torch.device("cpu"))
