# SPDX-License-Identifier: Apache-2.0
"""Computes attention on a CPU without a KV cache. Tokens attend only to tokens of the same text."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.attention.cpu.cpu_attention import native_rows, with_contiguous_rows
from nereid_backend.attention.cpu.cpu_library import (
    NativeLayer,
    NativeLayerStep,
    NativePrefill,
    NativeShape,
    has_kernels,
    kernels,
)


def can_attend(query: Tensor) -> bool:
    """Return whether the kernels support the device and the data type of `query`."""
    is_supported = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16)
    return is_supported and has_kernels()


@dataclass(frozen=True, slots=True)
class TextAttention:
    """The attention options of one layer.

    Attributes:
        scale: the factor of the scores.
        is_causal: whether a token attends only to itself and to earlier tokens.
        window: a token attends only to tokens whose distance is smaller than `window`. None means
            no limit.
        softcap: if set, scores s become softcap * tanh(s / softcap).
        sinks: an additional score for each head, [num_heads]. No value belongs to this score.
    """

    scale: float
    is_causal: bool
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def native_texts(lens: Sequence[int]) -> "ctypes.Array[NativePrefill]":
    """Return a C struct for each of several concatenated texts: the text's start and length."""
    texts = (NativePrefill * len(lens))()
    first_token = 0
    for text, length in zip(texts, lens, strict=True):
        text.first = first_token
        text.num_tokens = length
        first_token += length
    return texts


def attend_texts(
    inputs: tuple[Tensor, Tensor, Tensor],
    texts: "ctypes.Array[NativePrefill]",
    attention: TextAttention,
) -> Tensor:
    """Compute one attention layer for the tokens of several texts, without a KV cache.

    A token attends only to tokens of its own text.

    Args:
        inputs: the queries [num_heads, num_tokens, key_dim], the keys [num_kv_heads, num_tokens,
            key_dim] and the values [num_kv_heads, num_tokens, value_dim]. `can_attend` must be
            true for the queries.
        texts: one C struct for each text, with its first token and its number of tokens; see
            `native_texts`.
        attention: the options of the layer.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the queries.
    """
    # The kernels get only pointers. These variables keep the tensors in memory until the call
    # returns.
    query, key, value = (with_contiguous_rows(tensor) for tensor in inputs)
    sinks = None if attention.sinks is None else attention.sinks.float().contiguous()
    num_heads, num_tokens, key_dim = query.shape
    num_kv_heads, _, value_dim = value.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    shape = NativeShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=attention.window or 0,
        is_bidirectional=not attention.is_causal,
        scale=attention.scale,
        softcap=attention.softcap or 0.0,
    )
    layer = NativeLayer(shape=shape, is_bfloat16=query.dtype is torch.bfloat16)
    step = NativeLayerStep(
        query=native_rows(query),
        keys=native_rows(key),
        values=native_rows(value),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
    )
    kernels().nereid_attend_prefills(
        ctypes.byref(layer), texts, len(texts), ctypes.byref(step), torch.get_num_threads()
    )
    return out
