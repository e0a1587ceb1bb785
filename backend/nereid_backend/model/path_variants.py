# SPDX-License-Identifier: Apache-2.0
"""Describes the forward paths (ways in which the engine can run a model), and builds them.

The module choose_path.py lists the forward paths: packed, rows, padded and single. A forward path
can have several variants, which differ in speed. The module choose_path.py tests these variants one
after another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import AttentionMaskInterface

from nereid_backend.attention.choose_backend import (
    checked_cache_class,
    rounded_cache_class,
    step_layout,
    unrounded_cache_class,
)
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.length_limits import LengthLimit, sparse_limit
from nereid_backend.model.probe_layers import plain_token_ids, probe_layers, probe_recurrent_model
from nereid_backend.paths.gathered_cache import CacheLayout, probe_cache
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.padded import PaddedPath
from nereid_backend.paths.recurrent import RowsPath
from nereid_backend.paths.row_keys import GatheredKeys, HookedKeys, RowKeys
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.step_runner import ForwardPath


@dataclass(frozen=True, slots=True)
class PathSpec:
    """Describes one way in which the engine can run a certain model (a forward path).

    Attributes:
        name: "packed", "rows", "padded" or "single".
        build: builds the path with the given sizes.
        layers: the attention layers whose keys and values are stored in blocks.
        hook: the attention that the model must use, or None for the model's own attention.
        detail: a clause that describes a variant of the path, for the log; empty for the normal
            variant.
        bytes_per_sequence: the number of bytes outside of blocks that a running sequence needs.
        bytes_per_token: the number of bytes outside of blocks that a token needs.
        shares_blocks: whether the blocks of a sequence contain its whole state. If True, sequences
            with the same tokens can share blocks, and tokens can be removed from the end of a
            sequence. If False, speculative decoding is off, and the prefix cache is on only if
            `has_snapshots` is True.
        whole_prefill: whether a prompt must be computed in one forward pass.
        is_batched: whether several sequences share a forward pass.
        has_snapshots: whether a sequence gets the same logits if it continues from a copy of its
            recurrent state. If True, there is a prefix cache even if `shares_blocks` is False.
        uses_generated_trial: whether the logits of the path are compared with transformers'
            generate. If False, they are compared with one pass over each whole test sequence.
    """

    name: str
    build: Callable[[Sizes], ForwardPath]
    layers: list[LayerSpec]
    hook: AttentionHook | None = None
    detail: str = ""
    bytes_per_sequence: int = 0
    bytes_per_token: int = 0
    shares_blocks: bool = True
    whole_prefill: bool = False
    is_batched: bool = True
    has_snapshots: bool = False
    uses_generated_trial: bool = False

    @property
    def removes_tokens(self) -> bool:
        """Whether tokens, for example draft tokens, can be removed from the end of a sequence."""
        return self.shares_blocks and not self.whole_prefill


def path_variants(
    checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None
) -> list[tuple[str, Iterator[PathSpec]]]:
    """Return the name and the variants of each way to run a model, from the fastest to the slowest.

    The caller tries the variants in this order. The ways differ in the rows of a forward pass:

    - `packed`: one row with the tokens of all sequences.
    - `rows`: one row for each sequence. This way is for models with recurrent states.
    - `padded`: one row for each sequence, padded to the length of the longest row.
    - `single`: one row with one sequence.

    Args:
        checkpoint: a loaded model.
        hook: Nereid's attention function, which transformers calls in each layer.
        max_model_len: the setting max_model_len; None if it is not set. `packed` supports a model
            with sparse attention only if this setting is small enough.

    Returns:
        Pairs of a name and an iterator. The iterator creates a variant when the caller requests
        it. If the model cannot use the path, the iterator raises an exception.
    """
    return [
        ("packed", _packed_variants(checkpoint, hook, max_model_len)),
        ("rows", _rows_variants(checkpoint, hook)),
        ("padded", _padded_variants(checkpoint)),
        ("single", _single_variants(checkpoint)),
    ]


def set_attention(checkpoint: Checkpoint, hook: AttentionHook | None) -> None:
    """Let a model call Nereid's attention function (`hook`), or its own attention code.

    A forward path that stores keys and values in blocks needs Nereid's attention function. The
    logits of the unmodified model are computed with the model's own attention.

    Args:
        checkpoint: the model. Mutated.
        hook: Nereid's attention function, which transformers then calls in each layer. None
            selects the model's own attention in torch.

    Raises:
        UnfitError: if the attention of the model cannot be set.
    """
    if not checkpoint.takes_hook:
        if hook is not None:
            raise UnfitError("it does not use transformers' attention interface")
        return
    name = "eager" if hook is None else hook.name
    checkpoint.model.set_attn_implementation(name)
    # If transformers cannot change the attention of a model, it only logs a warning. Raise an error
    # in this case, because the model would use its own attention without the masks that this
    # attention needs.
    config = checkpoint.model.config
    actual = getattr(config, "text_config", config)._attn_implementation
    if actual != name:
        raise UnfitError(f"its attention cannot be changed from {actual}")


def _packed_variants(
    checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None
) -> Iterator[PathSpec]:
    """Yield the only variant of `packed`, which is a way to run a model; see `packed_spec`.

    This function is a generator, so that its code runs only when the path is tried.
    """
    yield packed_spec(checkpoint, hook, max_model_len)


def packed_spec(checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None) -> PathSpec:
    """Return the `PathSpec` of the forward path `packed`, the fastest way to run a model.

    In this path, one row contains the tokens of all sequences, and Nereid's attention function
    (`hook`) reads keys and values from blocks. `max_model_len` is the setting, or None.

    Mutates: `checkpoint`, because its attention is set.

    Raises:
        UnfitError: if the path cannot compute correct logits.
    """
    limit = sparse_limit(checkpoint.text_config)
    if limit is not None:
        _check_attention_is_dense(limit, max_model_len)
        # Up to the limit, sparse attention attends to every earlier token. Nereid's attention
        # function hides later tokens itself, so no mask is needed. However, the model's code
        # requests a mask from the function that is registered under `hook.name`.
        AttentionMaskInterface.register(hook.name, _open_mask)
    set_attention(checkpoint, hook)
    layers = probe_layers(checkpoint, hook)

    def build(sizes: Sizes) -> ForwardPath:
        cache, builder = make_blocks(checkpoint, layers, sizes)
        return PackedPath(checkpoint, hook, cache, builder)

    return PathSpec("packed", build, layers, hook)


def _check_attention_is_dense(limit: LengthLimit, max_model_len: int | None) -> None:
    """Check that no sequence is so long that the model attends to only some of the earlier tokens.

    `limit` is the largest length at which the sparse attention of the model still attends to every
    earlier token. `max_model_len` is the setting, or None.

    Raises:
        UnfitError: if sequences can be longer than the limit.
    """
    if max_model_len is None or max_model_len > limit.num_tokens:
        raise UnfitError(
            f"the model uses sparse attention for sequences of more than {limit.num_tokens} tokens "
            f"({limit.reason}). This forward path does not support sparse attention, so "
            f"max_model_len must be at most {limit.num_tokens}"
        )


def _open_mask(*, device: torch.device, **kwargs: object) -> torch.Tensor:  # noqa: ARG001
    """Return a mask that hides no token. transformers calls this function to get a mask."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _rows_variants(checkpoint: Checkpoint, hook: AttentionHook) -> Iterator[PathSpec]:
    """Yield the variants of the forward path `rows`, from the fastest to the slowest.

    This path is for models with convolutions or recurrences. A pass has one row for each sequence.
    The variants use Nereid's attention function (`hook`) or, if this function cannot compute the
    attention of the model, the model's own attention.

    Raises:
        Exception: of any class, if the model cannot use the path. The error is the reason why the
            model cannot use Nereid's attention function.
    """
    try:
        variants = _rows_variants_with_hook(checkpoint, hook)
    except Exception:  # a model's code can raise any exception
        variants = _rows_variants_with_own_attention(checkpoint)
        if not variants:
            raise
    yield from variants


