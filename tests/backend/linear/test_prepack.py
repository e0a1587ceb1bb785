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


def answers(path, lines=None, **settings):
    engine = Engine(
        EngineConfig(str(path), kv_cache_memory="4MiB", max_num_seqs=4, **settings),
        progress=(lines if lines is not None else []).append,
    )
    try:
        found = engine.generate([[5, 9, 11], [7]], GREEDY)
        packed = [
            name
            for name, module in engine._parts.runner._path._model.named_modules()
            if isinstance(module, PackedLinear | NativeLinear)
        ]
        return [output.outputs[0].token_ids for output in found], packed
    finally:
        engine.close()


@pytest.fixture(params=["own kernel", "oneDNN"], autouse=True)
def products(request, monkeypatch):
    if request.param == "oneDNN":
        monkeypatch.setattr(native_linear, "can_pack", lambda weight: False)


def test_engines_with_and_without_packed_weights_return_the_same_tokens(checkpoint):
    path = checkpoint("llama")
    with_packed, packed = answers(path)
    without, none = answers(path, prepack=False)
    assert with_packed == without
    assert "model.layers.0.self_attn.q_proj" in packed
    assert none == []


def test_a_model_whose_code_reads_weights_directly_is_not_packed(checkpoint, monkeypatch):
    expected, _ = answers(checkpoint("llama"), prepack=False)

    def forward(self, hidden):
        gate = functional.linear(hidden, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(hidden))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    lines = []
    found, packed = answers(checkpoint("llama"), lines)
    assert found == expected
    assert packed == []
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
