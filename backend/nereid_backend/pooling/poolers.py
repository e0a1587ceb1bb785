# SPDX-License-Identifier: Apache-2.0
"""Pools token vectors, and applies the modules of sentence-transformers to vectors.

All computations are in float32, whatever the model's data type, because they are cheap.
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
from nereid_backend.pooling.checkpoint_spec import ModuleSpec


def pool(hidden: Tensor, spans: list[tuple[int, int]], poolers: tuple[str, ...]) -> Tensor:
    """Pool the token vectors of each text to one vector.

    Args:
        hidden: the token vectors of all texts, [num_tokens, hidden_size].
        spans: for each text the index of its first pooled token and of the token after the last
            one. No span is empty.
        poolers: the names of pooling methods. Their results are concatenated.

    Returns:
        The pooled vectors, float32 [num_texts, len(poolers) * hidden_size].
    """
    pooled = [_POOLERS[name](hidden, spans) for name in poolers]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)


def _rows(index: list[int], hidden: Tensor) -> Tensor:
    """Return the vectors of the tokens in `index`, float32."""
    return hidden[torch.tensor(index, device=hidden.device)].float()


def _sums(hidden: Tensor, spans: list[tuple[int, int]], weights: list[Tensor] | None) -> Tensor:
    """Return the sum of the token vectors of each span, weighted if `weights` is given."""
    parts = []
    for number, (start, end) in enumerate(spans):
        rows = hidden[start:end].float()
        parts.append(rows.sum(0) if weights is None else weights[number] @ rows)
    return torch.stack(parts)


def _lens(hidden: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return the length of each span, [num_texts, 1]."""
    return torch.tensor([end - start for start, end in spans], device=hidden.device)[:, None]


def _weighted_mean(hidden: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return the mean of each span's vectors, weighted with 1, 2, 3, ... in token order."""
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
    """A module of sentence-transformers that maps vectors to vectors.

    Attributes:
        kind: "Dense", "LayerNorm" or "Normalize".
        weights: the weights of a Dense or LayerNorm by name, float32.
        activation: the activation after a Dense; None without one.
        residual: whether a Dense adds its input to its output.
    """

    kind: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    activation: Callable[[Tensor], Tensor] | None = None
    residual: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        """Map vectors [..., in_features] to vectors [..., out_features], both float32."""
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
        """The size of the output vectors; None if it is the size of the input vectors."""
        weight = self.weights.get("linear.weight")
        return None if weight is None else int(weight.shape[0])


def load_layer(part: ModuleSpec, device: torch.device) -> Layer:
    """Load a module with its weights.

    Raises:
        ModelError: the weights are missing or broken.
        UnsupportedModelError: the activation is not a module of torch.nn.
    """
    if part.kind == "Normalize":
        return Layer("Normalize")
    weights = {
        name: tensor.float().to(device) for name, tensor in _read_weights(part.folder).items()
    }
    wanted = "norm.weight" if part.kind == "LayerNorm" else "linear.weight"
    if wanted not in weights:
        raise ModelError(
            f"{part.folder}: the weights of the module {part.kind} have no {wanted}. Download the "
            "checkpoint again."
        )
    return Layer(
        part.kind,
        weights,
        activation=_activation(part) if part.kind == "Dense" else None,
        residual=bool(part.config.get("use_residual")),
    )


def load_linear(path: Path, device: torch.device) -> Layer:
    """Load a linear layer that has a file of its own, such as sparse_linear.pt.

    Raises:
        ModelError: the file is broken, or contains something other than tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights = {f"linear.{name}": value.float().to(device) for name, value in state.items()}
    except Exception as error:
        # pickle, zipfile and torch raise different errors for broken files.
        raise ModelError(f"{path} cannot be read: {error}. Download the file again.") from error
    if "linear.weight" not in weights:
        raise ModelError(f"{path} does not contain a linear layer. Download the file again.")
    return Layer("Dense", weights)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    try:
        if path.is_file():
            weights: dict[str, Tensor] = safetensors.torch.load_file(path)
        else:
            path = folder / "pytorch_model.bin"
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the file again.") from error
    return weights


def _activation(part: ModuleSpec) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of a Dense module; None for the identity."""
    name = str(part.config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    module, _, class_name = name.rpartition(".")
    module_class: Any = None
    if module == "torch.nn" or module.startswith("torch.nn.modules."):
        module_class = getattr(importlib.import_module(module), class_name, None)
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise UnsupportedModelError(
            f"{part.folder}: the activation {name} is not supported, because it is not a module of "
            "torch.nn."
        )
    if module_class is nn.Identity:
        return None
    activation: Callable[[Tensor], Tensor] = module_class()
    return activation
