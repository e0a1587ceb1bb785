# SPDX-License-Identifier: Apache-2.0
"""The reference implementation of paged attention in plain torch.

The results of the kernels are compared with the results of this implementation. Decodes of similar
length are computed by one gather and two batched matrix products. A prefill is one call of torch's
fused attention. The fused attention does not support softcaps and sinks. If the layer has one of
these, the prefill is computed in slices of queries.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nereid_backend.attention.attention_batch import AttentionBatch, Prefill, hiding_bias
from nereid_backend.attention.kv_cache import KVCache, gather_rows
from nereid_backend.attention.layers import LayerSpec

# The queries of a prefill are divided into slices. A slice has at most `_MAX_SLICE_QUERIES` queries
# and at most `_MAX_SCORES` attention scores.
_MAX_SCORES = 2**25
_MAX_SLICE_QUERIES = 64

# The query, key and value of a step. The key and the value are None if the caller no longer has
# them. They are then read from the cache.
StepInputs = tuple[Tensor, Tensor | None, Tensor | None]


def attend(
    inputs: StepInputs,
    layer: int,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute one layer's attention for all new tokens of a step.

    A packed step contains the new tokens of several sequences in one row: first the decodes (one
    token each), then the prefills (several tokens each).

    Args:
        inputs: the step's query [num_heads, num_tokens, key_dim], key [num_kv_heads, num_tokens,
            key_dim] and value [num_kv_heads, num_tokens, value_dim]. If the key and the value are
            None, they are read from the cache.
        layer: the index of the layer in the cache.
        cache: the KV cache, which already contains the keys and values of this step.
        batch: the metadata of the step. The step has at least one token.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.

    Returns:
        [num_tokens, num_heads, value_dim] in the data type of the query.
    """
    query, _, _ = inputs
    parts: list[Tensor] = []
    if batch.num_decodes:
        parts.append(_attend_decodes(query, layer, cache, batch, scale, sinks))
    if batch.prefills:
        parts.append(_attend_prefills(inputs, layer, cache, batch, scale, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decodes(
    query: Tensor,
    layer: int,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention for the sequences that add one token in this step.

    The tokens of these sequences, which are called decodes, are the first tokens of `query`,
    [num_heads, num_tokens, key_dim]. All keys and values are read from the cache. `attend`
    documents the other arguments.

    Returns:
        The output of attention, [num_decodes, num_heads, value_dim].
    """
    spec = cache.layers[layer]
    decode_queries = query[:, : batch.num_decodes].transpose(0, 1)  # [decodes, num_heads, key_dim]
    out = query.new_empty(batch.num_decodes, spec.num_heads, spec.value_dim)
    for group in batch.decodes:
        # `group.tokens` is None if the group contains all decodes of the step.
        tokens = slice(None) if group.tokens is None else group.tokens
        # Copy the blocks that overlap the attention window. The bias is -inf for the tokens of
        # these blocks that are outside the window, and 0 for all other tokens.
        cache_rows = group.rows(spec.window, spec.num_kv_heads)
        keys, values = cache.gather(layer, cache_rows)
        bias = group.visible(spec.window).bias
        # `_attend_stepwise` expects a dimension for the queries of a sequence. The size of this
        # dimension is 1, because a decode has one query.
        group_query = decode_queries[tokens].unsqueeze(2)  # [num_seqs, num_heads, 1, key_dim]
        group_out = _attend_stepwise((group_query, keys, values), bias, spec, scale, sinks)
        out[tokens] = group_out.squeeze(2)
    return out


def _attend_prefills(
    inputs: StepInputs,
    layer: int,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of all prefills in a step, [num_tokens, num_heads, value_dim].

    A prefill is a sequence that adds several tokens. The step must have at least one prefill.
    `attend` documents the arguments. A prefill whose tokens attend to all earlier tokens gets no
    mask, because torch is faster without a mask.
    """
    query, _, _ = inputs
    spec = cache.layers[layer]
    parts: list[Tensor] = []
    for index, prefill in enumerate(batch.prefills):
        keys, values = _keys_and_values(inputs, layer, cache, prefill)
        needs_mask = not _attends_to_all_earlier_tokens(prefill, spec)
        mask = batch.prefill_mask(index, spec.window) if needs_mask else None
        prefill_query = query[None, :, prefill.start : prefill.end]
        out = _attend_prefill((prefill_query, keys, values), mask, spec, scale, sinks)
        parts.append(out.squeeze(0).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attends_to_all_earlier_tokens(prefill: Prefill, spec: LayerSpec) -> bool:
    """Return whether a prefill has no cached tokens and is not longer than the attention window.

    Such a prefill needs no mask, because torch has a faster mode for this case.
    """
    limit = spec.window.limit
    fits_into_window = limit is None or prefill.seq_len <= limit
    return prefill.num_cached == 0 and fits_into_window


def _keys_and_values(
    inputs: StepInputs, layer: int, cache: KVCache, prefill: Prefill
) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of all tokens of a prefill's sequence.

    The keys and values in `inputs` are returned if possible. In three cases, all keys and values
    are instead copied from the cache, which already contains the keys and values of this step:
    - The sequence has cached tokens, whose keys and values are not in `inputs`.
    - The cache stores rounded numbers.
    - The key and the value in `inputs` are None, because the caller no longer has them.

    Returns:
        The keys, [1, num_kv_heads, seq_len, key_dim], and the values, [1, num_kv_heads, seq_len,
        value_dim].
    """
    query, key, value = inputs
    # If the cache stores rounded numbers, use the rounded numbers even for the tokens of this step.
    # Otherwise, the answer would depend on the chunks into which the prompt is divided.
    has_rounded_cache = cache.keys[layer].dtype != query.dtype
    must_read_cache = has_rounded_cache or prefill.num_cached > 0
    if not must_read_cache and key is not None and value is not None:
        tokens = slice(prefill.start, prefill.end)
        return key[None, :, tokens], value[None, :, tokens]
    num_kv_heads = cache.layers[layer].num_kv_heads
    keys, values = cache.gather(layer, gather_rows(prefill.blocks, num_kv_heads))
    return keys[:, :, : prefill.seq_len], values[:, :, : prefill.seq_len]


def _attend_prefill(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    spec: LayerSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of several new tokens of one sequence, [1, num_heads, q, value_dim].

    Args:
        inputs: the query [1, num_heads, q, key_dim], the key [1, num_kv_heads, k, key_dim] and the
            value [1, num_kv_heads, k, value_dim], for q new tokens and k tokens of the sequence.
        mask: [q, k] bool, True if the new token attends to the token of the sequence. None means
            that the sequence has no cached tokens, and each token attends to itself and to all
            earlier tokens.
        spec: the properties of the layer.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.
    """
    query, key, value = inputs
    # In bfloat16 on a CPU, batched matrix products compute the attention in one half to two thirds
    # of the time that torch's fused attention takes.
    is_fused_slow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    supports_fused = spec.softcap is None and sinks is None
    if supports_fused and not is_fused_slow:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
    if mask is None:
        shape = (query.shape[2], key.shape[2])
        # A token attends to itself and to all earlier tokens, so the lower triangle of the mask is
        # True.
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril_()
    # Computing the attention scores of all queries at once would need much memory, so only a few
    # queries are processed at a time.
    return _attend_in_query_slices(inputs, mask, spec, scale, sinks)


def _attend_in_query_slices(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    spec: LayerSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of several new tokens, a few queries at a time, to save memory.

    Example: there are 100 queries, and a slice can have 40 queries. The slices contain the queries
    0 to 39, 40 to 79 and 80 to 99. If no tokens are cached, the first slice reads only the keys 0
    to 39.

    Args:
        inputs: the query [1, num_heads, q, key_dim], the key [1, num_kv_heads, k, key_dim] and the
            value [1, num_kv_heads, k, value_dim], for q new tokens and k tokens of the sequence.
        mask: [q, k] bool, True if the new token attends to the token of the sequence.
        spec: the properties of the layer.
        scale: the factor by which the scores are multiplied.
        sinks: the attention sinks, [num_heads]; None if the layer has no sinks.

    Returns:
        [1, num_heads, q, value_dim].
    """
    query, key, value = inputs
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    num_cached = num_keys - num_queries
    # The attention scores of a slice have the shape [num_heads, slice_size, num_keys]. Their number
    # is limited to `_MAX_SCORES`. Short slices also save time, because the keys after the last
    # query of a slice are not read.
    scores_per_query = spec.num_heads * num_keys
    slice_size = max(1, min(_MAX_SLICE_QUERIES, _MAX_SCORES // scores_per_query))
    parts = []
    for start in range(0, num_queries, slice_size):
        end = min(start + slice_size, num_queries)
        # No query of the slice attends to a key after the slice, so these keys are not read.
        num_read_keys = num_cached + end
        bias = hiding_bias(~mask[start:end, :num_read_keys])
        slice_inputs = (
            query[:, :, start:end],
            key[:, :, :num_read_keys],
            value[:, :, :num_read_keys],
        )
        parts.append(_attend_stepwise(slice_inputs, bias, spec, scale, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_stepwise(
    inputs: tuple[Tensor, Tensor, Tensor],
    bias: Tensor,
    spec: LayerSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of some sequences without torch's fused attention function.

    The softmax is computed in float32. The bias, 0 or -inf, is added to the scores. A key with the
    bias -inf gets the weight 0.

    Shapes: query [n, num_heads, q, key_dim], key and value [n, num_kv_heads, k, dim]. `bias` is
    float32 and can be broadcast to [n, 1, q, k]. The result is [n, num_heads, q, value_dim].
    """
    query, key, value = inputs
    num_seqs, num_heads, num_queries, key_dim = query.shape
    _, num_kv_heads, num_keys, _ = key.shape
    # The queries of all heads that share a key head become the rows of one matrix, so that one
    # matrix product computes the scores of these heads. The shape of `grouped_query` is [n,
    # num_kv_heads, heads_per_kv_head * q, key_dim].
    grouped_query = query.reshape(num_seqs, num_kv_heads, -1, key_dim)
    scores = (grouped_query @ key.transpose(2, 3)).float().mul_(scale)
    scores = scores.view(num_seqs, num_heads, num_queries, num_keys)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores += bias
    weights = scores.softmax(-1) if sinks is None else _softmax_with_sinks(scores, sinks)
    grouped_weights = weights.to(value.dtype).reshape(num_seqs, num_kv_heads, -1, num_keys)
    return (grouped_weights @ value).view(num_seqs, num_heads, num_queries, -1)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of each query's scores. The sink of the head is an additional score.

    A sink is a score that each head has in addition to the scores of the keys. It belongs to no
    key, so the weights of the keys sum to less than 1.

    Shapes: scores [n, num_heads, q, k], sinks [num_heads]. The result has the shape of `scores`.
    """
    num_seqs, num_heads, num_queries, num_keys = scores.shape
    sink_scores = sinks.float().view(1, num_heads, 1, 1)
    sink_column = sink_scores.expand(num_seqs, num_heads, num_queries, 1)
    weights = torch.cat([scores, sink_column], dim=-1).softmax(-1)
    return weights[..., :num_keys]
