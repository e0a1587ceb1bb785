"""Tests of linear layers whose weights are rounded to integers when the model is loaded."""

import pytest
import torch
from backend.exactness import open_engine, run_staggered
from backend.tiny_models import BY_NAME
from nereid_backend import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.linear import quantise_weights
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.quantise_weights import quantise_linears
from nereid_backend.model import load_weights

# The largest allowed error of the outputs for each number of bits. The error is divided by the
# standard deviation of the outputs. The weights are normally distributed.
LIMITS = {8: 0.015, 6: 0.04, 4: 0.1}


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (37, 21, False)])
def test_a_layer_is_near_the_original_for_few_and_many_rows(dtype, inputs, outputs, bias, bits):
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    rows = torch.randn(2, 60, inputs)
    with torch.inference_mode():
        expected = layer(rows)
        layer = layer.to(dtype)
        assert quantise_linears(torch.nn.Sequential(layer), bits) == 1
        assert type(layer) is GroupedLinear
        output = layer(rows.to(dtype))
        parts = [layer(few_rows) for few_rows in rows.to(dtype).split(7, dim=1)]
    output_of_parts = torch.cat(parts, dim=1)

    assert output.shape == output_of_parts.shape == expected.shape
    for rounded in (output, output_of_parts):
        assert rounded.dtype == dtype
        error = (rounded.float() - expected).square().mean().sqrt()
        assert error < LIMITS[bits] * expected.std()
    if dtype == torch.float32:
        # A processor with matrix tiles (AMX) multiplies few and many bfloat16 rows differently.
        assert torch.equal(output_of_parts, output)


def test_weights_of_zero_and_tiny_weights_stay_finite():
    layer = torch.nn.Linear(64, 16, bias=False)
    with torch.inference_mode():
        layer.weight[0] = 0
        layer.weight[1] = 1e-30
        quantise_linears(torch.nn.Sequential(layer), 4)
        output = layer(torch.ones(1, 64))
    assert output.isfinite().all()
    assert output[0, 0] == 0


def test_a_shared_weight_stays_unchanged_for_the_other_layers():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(40, 32)
    head = torch.nn.Linear(32, 40, bias=False)
    head.weight = embedding.weight
    with torch.inference_mode():
        expected = head(torch.ones(1, 32))
        quantise_linears(torch.nn.ModuleList([embedding, head]), 8)
        assert embedding.weight.isfinite().all()
        torch.testing.assert_close(head(torch.ones(1, 32)), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("name", "weight_dtype", "num_equal_tokens"),
    [("llama", "int8", 4), ("gpt_neox", "int8", 4), ("mistral, sliding window", "int4", 2)],
)
def test_an_engine_with_quantised_weights_is_smaller_and_often_begins_with_the_same_token(
    name, weight_dtype, num_equal_tokens, tmp_path
):
    folder = BY_NAME[name].save(tmp_path / "model")
    unquantised_engine = open_engine(folder)
    unquantised_answers = run_staggered(unquantised_engine)

    engine = open_engine(folder, weight_dtype=weight_dtype)
    answers = run_staggered(engine)

    assert engine.info.self_check_difference < 1e-3
    assert engine.info.weights_bytes < 0.6 * unquantised_engine.info.weights_bytes
    # Rounded weights change some tokens. After a changed token, all tokens may differ, so only the
    # first token of each answer is compared.
    pairs = zip(unquantised_answers, answers, strict=True)
    num_equal = sum(expected[0] == answer[0] for expected, answer in pairs)
    assert num_equal >= num_equal_tokens
    unquantised_engine.close()
    engine.close()


def test_unsupported_weight_types_are_refused():
    with pytest.raises(ConfigError, match="weight_dtype: the value must be 'auto', 'int8', 'int4'"):
        EngineConfig("/model", weight_dtype="int2")
    config = EngineConfig("/model", weight_dtype="int4")
    with pytest.raises(ConfigError, match="weight_dtype: the value int4 requires device=cpu"):
        load_weights._check_weight_dtype(config, torch.device("cuda:0"))
    config = EngineConfig("/model", weight_dtype="fp8")
    with pytest.raises(ConfigError, match="weight_dtype: the value fp8 requires device=cuda"):
        load_weights._check_weight_dtype(config, torch.device("cpu"))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_layer_that_is_rounded_in_slices_equals_the_layer_that_is_rounded_at_once(
    bits, monkeypatch
):
    # The limit allows slices of at most 16 rows, because a row has 100 float32 numbers.
    monkeypatch.setattr(quantise_weights, "_SLICE_BYTES", 4 * 16 * 100)
    weight = torch.randn(75, 100)
    layer = torch.nn.Linear(100, 75, bias=False)
    slices = []

    def read_rows(start, end):
        slices.append((start, end))
        return weight[start:end]

    quantise_weights.round_layer_in_place(layer, read_rows, bits)

    assert slices == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 75)]
    expected_layer = GroupedLinear.from_quantised(
        *quantise_weights.quantise_weight(weight, bits),
        quantise_weights.GROUP_SIZES[bits],
        bits=bits,
    )
    assert torch.equal(layer.dequantised(), expected_layer.dequantised())
    x = torch.randn(3, 100)
    assert torch.equal(layer(x), expected_layer(x))