def _rows_variants_with_hook(checkpoint: Checkpoint, hook: AttentionHook) -> list[PathSpec]:
    """Describe the ways to run a model in the path `rows` with Nereid's attention function.

    In this path, a forward pass has one row for each sequence. The attention function (`hook`)
    reads keys and values directly from the blocks of the KV cache.

    Mutates: `checkpoint`, because its attention is set to `hook`.

    Raises:
        Exception: of any class, if `hook` cannot compute the attention of the model.
    """
    set_attention(checkpoint, hook)
    layers = probe_recurrent_model(checkpoint, hook)

    def make_keys(sizes: Sizes) -> RowKeys:
        # A model with only convolutions and recurrences has no attention layers.
        blocks = make_blocks(checkpoint, layers, sizes) if layers else None
        return HookedKeys(checkpoint.model.config, hook, blocks)

    return _make_rows_variants(checkpoint, make_keys, layers, hook)


def _rows_variants_with_own_attention(checkpoint: Checkpoint) -> list[PathSpec]:
    """Return those variants of the forward path `rows` that use the model's own attention.

    Before each pass, the keys and values of the sequences are copied from blocks to tensors that
    the model's attention can read. The result is empty if the model does not support this.
    """
    layout = _layout_with_states(checkpoint)
    if layout is None:
        return []

    def make_keys(sizes: Sizes) -> RowKeys:
        kv_cache = _make_copied_cache(checkpoint, layout.layers, sizes)
        return GatheredKeys(checkpoint.model.config, layout, kv_cache)

    detail = "keys and values are copied from blocks"
    return _make_rows_variants(checkpoint, make_keys, layout.layers, detail=detail)


