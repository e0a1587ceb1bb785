# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: what every faster kernel is compared with.

Decodes of similar length are one gather and two batched matrix products; a prefill is one call
of torch's fused attention, or goes step by step where that lacks something (softcap, sinks).
"""

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.attention_batch import AttentionBatch
from nereid_backend.attention.kv_cache import KVCache, gather_rows
from nereid_backend.attention.layers import LayerSpec

_MAX_SCORES = 2**25
_MAX_ROWS = 64


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: tuple[int, LayerSpec],
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one packed step in one layer; its keys and values are in the cache already.

    Args:
        inputs: query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens, key_dim] and
            value [num_kv_heads, num_tokens, value_dim] of the step's own tokens.
        layer: its number in the cache, and what it needs.
        cache: holds the step's keys and values, too.
        batch: where everything is.
        scale: factor on the scores.
        sinks: [num_heads], or None.

    Returns:
        [num_tokens, num_heads, value_dim] in the query's dtype.
    """
    query, _, value = inputs
    number, spec = layer
    parts: list[Tensor] = []
    if batch.num_decodes:
        rows = query[:, : batch.num_decodes].transpose(0, 1)
        out = value.new_empty(batch.num_decodes, spec.num_heads, spec.value_dim)
        for group in batch.decodes:
            tokens = slice(None) if group.tokens is None else group.tokens
            keys, values = cache.gather(number, group.rows(spec.span, spec.num_kv_heads))
            bias = group.view(spec.span).bias
            taken = (rows[tokens].unsqueeze(2), keys, values)
            out[tokens] = _stepwise(taken, bias, spec, scale, sinks).squeeze(2)
        parts.append(out)
    if batch.prefills:
        parts.append(_attend_prefills(inputs, layer, cache, batch, scale, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_prefills(
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: tuple[int, LayerSpec],
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """The part of `attend` for the tokens behind the decodes, of which there must be some."""
    query, key, value = inputs
    number, spec = layer
    parts: list[Tensor] = []
    for index, prefill in enumerate(batch.prefills):
        # A cache that rounds is read even for what is new: then an answer does not depend on how
        # its prompt was cut.
        if prefill.num_cached == 0 and cache.keys[number].dtype == key.dtype:
            keys = key[None, :, prefill.start : prefill.end]
            values = value[None, :, prefill.start : prefill.end]
        else:
            keys, values = cache.gather(number, gather_rows(prefill.blocks, spec.num_kv_heads))
            keys, values = keys[:, :, : prefill.seq_len], values[:, :, : prefill.seq_len]
        mask = None
        if prefill.num_cached or spec.span.hides_at(prefill.seq_len):
            mask = batch.prefill_mask(index, spec.span)
        rows = query[None, :, prefill.start : prefill.end]
        out = _prefill((rows, keys, values), mask, spec, scale, sinks)
        parts.append(out.squeeze(0).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    spec: LayerSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of several tokens of one sequence.

    Shapes: query [1, num_heads, q, key_dim], key and value [1, num_kv_heads, k, dim], mask [q, k]
    bool, or None: plain causal with nothing cached; returns [1, num_heads, q, value_dim].
    """
    query, key, value = inputs
    # On a CPU torch's fused attention computes bfloat16 no faster than float32, in which it is
    # fast; batched products take a half to two thirds of its time.
    is_slow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if spec.softcap is None and sinks is None and not is_slow:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril_()
    # Slices of queries are independent. They keep the scores small, and need no key behind them.
    rows = min(_MAX_ROWS, max(1, _MAX_SCORES // (spec.num_heads * num_keys)))
    num_cached = num_keys - num_queries
    parts = []
    for start in range(0, num_queries, rows):
        end = min(start + rows, num_queries)
        seen = num_cached + end
        hidden = ~mask[start:end, :seen]
        bias = torch.zeros(hidden.shape, device=mask.device).masked_fill_(hidden, float("-inf"))
        taken = (query[:, :, start:end], key[:, :, :seen], value[:, :, :seen])
        parts.append(_stepwise(taken, bias, spec, scale, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _stepwise(
    inputs: tuple[Tensor, Tensor, Tensor],
    bias: Tensor,
    spec: LayerSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a batch of sequences by its definition, softmax in float32.

    Shapes: query [n, num_heads, q, key_dim], key and value [n, num_kv_heads, k, dim], bias
    broadcastable to [n, 1, q, k] float32; returns [n, num_heads, q, value_dim].
    """
    query, key, value = inputs
    count, num_heads, num_queries, dim = query.shape
    num_kv_heads = key.shape[1]
    # Query heads that share a key head become rows of one product.
    grouped = query.reshape(count, num_kv_heads, -1, dim)
    scores = (grouped @ key.transpose(2, 3)).float().mul_(scale)
    scores = scores.view(count, num_heads, num_queries, -1)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores += bias
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(count, -1, num_queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    grouped = weights.to(value.dtype).reshape(count, num_kv_heads, -1, scores.shape[-1])
    return (grouped @ value).view(count, num_heads, num_queries, -1)
