"""Tests of linear layers with 8-bit floating-point numbers.

torch can compute the products of such numbers on a CPU, too.
"""

import pytest
import torch
from backend.exactness import open_engine, run_staggered
from backend.tiny_models import BY_NAME
from nereid_backend.errors import ConfigError
from nereid_backend.linear import float8_linear
from nereid_backend.linear.float8_linear import (
    Float8Linear,
    Float8Product,
    find_product,
    store_linears_as_float8,
)
from nereid_backend.model import load_weights
from torch import nn

CPU = torch.device("cpu")
ROWS, WHOLE = Float8Product(has_row_scales=True), Float8Product(has_row_scales=False)


@pytest.fixture(autouse=True)
def needs_products():
    if find_product(CPU, torch.bfloat16) is None:
        pytest.skip("this version of torch has no products of e4m3 on a CPU")


def converted(layer, product):
    """Store the weight of a layer as 8-bit floating-point numbers, and return the layer."""
    float8_linear._convert(layer, product)
    return layer


@pytest.mark.parametrize("product", [ROWS, WHOLE], ids=["scales of rows", "one scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_gives_the_exact_outputs_up_to_the_rounding(product, dtype):
    if product is ROWS and find_product(CPU, dtype) == WHOLE:
        pytest.skip("this version of torch has no scales of rows on a CPU")
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, dtype=dtype)
    rows = torch.randn(2, 7, 96, dtype=dtype)
    exact_outputs = layer(rows).float()

    outputs = converted(layer, product)(rows)

    assert outputs.shape == exact_outputs.shape
    assert outputs.dtype == dtype
    assert (outputs.float() - exact_outputs).norm() < 0.06 * exact_outputs.norm()


def test_with_scales_of_rows_an_output_does_not_depend_on_the_other_rows():
    if find_product(CPU, torch.bfloat16) != ROWS:
        pytest.skip("this version of torch has no scales of rows on a CPU")
    torch.manual_seed(0)
    layer = converted(nn.Linear(64, 32, dtype=torch.bfloat16), ROWS)
    rows = torch.randn(5, 64, dtype=torch.bfloat16)
    rows[3] *= 1000
    assert torch.equal(layer(rows)[:3], layer(rows[:3]))


@pytest.mark.parametrize("product", [ROWS, WHOLE])
def test_numbers_are_rounded_to_the_largest_e4m3_and_zeros_stay(product):
    numbers, scales = product.rounded(torch.tensor([[1.0, -4.48], [0.0, 0.0]]))
    assert numbers.float()[0].tolist() == [96, -448]
    assert numbers.float()[1].tolist() == [0, 0]
    assert scales.flatten()[0].item() == pytest.approx(0.01)


def test_a_device_whose_products_are_wrong_or_missing_has_none(monkeypatch):
    def product_without_scales(a, b, **_):
        return a.float() @ b.float()

    def missing_product(*args, **options):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices")

    for scaled_mm in (product_without_scales, missing_product):
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        assert find_product(CPU, torch.float32) is None


def test_output_layers_and_odd_sizes_keep_their_weights(tmp_path):
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.Linear(32, 32))
    model.get_output_embeddings = lambda: model[2]
    assert store_linears_as_float8(model, WHOLE) == 1
    assert [type(layer) for layer in model] == [Float8Linear, nn.Linear, nn.Linear]
    assert model[0].weight.isnan().all()
    assert model[0].weight.shape == (48, 32)


def test_an_engine_computes_with_float8_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(load_weights, "_check_weight_dtype", lambda *_: None)
    engine = open_engine(BY_NAME["llama"].save(tmp_path / "model"), weight_dtype="fp8")
    layers = [m for m in engine._parts.runner._path._model.modules() if type(m) is Float8Linear]
    assert len(layers) >= 14
    assert all(run_staggered(engine))
    assert engine.info.self_check_difference < 1e-3
    engine.close()


def test_a_gpu_without_products_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(load_weights, "_check_weight_dtype", lambda *_: None)
    monkeypatch.setattr(load_weights, "find_product", lambda *_: None)
    with pytest.raises(ConfigError, match="requires a GPU that multiplies 8-bit"):
        open_engine(BY_NAME["llama"].save(tmp_path / "model"), weight_dtype="fp8")
