# SPDX-License-Identifier: Apache-2.0
"""Pools token vectors, and applies the modules of sentence-transformers to vectors.

All computations are in float32, whatever the model's data type, because they are cheap.
"""

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.sentence_modules import ModuleSpec

# safetensors and torch.load raise one of these exceptions if a file is missing or broken, or if it
# contains something other than tensors.
_READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, AttributeError),
    *(pickle.UnpicklingError, safetensors.SafetensorError),
)

# For each text, the index of its first pooled token and the index after its last pooled token. Each
# range contains at least one token. Example: [(0, 5), (6, 9)] pools the tokens 0 to 4, and the
# tokens 6 to 8.
Ranges = list[tuple[int, int]]


def pool(hidden: Tensor, ranges: Ranges, poolers: tuple[str, ...]) -> Tensor:
    """Pool the token vectors of each text to one vector.

    Args:
        hidden: the token vectors of all texts, [num_tokens, hidden_size].
        ranges: the pooled tokens of each text.
        poolers: the names of pooling methods. Their results are concatenated.

    Returns:
        The pooled vectors, float32 [num_texts, len(poolers) * hidden_size].
    """
    pooled = [_POOLERS[name](hidden, ranges) for name in poolers]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)


def _rows(index: list[int], hidden: Tensor) -> Tensor:
    """Return the vectors of the tokens with the indices `index`, float32 [n, hidden_size]."""
    return hidden[torch.tensor(index, device=hidden.device)].float()


def _sums(hidden: Tensor, ranges: Ranges, weights: list[Tensor] | None) -> Tensor:
    """Return the sum of the token vectors of each range, weighted if `weights` is given."""
    parts = []
    for number, (start, end) in enumerate(ranges):
        rows = hidden[start:end].float()
        parts.append(rows.sum(0) if weights is None else weights[number] @ rows)
    return torch.stack(parts)


def _lens(hidden: Tensor, ranges: Ranges) -> Tensor:
    """Return the number of pooled tokens of each text, [num_texts, 1]."""
    return torch.tensor([end - start for start, end in ranges], device=hidden.device)[:, None]


def _weighted_mean(hidden: Tensor, ranges: Ranges) -> Tensor:
    """Return a weighted mean of the token vectors of each text.

    The first token has the weight 1, the second token has the weight 2, and so on.
    """
    weights = [
        torch.arange(1, end - start + 1, device=hidden.device, dtype=torch.float32)
        for start, end in ranges
    ]
    totals = torch.stack([text_weights.sum() for text_weights in weights])[:, None]
    return _sums(hidden, ranges, weights) / totals


_POOLERS: dict[str, Callable[[Tensor, Ranges], Tensor]] = {
    "cls": lambda hidden, ranges: _rows([start for start, _ in ranges], hidden),
    "lasttoken": lambda hidden, ranges: _rows([end - 1 for _, end in ranges], hidden),
    "mean": lambda hidden, ranges: _sums(hidden, ranges, None) / _lens(hidden, ranges),
    "mean_sqrt_len_tokens": lambda hidden, ranges: (
        _sums(hidden, ranges, None) / _lens(hidden, ranges).sqrt()
    ),
    "weightedmean": _weighted_mean,
    "max": lambda hidden, ranges: torch.stack(
        [hidden[start:end].float().amax(0) for start, end in ranges]
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
        """Map float32 vectors [..., in_features] to float32 vectors [..., out_features]."""
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
        """The size of the output vectors; None if the layer does not change the size."""
        weight = self.weights.get("linear.weight")
        return None if weight is None else int(weight.shape[0])


def load_layer(module: ModuleSpec, device: torch.device) -> Layer:
    """Load a module with its weights.

    Raises:
        ModelError: the weights are missing or broken.
        UnsupportedModelError: the activation is not a module of torch.nn.
    """
    if module.kind == "Normalize":
        return Layer("Normalize")
    weights = {
        name: tensor.float().to(device) for name, tensor in _read_weights(module.folder).items()
    }
    required = "norm.weight" if module.kind == "LayerNorm" else "linear.weight"
    if required not in weights:
        raise ModelError(
            f"{module.folder}: the weights of the module {module.kind} have no {required}. "
            "Download the checkpoint again."
        )
    return Layer(
        module.kind,
        weights,
        activation=_activation(module) if module.kind == "Dense" else None,
        residual=bool(module.config.get("use_residual")),
    )


def load_linear(path: Path, device: torch.device) -> Layer:
    """Load a linear layer that is stored in a separate file, such as sparse_linear.pt.

    Raises:
        ModelError: the file is broken, or contains something other than tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights = {f"linear.{name}": value.float().to(device) for name, value in state.items()}
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the file again.") from error
    if "linear.weight" not in weights:
        raise ModelError(f"{path} does not contain a linear layer. Download the file again.")
    return Layer("Dense", weights)


def load_projection(folder: Path, name: str, device: torch.device) -> Layer:
    """Load a linear layer without a bias from the weights of the encoder in the folder `folder`.

    Args:
        folder: the folder of the checkpoint.
        name: the name of the layer's matrix among the weights.
        device: the device of the layer.

    Raises:
        ModelError: the weights are missing or broken, or have no tensor of this name.
    """
    weights = _read_weights(folder)
    if name not in weights:
        raise ModelError(
            f"{folder}: the weights have no {name}, which projects the token vectors. Download the "
            "checkpoint again."
        )
    return Layer("Dense", {"linear.weight": weights[name].float().to(device)})


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a module by name, as stored."""
    path = folder / "model.safetensors"
    try:
        if path.is_file():
            weights: dict[str, Tensor] = safetensors.torch.load_file(path)
        else:
            path = folder / "pytorch_model.bin"
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the file again.") from error
    return weights


def _activation(module: ModuleSpec) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of a Dense module; None for the identity."""
    name = str(module.config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    package, _, class_name = name.rpartition(".")
    activation_class: Any = None
    if package == "torch.nn" or package.startswith("torch.nn.modules."):
        activation_class = getattr(importlib.import_module(package), class_name, None)
    if not (isinstance(activation_class, type) and issubclass(activation_class, nn.Module)):
        raise UnsupportedModelError(
            f"{module.folder}: the activation {name} is not supported, because it is not a module "
            "of torch.nn."
        )
    if activation_class is nn.Identity:
        return None
    activation: Callable[[Tensor], Tensor] = activation_class()
    return activation
