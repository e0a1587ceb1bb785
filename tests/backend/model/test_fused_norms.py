"""Tests that torch's fused function replaces RMSNorm modules only if the results stay the same."""

from types import SimpleNamespace
from unittest.mock import Mock

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
    """Return a model that consists of a linear layer and a `ModuleDict` with the module `norm`."""
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"norm": norm})).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, GemmaRMSNorm])
def test_norms_are_replaced_and_give_the_same_numbers(norm_class, dtype, tolerance):
    model = model_of(norm_class(8), dtype)
    inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = model[1]["norm"](inputs)
    restore = fuse_norms(model)
    assert isinstance(model[1]["norm"], FusedRmsNorm)
    torch.testing.assert_close(model[1]["norm"](inputs), expected, rtol=tolerance, atol=tolerance)
    restore()
    assert type(model[1]["norm"]) is norm_class


@pytest.mark.parametrize("norm_class", [OtherRMSNorm, GatedRMSNorm])
def test_norms_that_compute_something_else_stay(norm_class):
    model = model_of(norm_class(8))
    assert fuse_norms(model) is None
    assert type(model[1]["norm"]) is norm_class


def test_a_norm_with_another_epsilon_than_it_names_stays():
    norm = Qwen3RMSNorm(8, eps=1e-6)
    forward = norm.forward

    def forward_with_another_epsilon(hidden_states):
        norm.variance_epsilon = 1e-2
        result = forward(hidden_states)
        norm.variance_epsilon = 1e-6
        return result

    norm.forward = forward_with_another_epsilon
    assert fuse_norms(model_of(norm)) is None


def test_a_model_without_norms_is_not_changed():
    assert fuse_norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) is None


@pytest.mark.parametrize(
    ("error", "norm_class", "line"),
    [
        (None, FusedRmsNorm, "torch's fused function computes the RMSNorm modules"),
        (
            UnfitError("differs"),
            Qwen3RMSNorm,
            "RMSNorm modules are not replaced by torch's fused function: differs",
        ),
    ],
    ids=["equal logits", "other logits"],
)
def test_norms_stay_replaced_only_if_the_path_still_gives_the_right_logits(
    error, norm_class, line, monkeypatch
):
    monkeypatch.setattr(accelerate_path, "check_path", Mock(side_effect=error))
    model = model_of(Qwen3RMSNorm(8))
    model.dtype = torch.float32
    # A fake of a chosen forward path, with only the attributes that `use_fused_norms` reads.
    chosen_path = SimpleNamespace(
        spec=SimpleNamespace(build=lambda _: None), reference=SimpleNamespace(sizes=None)
    )
    lines = []
    accelerate_path.use_fused_norms(SimpleNamespace(model=model), chosen_path, lines.append)
    assert type(model[1]["norm"]) is norm_class
    assert lines == [line]
