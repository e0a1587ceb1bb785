# SPDX-License-Identifier: Apache-2.0
"""The modules of sentence-transformers that convert vectors to vectors, and their weights.

All computations use float32, even if the model has another data type, because these modules take
little time.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from nereid_backend.errors import ModelError, UnsupportedModelError, one_line
from nereid_backend.pooling.loading.sentence_modules import ModuleSpec

# safetensors and torch.load raise one of these exceptions if a file is missing or broken, or if it
# contains something other than tensors.
_READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, AttributeError),
    *(pickle.UnpicklingError, safetensors.SafetensorError),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of sentence-transformers that converts vectors to vectors.

    Attributes:
        kind: "Dense", "LayerNorm" or "Normalize".
        weights: maps names to weights, float32. A module of the kind "Normalize" has no weights.
        activation: the activation that follows a module of the kind "Dense"; None if no activation
            follows.
        residual: whether a module of the kind "Dense" adds its input to its output.
    """

    kind: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    activation: Callable[[Tensor], Tensor] | None = None
    residual: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        """Convert float32 vectors [..., in_features] to float32 vectors [..., out_features]."""
        if self.kind == "Normalize":
            return functional.normalize(vectors, dim=-1)
        if self.kind == "LayerNorm":
            weight = self.weights["norm.weight"]
            bias = self.weights["norm.bias"]
            return functional.layer_norm(vectors, weight.shape, weight, bias)
        return self._dense(vectors)

    def _dense(self, vectors: Tensor) -> Tensor:
        """Compute a linear layer with its activation and its residual connection.

        The residual connection adds the input to the output. If the input and the output have
        different sizes, a second matrix converts the input first.
        """
        weights = self.weights
        out = functional.linear(vectors, weights["linear.weight"], weights.get("linear.bias"))
        if self.activation is not None:
            out = self.activation(out)
        if self.residual:
            if "residual.weight" in weights:
                vectors = functional.linear(vectors, weights["residual.weight"])
            out = out + vectors
        return out

    @property
    def out_features(self) -> int | None:
        """The size of the output vectors; None if the layer does not change the size."""
        weight = self.weights.get("linear.weight")
        return None if weight is None else int(weight.shape[0])


def load_layer(module: ModuleSpec, device: torch.device) -> Layer:
    """Load a module of the kind "Dense", "LayerNorm" or "Normalize" with its weights.

    Raises:
        ModelError: the config of a module Dense or the weights are missing or broken.
        UnsupportedModelError: the activation is not a module of torch.nn.
    """
    match module.kind:
        case "Normalize":
            return Layer("Normalize")
        case "LayerNorm":
            return Layer("LayerNorm", _load_weights(module, device, required="norm.weight"))
        case _:  # "Dense"
            return _load_dense(module, device)


def _load_dense(module: ModuleSpec, device: torch.device) -> Layer:
    """Load a module of the kind "Dense": a linear layer with an activation."""
    if not module.config:
        raise ModelError(
            f"{module.folder}/config.json is missing or empty, so the activation of the module "
            "Dense is not known. Download the file again."
        )
    weights = _load_weights(module, device, required="linear.weight")
    activation = _activation(module)
    if activation is not None:
        _load_activation_weights(module, activation.to(device), weights)
    return Layer(
        "Dense", weights, activation=activation, residual=bool(module.config.get("use_residual"))
    )


def _load_activation_weights(
    module: ModuleSpec, activation: nn.Module, weights: dict[str, Tensor]
) -> None:
    """Load the weights of an activation. Only a few activations, such as PReLU, have weights.

    Args:
        module: the module "Dense", for error messages.
        activation: the activation, whose weights are replaced.
        weights: the weights of the module by name.

    Raises:
        ModelError: the weights of the activation are missing or have wrong shapes.
    """
    prefix = "activation_function."
    own_weights = {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    try:
        activation.load_state_dict(own_weights)
    except RuntimeError as error:
        raise ModelError(
            f"{module.folder}: the weights of the activation do not fit the module Dense "
            f"({one_line(error)}). Download the checkpoint again."
        ) from error


def _load_weights(module: ModuleSpec, device: torch.device, *, required: str) -> dict[str, Tensor]:
    """Return the weights of a module by name, float32. Raise a ModelError if `required` is missing.

    `required` is the name of the weight that every module of this kind has.
    """
    weights = {
        name: tensor.float().to(device) for name, tensor in _read_weights(module.folder).items()
    }
    if required not in weights:
        raise ModelError(
            f"{module.folder}: the weights of the module {module.kind} have no {required}. "
            "Download the checkpoint again."
        )
    return weights


def load_linear(path: Path, device: torch.device) -> Layer:
    """Load a linear layer that is stored in a separate file, such as sparse_linear.pt.

    Raises:
        ModelError: the file is broken, or contains something other than tensors.
    """
    try:
        # The file contains the weights of a torch.nn.Linear, named "weight" and "bias". `Layer`
        # expects the names that are used for a module Dense: "linear.weight" and "linear.bias".
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights = {f"linear.{name}": value.float().to(device) for name, value in state.items()}
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the file again.") from error
    if "linear.weight" not in weights:
        raise ModelError(f"{path} does not contain a linear layer. Download the file again.")
    return Layer("Dense", weights)


def load_projection(folder: Path, name: str, device: torch.device) -> Layer:
    """Load a linear layer that is stored with the weights of the encoder. The layer has no bias.

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
    """Return the weights of a module as a dict from names to tensors. Keep their data types."""
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


def _activation(module: ModuleSpec) -> nn.Module | None:
    """Return the activation of a module of the kind "Dense"; None for the identity.

    The config contains the full name of a torch class, such as "torch.nn.modules.linear.Identity".
    If the config contains no name, the activation is Tanh, the default of sentence-transformers.

    Raises:
        UnsupportedModelError: the class is not a module of torch.nn.
    """
    name = str(module.config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    activation = _create_torch_module(name)
    if activation is None:
        raise UnsupportedModelError(
            f"{module.folder}: the activation {name} is not supported, because it is not a module "
            "of torch.nn that can be created without arguments."
        )
    return None if isinstance(activation, nn.Identity) else activation


def _create_torch_module(name: str) -> nn.Module | None:
    """Create a module of torch.nn from its full class name, without arguments.

    Return None if torch.nn has no such module, or if the module needs arguments. Example:
    "torch.nn.modules.activation.ReLU" returns nn.ReLU().
    """
    package, _, class_name = name.rpartition(".")
    # The name comes from the checkpoint, and importing an arbitrary package could run any code.
    # Therefore only classes of torch are allowed.
    if package != "torch.nn" and not package.startswith("torch.nn.modules."):
        return None
    module_class = getattr(nn, class_name, None)
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        return None
    try:
        # In training mode, some modules, such as RReLU, would return random numbers.
        return module_class().eval()
    except TypeError:  # The constructor requires arguments.
        return None
