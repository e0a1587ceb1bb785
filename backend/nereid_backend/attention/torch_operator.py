# SPDX-License-Identifier: Apache-2.0
"""Paged attention as an operator of torch's, so that a traced model can call it.

What a step's attention must know cannot travel through a traced graph, so the operator takes it
from where `serving` has put it, in the thread that runs the step. Over a native cache a compiled
model calls it without Python (cpu_shim.cpp).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.interface import PagedForward, scale_of, sinks_of
from nereid_backend.errors import EngineError

_current = threading.local()


@contextmanager
def serving(forward: PagedForward) -> Iterator[None]:
    """Let the operator's calls in this thread be served by a step's attention meanwhile."""
    _current.forward = forward
    try:
        with forward.native():
            yield
    finally:
        _current.forward = None


class TracedForward:
    """Serves a model's attention calls while it is traced, by calls of the operator."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """See `AttentionForward`."""
        number = self._num_calls
        self._num_calls += 1
        found: Tensor = torch.ops.nereid.paged_attend(
            query, key, value, sinks_of(kwargs), number, scale_of(module, query, kwargs)
        )
        return found


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int, scale: float
) -> Tensor:
    """The n-th call of a step; shapes as in `AttentionForward`.

    The inputs may have more rows than the step has tokens, whose outputs are zero.
    """
    forward: PagedForward | None = getattr(_current, "forward", None)
    if forward is None:
        raise EngineError("a compiled model was called outside a step of the engine")
    surplus = query.shape[2] - forward.num_tokens
    if surplus:
        query, key, value = (part[:, :, :-surplus] for part in (query, key, value))
    out = forward.attend(layer, query, key, value, scale, sinks)
    if surplus:
        out = functional.pad(out, (0, 0, 0, 0, 0, surplus))
    return out.contiguous()


def _attend_meta(
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - the operator's arguments
    value: Tensor,
    sinks: Tensor | None,  # noqa: ARG001
    layer: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_library: Any = torch.library.Library("nereid", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "paged_attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale)"
    " -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("paged_attend", _attend, _device)
_library.impl("paged_attend", _attend_meta, "Meta")
