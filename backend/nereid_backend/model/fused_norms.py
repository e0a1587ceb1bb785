# SPDX-License-Identifier: Apache-2.0
"""Replaces the RMSNorm modules of a model by torch's fused function.

The code of transformers computes an RMSNorm in six to eight operations, each of which is a kernel
on a GPU. `torch.nn.functional.rms_norm` is one kernel. The classes of different models differ in
small ways. A module is therefore replaced only if the fused function gives the same numbers for the
weight of the module.

The replacement has not been measured on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

# The largest accepted difference between the two results for a row, divided by the largest number
# in the row. Rounding to the data type causes smaller differences.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_NUM_ROWS = 4


class FusedRmsNorm(nn.Module):
    """An RMSNorm that torch computes in one operation."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Use the weight of another module.

        Args:
            weight: [dim], the factors by which the normalised numbers are multiplied.
            eps: the number that is added to the mean of the squares.
        """
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised numbers, in the shape and data type of the input."""
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


def fuse_norms(model: nn.Module) -> Callable[[], None] | None:
    """Replace each RMSNorm module by torch's fused function if the results stay the same.

    Args:
        model: the model. Mutated.

    Returns:
        A function that restores the replaced modules; None if no module was replaced.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            fused = _find_replacement(module)
            if fused is not None:
                replaced.append((parent, name, module))
                setattr(parent, name, fused)
    if not replaced:
        return None

    def restore() -> None:
        for parent, name, module in replaced:
            setattr(parent, name, module)

    return restore


def _find_replacement(module: nn.Module) -> FusedRmsNorm | None:
    """Return a FusedRmsNorm with the same outputs as `module`. Return None if there is none.

    `module` must be an RMSNorm whose single parameter is a vector of weights.
    """
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight_and_eps = _weight_and_eps(module)
    if weight_and_eps is None:
        return None
    weight, eps = weight_and_eps
    # Some model types add 1 to the weight of an RMSNorm. Try the weight with and without this
    # addition, because only the results show which one is correct.
    for candidate_weight in (weight, weight.detach() + 1.0):
        fused = FusedRmsNorm(candidate_weight, eps)
        if _are_equal(module, fused):
            return fused
    return None


def _weight_and_eps(module: nn.Module) -> tuple[nn.Parameter, float] | None:
    """Return the weight and the epsilon of an RMSNorm module.

    Return None if the module has children or other parameters, or if its weight is not a vector of
    a supported data type.
    """
    weight = getattr(module, "weight", None)
    # The attribute is named `variance_epsilon` in some model types, and `eps` in others.
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    has_children = bool(list(module.children()))
    has_other_parameters = len(list(module.parameters())) != 1
    # `_TOLERANCE` contains the supported data types.
    is_plain_vector = weight.dim() == 1 and weight.dtype in _TOLERANCE
    if has_children or has_other_parameters or not is_plain_vector:
        return None
    return weight, eps


@torch.inference_mode()
def _are_equal(module: nn.Module, fused: FusedRmsNorm) -> bool:
    """Return whether an RMSNorm module and its replacement give the same numbers, up to rounding.

    The test inputs range from about 1e-3 to 1e3. A different `eps` changes the results of the
    smallest inputs, and a missing conversion to float32 changes the results of the largest inputs.
    """
    weight = fused.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _NUM_ROWS, weight.shape[0], generator=generator)
    scales = torch.logspace(-3, 3, _NUM_ROWS)[None, :, None]
    inputs = (rows * scales).to(weight.device, weight.dtype)
    try:
        expected = module(inputs)
    except (TypeError, RuntimeError):
        # The module requires more arguments or an input of another shape, so it is not a plain
        # RMSNorm.
        return False
    actual = fused(inputs)
    if not isinstance(expected, Tensor):
        return False
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    row_differences = (actual.float() - expected.float()).abs().amax(-1)
    row_maxima = expected.float().abs().amax(-1)
    return bool((row_differences <= _TOLERANCE[weight.dtype] * row_maxima).all())
