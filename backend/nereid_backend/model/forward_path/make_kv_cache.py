# SPDX-License-Identifier: Apache-2.0
"""Creates the KV cache of a model, with the fastest attention whose results are correct."""

from nereid_backend.attention.choose_backend import (
    checked_cache_class,
    rounded_cache_class,
    step_layout,
    unrounded_cache_class,
)
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.paths.model_call import Sizes
from nereid_backend.paths.step_batch import BatchBuilder


def make_blocks(
    checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes
) -> tuple[KVCache, BatchBuilder]:
    """Create a KV cache, and an object that builds the input tensors of each forward pass.

    `layers` are the attention layers whose keys and values the cache stores. `sizes` contains the
    number and the size of the blocks, and the data type of the cache. The builder also stores the
    block tables of the running sequences.
    """
    kind = cache_class(checkpoint, layers, sizes.block_size, sizes.kv_cache_dtype)
    cache = _make_cache(kind, checkpoint, layers, sizes)
    builder = BatchBuilder(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        null_block=cache.null_block,
        # `layout` describes how the GPU kernels divide prefills. It is None if no GPU kernels are
        # used.
        layout=step_layout(cache),
        num_groups=cache.num_groups,
    )
    return cache, builder


def cache_class(
    checkpoint: Checkpoint, layers: list[LayerSpec], block_size: int, kv_cache_dtype: str
) -> type[KVCache]:
    """Return the fastest class of KV caches whose attention computes correct results.

    Each class has its own memory layout and attention kernels.

    Args:
        checkpoint: the model.
        layers: the attention layers.
        block_size: the number of tokens in one block.
        kv_cache_dtype: the setting: "auto" (the data type of the model), "int8" or "fp8".
    """
    dtype = checkpoint.model.dtype
    fastest = unrounded_cache_class(block_size, dtype, checkpoint.device)
    if kv_cache_dtype != "auto":
        fastest = rounded_cache_class(fastest, kv_cache_dtype)
    # If the GPU kernels of the class compute wrong results, `checked_cache_class` returns a class
    # whose attention is computed in plain torch.
    return checked_cache_class(fastest, layers, block_size, dtype, checkpoint.device)


def make_copied_cache(checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes) -> KVCache:
    """Create a KV cache from which the model's own attention gets copies of the keys and values.

    The cache needs no attention kernels. `sizes.kv_cache_dtype` selects its data type.
    """
    kind = rounded_cache_class(KVCache, sizes.kv_cache_dtype)
    return _make_cache(kind, checkpoint, layers, sizes)


def _make_cache(
    kind: type[KVCache], checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes
) -> KVCache:
    """Create a KV cache of the class `kind`, with the sizes in `sizes`."""
    return kind(
        layers,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        dtype=checkpoint.model.dtype,
        device=checkpoint.device,
        groups=sizes.groups,
    )