def _layout_with_states(checkpoint: Checkpoint) -> CacheLayout | None:
    """Run a model with recurrent states on one token, and return what its cache stores.

    Return None if blocks cannot contain the keys and values of the model, or if the model has no
    recurrent state. A model without such a state can use the forward path `padded`.

    Mutates: the checkpoint. After the call, the model uses its own attention.
    """
    set_attention(checkpoint, None)
    token_id = plain_token_ids(checkpoint)[0]
    try:
        layout = probe_cache(checkpoint, token_id, accepts_states=True)
    except Exception:  # noqa: BLE001 - a model's code can raise any exception
        return None
    return layout if layout.has_states else None


def _make_rows_variants(
    checkpoint: Checkpoint,
    make_keys: Callable[[Sizes], RowKeys],
    layers: list[LayerSpec],
    hook: AttentionHook | None = None,
    detail: str = "",
) -> list[PathSpec]:
    """Return three variants of the forward path `rows`, from the fastest to the slowest.

    The first variant divides prompts into chunks. The second variant processes each prompt in one
    pass. The third variant also computes a preempted sequence again in the same passes as before
    the preemption: first the prompt, then each output token.

    Args:
        checkpoint: the model.
        make_keys: creates the storage of the keys and values.
        layers: the attention layers whose keys and values are stored in blocks.
        hook: Nereid's attention function; None for the model's own attention.
        detail: a note about all variants for the log; "" if there is none.
    """

    def build(
        sizes: Sizes, *, computes_from_start: bool, replays_preempted: bool = False
    ) -> RowsPath:
        return RowsPath(
            checkpoint,
            make_keys(sizes),
            computes_from_start=computes_from_start,
            replays_preempted=replays_preempted,
        )

    chunked = PathSpec(
        "rows",
        partial(build, computes_from_start=False),
        layers,
        hook,
        detail,
        shares_blocks=False,  # The blocks do not contain the recurrent state of a sequence.
    )
    one_pass = "each prompt is computed in one pass, because chunks give other logits"
    whole = replace(
        chunked,
        build=partial(build, computes_from_start=True),
        detail=f"{detail}; {one_pass}" if detail else one_pass,
        whole_prefill=True,
    )
    # For some models, one pass over a whole sequence gives other logits than token-by-token
    # generation. The third variant is for these models. Its logits are compared with the logits of
    # transformers' generate, which also generates token by token.
    replaying = replace(
        whole,
        build=partial(build, computes_from_start=True, replays_preempted=True),
        uses_generated_trial=True,
    )
    return [chunked, whole, replaying]


