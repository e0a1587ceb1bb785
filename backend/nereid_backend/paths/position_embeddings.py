# SPDX-License-Identifier: Apache-2.0
"""Passes token positions to modules that otherwise derive positions from the cache length.

The decoders of some models (such as Bart) have no argument for positions. A module of the decoder
computes the positions from the length of the cache. In a step with several sequences, the lengths
differ, so these positions would be wrong. Such a module has the parameters `past_key_values_length`
and `position_ids`. A hook sets the argument `position_ids` to the positions of the step.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LENGTH, _POSITIONS = "past_key_values_length", "position_ids"


class PositionEmbeddings:
    """Passes correct positions to modules that would derive positions from the cache length."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Find the modules in `model` that derive positions from the length of the cache."""
        # Each item contains a module, and the index of `position_ids` among the parameters of the
        # module's `forward`.
        self._modules: list[tuple[torch.nn.Module, int]] = []
        for module in model.modules():
            if not isinstance(module, torch.nn.Embedding):
                continue
            names = list(inspect.signature(module.forward).parameters)
            if _LENGTH in names and _POSITIONS in names:
                self._modules.append((module, names.index(_POSITIONS)))

    @contextmanager
    def using(self, position_ids: Tensor) -> Iterator[None]:
        """Return a context manager that passes `position_ids` [batch, num_tokens] to modules."""
        with ExitStack() as hooks:
            for module, positions_index in self._modules:
                replace_positions = partial(_replace_positions, position_ids, positions_index)
                restore_batch = partial(_restore_batch, position_ids)
                pre_hook = module.register_forward_pre_hook(replace_positions, with_kwargs=True)
                hooks.callback(pre_hook.remove)
                hooks.callback(module.register_forward_hook(restore_batch).remove)
            yield


def _replace_positions(
    position_ids: Tensor,
    positions_index: int,
    module: torch.nn.Module,  # noqa: ARG001 - the signature of a hook
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's call, with `position_ids` as the positions.

    torch calls this forward pre-hook before each call of the module. Example for
    positions_index=2: the arguments (shape, length, positions) become the positional arguments
    (shape, length) and the keyword argument position_ids.

    Args:
        position_ids: [batch, num_tokens] int64, the new positions.
        positions_index: the index of the module's last parameter, `position_ids`.
        module: the module.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    args_without_positions = args[:positions_index]
    flat_positions = position_ids.flatten()  # the module accepts only one dimension
    return args_without_positions, {**kwargs, _POSITIONS: flat_positions}


def _restore_batch(
    position_ids: Tensor,
    module: torch.nn.Module,  # noqa: ARG001 - the signature of a hook
    args: tuple[Any, ...],  # noqa: ARG001
    output: Tensor,
) -> Tensor:
    """Reshape `output` to [batch, num_tokens, dim], and return the result."""
    if len(position_ids) == 1:
        return output
    return output.reshape(*position_ids.shape, -1)
