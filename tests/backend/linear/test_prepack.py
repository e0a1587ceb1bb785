import pytest
import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.linear import native_linear
from nereid_backend.linear.native_linear import NativeLinear
from nereid_backend.linear.prepack import PackedLinear, prepack_linears
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

pytestmark = pytest.mark.skipif(
    not prepack_linears(torch.nn.Sequential(torch.nn.Linear(2, 2))), reason="torch without oneDNN"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def answers(path, **settings):
    """Return the answers of an engine, the names of its packed layers, and its progress lines."""
    lines = []
    config = EngineConfig(str(path), kv_cache_memory="4MiB", max_num_seqs=4, **settings)
    engine = Engine(config, progress=lines.append)
    try:
        outputs = engine.generate([[5, 9, 11], [7]], GREEDY)
        packed_layers = [
            name
            for name, module in engine._parts.runner._path._model.named_modules()
            if isinstance(module, PackedLinear | NativeLinear)
        ]
        return [output.outputs[0].token_ids for output in outputs], packed_layers, lines
    finally:
        engine.close()


@pytest.fixture(params=["own kernel", "oneDNN"], autouse=True)
def products(request, monkeypatch):
    """Run each test twice: with weights packed for Nereid's kernel, and packed for oneDNN."""
    if request.param == "oneDNN":
        monkeypatch.setattr(native_linear, "can_pack", lambda weight: False)


def test_engines_with_and_without_packed_weights_return_the_same_tokens(checkpoint):
    path = checkpoint("llama")
    tokens, packed_layers, _ = answers(path)
    expected, packed_layers_without_prepack, _ = answers(path, prepack=False)
    assert tokens == expected
    assert "model.layers.0.self_attn.q_proj" in packed_layers
    assert packed_layers_without_prepack == []


def test_a_model_whose_code_reads_weights_directly_is_not_packed(checkpoint, monkeypatch):
    expected, *_ = answers(checkpoint("llama"), prepack=False)

    def forward_with_weight(self, hidden):
        gate = functional.linear(hidden, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(hidden))

    monkeypatch.setattr(LlamaMLP, "forward", forward_with_weight)
    tokens, packed_layers, lines = answers(checkpoint("llama"))
    assert tokens == expected
    assert packed_layers == []
    assert any("code reads them directly" in line for line in lines)


def test_a_shared_weight_is_copied_only_on_request():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(40, 32)
    head = torch.nn.Linear(32, 40, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleList([embedding, head])
    hidden = torch.randn(3, 32)
    expected = head(hidden).detach()
    assert prepack_linears(model) == 0
    assert prepack_linears(model, copy_shared=True) == 1
    with torch.inference_mode():
        torch.testing.assert_close(head(hidden), expected)
    assert embedding.weight.isfinite().all()
