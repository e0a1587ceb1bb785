import shutil

import gguf
import numpy as np
import pytest
import torch
from backend.checkpoints.ggml_quantise import quantise
from backend.checkpoints.gguf_writer import Q4_K_M, WIDE, dequantised_weights, write_gguf
from backend.checkpoints.load_on_cpu import load
from backend.exactness import open_engine, reference, run_staggered
from nereid_backend.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from nereid_backend.checkpoints.gguf.gguf_file import GgufTensor
from nereid_backend.checkpoints.gguf.gguf_weights import GgufWeight
from nereid_backend.linear.grouped_linear import GroupedLinear
from safetensors.torch import save_file

# For these types, ggml first searches the neighbours in a grid of numbers. This takes up to 4 s.
GRID_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
ALL_TYPES = [
    *BLOCK_TYPES,
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *(pytest.param(name, marks=pytest.mark.long) for name in GRID_TYPES),
]
# The names of three weights in transformers and in a GGUF file.
STORED_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of the tiny checkpoint `WIDE`."""
    return WIDE.save(tmp_path_factory.mktemp("wide") / "plain")


@pytest.fixture
def checkpoint(plain, tmp_path, monkeypatch):
    """The folder of the tiny checkpoint. The cache folder for GGUF files is empty at first."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("nereid_backend.checkpoints.gguf.gguf_folder.cache_folder", lambda: cache)
    return plain


def library_weights(file):
    """Return the weights of a file as the gguf library dequantises them, by their GGUF names."""
    return {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("name", ALL_TYPES)
def test_blocks_that_ggml_writes_are_read_as_in_the_gguf_library(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    original = np.random.default_rng(0).standard_t(4, (4, 512)).astype(np.float32) * 0.02
    # Add a range in which all weights are 0, and a range in which all weights are equal.
    original[0, :256], original[1, :32] = 0.0, 0.3
    blocks = quantise(original, kind)
    (tmp_path / "file").write_bytes(blocks.tobytes())
    tensor = GgufTensor("x", original.shape, kind, start=0, num_bytes=blocks.nbytes)

    weight = GgufWeight(tmp_path / "file", tensor, torch.float32)[...]

    expected = gguf.dequantize(blocks, kind)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-7)
    # The dequantised weights must resemble the original weights. In types of 1 or 2 bits, the
    # root-mean-square error is up to 80 % of the root mean square of the weights.
    assert np.square(expected - original).mean() < 0.8**2 * np.square(original).mean()


@pytest.mark.parametrize(
    "kind", ["Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "BF16"]
)
def test_the_weights_equal_those_of_the_gguf_library(kind, checkpoint, tmp_path):
    file = write_gguf(checkpoint, "qwen3", kind, path=tmp_path / "model.gguf")
    expected_weights = library_weights(file)

    model = load(file, use_panels=False)
    for name, stored_name in STORED_NAMES.items():
        weight = model.get_submodule(name).weight.detach().numpy()
        np.testing.assert_allclose(weight, expected_weights[stored_name], rtol=1e-6, atol=1e-6)

    # In the layout of the CPU kernels, scales are rounded to float16, so the tolerance is larger.
    model_with_panels = load(file, use_panels=True)
    layer = model_with_panels.get_submodule("model.layers.1.mlp.down_proj")
    assert (type(layer) is GroupedLinear) == (kind in BLOCK_TYPES)
    if kind in BLOCK_TYPES:
        expected = expected_weights["blk.1.ffn_down"]
        assert layer.bits == BLOCK_TYPES[kind].bits
        error = np.abs(layer.dequantised().numpy() - expected).max()
        assert error <= 2**-10 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "other_kinds"),
    [
        ("Q4_K", Q4_K_M),
        pytest.param("Q2_K", {"ffn_down": "Q3_K", "output": "Q6_K"}, marks=pytest.mark.long),
        pytest.param("Q5_K", {"ffn_down": "IQ4_NL"}, marks=pytest.mark.long),
    ],
)
def test_the_tokens_equal_those_of_the_dequantised_checkpoint(
    kind, other_kinds, checkpoint, tmp_path
):
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint, "qwen3", kind, other_kinds=other_kinds, path=file)
    dequantised = tmp_path / "dequantised"
    dequantised.mkdir()
    shutil.copy(checkpoint / "config.json", dequantised)
    weights = dequantised_weights(checkpoint, file)
    save_file(weights, dequantised / "model.safetensors", metadata={"format": "pt"})

    engine = open_engine(file, prepack=False)
    try:
        assert run_staggered(engine) == reference(dequantised)
    finally:
        engine.close()
