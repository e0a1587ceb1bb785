"""Tests that torch's fused function replaces RMSNorm modules only if the results stay the same."""

from types import SimpleNamespace

import pytest
import torch
from nereid_backend.model import accelerate_path
from nereid_backend.model.fused_norms import FusedRmsNorm, fuse_norms
from nereid_backend.paths.model_call import UnfitError
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class OtherRMSNorm(Qwen3RMSNorm):
    """A class that is named like an RMSNorm but computes other results."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.1


class GatedRMSNorm(Qwen3RMSNorm):
    """A class whose `forward` needs a second argument."""

    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


def model_of(norm, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"norm": norm})).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, GemmaRMSNorm])
def test_norms_are_replaced_and_give_the_same_numbers(kind, dtype):
    model = model_of(kind(8), dtype)
    inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = model[1]["norm"](inputs)
    restore = fuse_norms(model)
    assert isinstance(model[1]["norm"], FusedRmsNorm)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(model[1]["norm"](inputs), expected, rtol=tolerance, atol=tolerance)
    restore()
    assert type(model[1]["norm"]) is kind


@pytest.mark.parametrize("kind", [OtherRMSNorm, GatedRMSNorm])
def test_norms_that_compute_something_else_stay(kind):
    model = model_of(kind(8))
    assert fuse_norms(model) is None
    assert type(model[1]["norm"]) is kind


def test_a_norm_with_another_epsilon_than_it_names_stays():
    norm = Qwen3RMSNorm(8, eps=1e-6)
    plain = norm.forward

    def forward(hidden_states):
        norm.variance_epsilon = 1e-2
        result = plain(hidden_states)
        norm.variance_epsilon = 1e-6
        return result

    norm.forward = forward
    assert fuse_norms(model_of(norm)) is None


def test_a_model_without_norms_is_not_changed():
    assert fuse_norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) is None


@pytest.mark.parametrize(
    ("fails", "kind", "line"),
    [
        (False, FusedRmsNorm, "torch's fused function computes the RMSNorm modules"),
        (True, Qwen3RMSNorm, "RMSNorm modules are not replaced by torch's fused function: differs"),
    ],
)
def test_norms_stay_replaced_only_if_the_path_still_gives_the_right_logits(
    fails, kind, line, monkeypatch
):
    def check_path(*_):
        if fails:
            raise UnfitError("differs")

    monkeypatch.setattr(accelerate_path, "check_path", check_path)
    model = model_of(Qwen3RMSNorm(8))
    model.dtype = torch.float32
    chosen = SimpleNamespace(
        spec=SimpleNamespace(build=lambda _: None), trial=SimpleNamespace(sizes=None)
    )
    lines = []
    accelerate_path.use_fused_norms(SimpleNamespace(model=model), chosen, lines.append)
    assert type(model[1]["norm"]) is kind
    assert lines == [line]
