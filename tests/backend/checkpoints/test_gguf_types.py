import gguf
import numpy as np
import pytest
import torch
from backend.checkpoints.ggml_quantise import quantise
from backend.checkpoints.gguf_writer import Q4_K_M, WIDE, dequantised_weights, write_gguf
from backend.exactness import open_engine, reference, run_staggered
from nereid_backend.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from nereid_backend.checkpoints.gguf.gguf_file import GgufTensor
from nereid_backend.checkpoints.gguf.gguf_weights import GgufWeight
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.load_checkpoint import load_checkpoint
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
    return WIDE.save(tmp_path_factory.mktemp("wide") / "plain")


@pytest.fixture
def checkpoint(plain, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr("nereid_backend.checkpoints.gguf.gguf_folder.cache_folder", lambda: cache)
    return plain


def library_weights(file):
    """Return the weights of a file as the gguf library dequantises them, by their GGUF names."""
    return {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


def load(file, *, use_panels):
    return load_checkpoint(
        str(file),
        dtype="float32",
        device=torch.device("cpu"),
        attention="eager",
        progress=lambda line: None,
        use_panels=use_panels,
    ).model


@pytest.mark.parametrize("name", ALL_TYPES)
def test_blocks_that_ggml_writes_are_read_as_in_the_gguf_library(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    weight = np.random.default_rng(0).standard_t(4, (4, 512)).astype(np.float32) * 0.02
    weight[0, :256], weight[1, :32] = 0.0, 0.3
    blocks = quantise(weight, kind)
    (tmp_path / "file").write_bytes(blocks.tobytes())
    tensor = GgufTensor("x", weight.shape, kind, 0, blocks.nbytes)
    found = GgufWeight(tmp_path / "file", tensor, torch.float32)[...]
    expected = gguf.dequantize(blocks, kind)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)
    # The dequantised weights must resemble the original weights. In types of 1 or 2 bits, the
    # root-mean-square error is up to 80 % of the root mean square of the weights.
    assert np.square(expected - weight).mean() < 0.8**2 * np.square(weight).mean()


@pytest.mark.parametrize(
    "kind", ["Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "BF16"]
)
def test_the_weights_equal_those_of_the_gguf_library(kind, checkpoint, tmp_path):
    file = write_gguf(checkpoint, "qwen3", kind, path=tmp_path / "model.gguf")
    expected = library_weights(file)
    found = load(file, use_panels=False).get_submodule
    for name, stored in STORED_NAMES.items():
        weight = found(name).weight.detach().numpy()
        np.testing.assert_allclose(weight, expected[stored], rtol=1e-6, atol=1e-6)
    layer = load(file, use_panels=True).get_submodule("model.layers.1.mlp.down_proj")
    assert (type(layer) is GroupedLinear) == (kind in BLOCK_TYPES)
    if kind in BLOCK_TYPES:
        assert layer.bits == BLOCK_TYPES[kind].bits
        largest = np.abs(expected["blk.1.ffn_down"]).max()
        error = np.abs(layer.dequantised().numpy() - expected["blk.1.ffn_down"]).max()
        assert error <= 2**-10 * largest


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("Q4_K", Q4_K_M),
        pytest.param("Q2_K", {"ffn_down": "Q3_K", "output": "Q6_K"}, marks=pytest.mark.long),
        pytest.param("Q5_K", {"ffn_down": "IQ4_NL"}, marks=pytest.mark.long),
    ],
)
def test_the_tokens_equal_those_of_the_dequantised_checkpoint(kind, others, checkpoint, tmp_path):
    file = write_gguf(checkpoint, "qwen3", kind, other_kinds=others, path=tmp_path / "model.gguf")
    dequantised = tmp_path / "dequantised"
    dequantised.mkdir()
    (dequantised / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(
        dequantised_weights(checkpoint, file),
        dequantised / "model.safetensors",
        metadata={"format": "pt"},
    )
    engine = open_engine(file, prepack=False)
    try:
        assert run_staggered(engine) == reference(dequantised)
    finally:
        engine.close()
