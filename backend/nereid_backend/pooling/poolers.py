# SPDX-License-Identifier: Apache-2.0
"""From token vectors to what was asked for: one vector, many, or weights of a vocabulary's tokens.

All in float32, whatever the model's dtype: what is left of the work is small.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.checkpoint_spec import Part


def pool(hidden: Tensor, spans: list[tuple[int, int]], poolers: tuple[str, ...]) -> Tensor:
    """One vector a text.

    Args:
        hidden: [num_tokens, hidden_size], all texts' token vectors.
        spans: first token and end of what is pooled of each text; not empty.
        poolers: names; several are concatenated.

    Returns:
        [num_texts, len(poolers) * hidden_size] float32.
    """
    found = [_POOLERS[name](hidden, spans) for name in poolers]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _rows(index: list[int], hidden: Tensor) -> Tensor:
    return hidden[torch.tensor(index, device=hidden.device)].float()


def _sums(hidden: Tensor, spans: list[tuple[int, int]], weights: list[Tensor] | None) -> Tensor:
    parts = []
    for number, (start, end) in enumerate(spans):
        rows = hidden[start:end].float()
        parts.append(rows.sum(0) if weights is None else weights[number] @ rows)
    return torch.stack(parts)


def _lens(hidden: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([end - start for start, end in spans], device=hidden.device)[:, None]


def _weighted_mean(hidden: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    weights = [
        torch.arange(1, end - start + 1, device=hidden.device, dtype=torch.float32)
        for start, end in spans
    ]
    totals = torch.stack([one.sum() for one in weights])[:, None]
    return _sums(hidden, spans, weights) / totals


_POOLERS: dict[str, Callable[[Tensor, list[tuple[int, int]]], Tensor]] = {
    "cls": lambda hidden, spans: _rows([start for start, _ in spans], hidden),
    "lasttoken": lambda hidden, spans: _rows([end - 1 for _, end in spans], hidden),
    "mean": lambda hidden, spans: _sums(hidden, spans, None) / _lens(hidden, spans),
    "mean_sqrt_len_tokens": lambda hidden, spans: (
        _sums(hidden, spans, None) / _lens(hidden, spans).sqrt()
    ),
    "weightedmean": _weighted_mean,
    "max": lambda hidden, spans: torch.stack(
        [hidden[start:end].float().amax(0) for start, end in spans]
    ),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of sentence-transformers that maps vectors to vectors: Dense, LayerNorm, Normalize.

    Attributes:
        kind: its name.
        weights: of a Dense or LayerNorm; float32.
        activation: that follows a Dense.
        residual: whether a Dense adds its input.
    """

    kind: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    activation: Callable[[Tensor], Tensor] | None = None
    residual: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        """[..., in] to [..., out], float32."""
        if self.kind == "Normalize":
            return functional.normalize(vectors, dim=-1)
        weight = self.weights
        if self.kind == "LayerNorm":
            shape = weight["norm.weight"].shape
            return functional.layer_norm(vectors, shape, weight["norm.weight"], weight["norm.bias"])
        out = functional.linear(vectors, weight["linear.weight"], weight.get("linear.bias"))
        if self.activation is not None:
            out = self.activation(out)
        if self.residual:
            if "residual.weight" in weight:
                vectors = functional.linear(vectors, weight["residual.weight"])
            out = out + vectors
        return out

    @property
    def out_features(self) -> int | None:
        """Size of what comes out, None where it is the size of what goes in."""
        weight = self.weights.get("linear.weight")
        return None if weight is None else int(weight.shape[0])


def load_layer(part: Part, device: torch.device) -> Layer:
    """Read a module's weights.

    Raises:
        ModelError: they are missing or broken.
        UnsupportedModelError: its activation is none of torch's.
    """
    if part.kind == "Normalize":
        return Layer("Normalize")
    weights = {
        name: tensor.float().to(device) for name, tensor in _read_weights(part.folder).items()
    }
    wanted = "norm.weight" if part.kind == "LayerNorm" else "linear.weight"
    if wanted not in weights:
        raise ModelError(f"{part.folder}: {part.kind} lacks {wanted}; download it again")
    return Layer(
        part.kind,
        weights,
        activation=_activation(part) if part.kind == "Dense" else None,
        residual=bool(part.config.get("use_residual")),
    )


def load_linear(path: Path, device: torch.device) -> Layer:
    """Read a linear layer that is saved as a file of its own, as sparse_linear.pt is.

    Raises:
        ModelError: it is no file of tensors alone.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights = {f"linear.{name}": value.float().to(device) for name, value in state.items()}
    except Exception as error:
        # pickle, zip and torch each raise their own errors for broken files.
        raise ModelError(f"{path} cannot be read: {error}; download it again") from error
    if "linear.weight" not in weights:
        raise ModelError(f"{path} holds no linear layer; download it again")
    return Layer("Dense", weights)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    try:
        if path.is_file():
            found: dict[str, Tensor] = safetensors.torch.load_file(path)
        else:
            path = folder / "pytorch_model.bin"
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}; download it again") from error
    return found


def _activation(part: Part) -> Callable[[Tensor], Tensor] | None:
    name = str(part.config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    module, _, class_name = name.rpartition(".")
    found: Any = None
    if module == "torch.nn" or module.startswith("torch.nn.modules."):
        found = getattr(importlib.import_module(module), class_name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UnsupportedModelError(
            f"{part.folder}: the activation {name} is not supported; it must be a module of "
            "torch.nn"
        )
    if found is nn.Identity:
        return None
    made: Callable[[Tensor], Tensor] = found()
    return made