def _padded_variants(checkpoint: Checkpoint) -> Iterator[PathSpec]:
    """Yield the only variant of the forward path `padded`."""
    yield _padded_spec(checkpoint, "padded", batches_sequences=True)


def _single_variants(checkpoint: Checkpoint) -> Iterator[PathSpec]:
    """Yield the variants of the forward path `single`, from the fastest to the slowest.

    The first variant stores keys and values in blocks; some models do not support this variant. The
    second variant uses the cache of the model's own code. The third variant has no cache.
    """
    in_blocks = _single_spec_in_blocks(checkpoint)
    if in_blocks is not None:
        yield in_blocks
    with_cache = PathSpec(
        "single",
        lambda _sizes: SinglePath(checkpoint, uses_cache=True),
        layers=[],  # Nothing is stored in blocks.
        detail="with the model's own cache",
        shares_blocks=False,  # There are no blocks that sequences could share.
        whole_prefill=True,  # A prompt is computed in one pass.
        is_batched=False,
        # This path calls the model as transformers' generate does: first with the prompt, then with
        # one token at a time. The logits are therefore compared with those of generate. One pass
        # over the whole sequence could give other logits.
        uses_generated_trial=True,
    )
    yield with_cache
    yield replace(
        with_cache,
        build=lambda _sizes: SinglePath(checkpoint, uses_cache=False),
        detail="each token requires a pass over its whole sequence",
    )


def _single_spec_in_blocks(checkpoint: Checkpoint) -> PathSpec | None:
    """Return the variant of the forward path `single` that stores keys and values in blocks.

    Return None if the data in the model's cache cannot be stored in blocks.
    """
    try:
        spec = _padded_spec(checkpoint, "single", batches_sequences=False)
    except (UnfitError, ValueError, TypeError, AttributeError):
        return None
    return replace(spec, detail="with keys and values in blocks", is_batched=False)


def _padded_spec(checkpoint: Checkpoint, name: str, *, batches_sequences: bool) -> PathSpec:
    """Return a `PathSpec` that builds a `PaddedPath`.

    A `PaddedPath` passes a cache object to the model. This object copies keys and values from the
    blocks of a KV cache.

    Args:
        checkpoint: the model. Its attention is set to its own attention.
        name: the name of the path.
        batches_sequences: whether a pass computes several sequences.

    Raises:
        UnfitError: if the model's cache cannot be stored in blocks.
    """
    set_attention(checkpoint, None)
    # Run the model with one token to find out what its cache stores. Use no special token, because
    # a special token (such as the placeholder of an image) can change the forward pass.
    token_id = plain_token_ids(checkpoint)[0]
    layout = probe_cache(checkpoint, token_id)

    def build(sizes: Sizes) -> ForwardPath:
        cache = _make_copied_cache(checkpoint, layout.layers, sizes)
        return PaddedPath(checkpoint, layout, cache, batches_sequences=batches_sequences)

    return PathSpec(name, build, layout.layers)


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
    unrounded_class = unrounded_cache_class(block_size, dtype, checkpoint.device)
    # With the setting "auto", nothing is rounded, and this call returns `unrounded_class`.
    candidate = rounded_cache_class(unrounded_class, kv_cache_dtype)
    # This call returns the candidate. However, if the GPU kernels of the candidate compute wrong
    # results, the call returns a class whose attention is computed in plain torch.
    return checked_cache_class(candidate, layers, block_size, dtype, checkpoint.device)


def _make_copied_cache(checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes) -> KVCache:
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
