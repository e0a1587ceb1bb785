# SPDX-License-Identifier: Apache-2.0
"""Paged attention as a torch operator, so that torch can trace and compile a model.

The metadata of a step cannot be an argument of a traced graph. Therefore, `serving` stores the
metadata in a thread-local variable, and the operator reads this variable. If the cache is a
CpuKVCache, compiled models call the kernels without Python (cpu_shim.cpp).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.transformers_hook import PagedForward, scale_of, sinks_of
from nereid_backend.errors import EngineError

_current = threading.local()


@contextmanager
def serving(forward: PagedForward) -> Iterator[None]:
    """Return a context manager that makes `paged_attend` use `forward` in the current thread."""
    _current.forward = forward
    try:
        with forward.native():
            yield
    finally:
        _current.forward = None


class TracedForward:
    """Calls the operator `paged_attend` for each attention layer of a traced model."""

    def __init__(self) -> None:
        """Create an instance for one forward pass."""
        self._num_calls = 0

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Compute one attention call; see `AttentionForward`."""
        number = self._num_calls
        self._num_calls += 1
        output: Tensor = torch.ops.nereid.paged_attend(
            query, key, value, sinks_of(kwargs), number, scale_of(module, query, kwargs)
        )
        return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int, scale: float
) -> Tensor:
    """Compute the attention of one layer in the step that runs in the current thread.

    A compiled model calls this function as a torch operator. Such a model may pad its inputs, so
    the inputs may have more tokens than the step. The outputs of the padding are zero. `layer` is
    the index of the layer.

    Shapes: query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads, num_tokens,
    dim]. The result is [1, num_tokens, num_heads, value_dim].
    """
    # The object that the engine has set for this step. The object contains the KV cache and the
    # block tables.
    forward = _current_forward()
    num_tokens = forward.num_tokens  # without padding
    num_padding = query.shape[2] - num_tokens
    if num_padding == 0:
        return forward.attend(layer, query, key, value, scale, sinks).contiguous()
    query = query[:, :, :num_tokens]
    key = key[:, :, :num_tokens]
    value = value[:, :, :num_tokens]
    out = forward.attend(layer, query, key, value, scale, sinks)
    _, _, num_heads, value_dim = out.shape
    padded = out.new_zeros(1, num_tokens + num_padding, num_heads, value_dim)
    padded[:, :num_tokens] = out
    return padded


def _current_forward() -> PagedForward:
    """Return the `PagedForward` that `serving` has set for the current thread.

    Raises:
        EngineError: if no step is running in the current thread.
    """
    forward: PagedForward | None = getattr(_current, "forward", None)
    if forward is None:
        raise EngineError("A compiled model was called outside of a step of the engine.")
    return forward


def _attend_meta(
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - required by the operator
    value: Tensor,
    sinks: Tensor | None,  # noqa: ARG001
    layer: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> Tensor:
    """Return an uninitialised tensor with the shape of the output, for torch's tracing."""
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_library: Any = torch.library.Library("nereid", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "paged_attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale)"
    " -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("paged_attend", _attend, _device)
_library.impl("paged_attend", _attend_meta, "Meta")
