# SPDX-License-Identifier: Apache-2.0
"""Describes the forward paths (ways in which the engine can run a model), and builds them.

The module choose_path.py lists the forward paths: packed, rows, padded and single. A forward path
can have several variants, which differ in speed. The module choose_path.py tests these variants one
after another.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from transformers import AttentionMaskInterface

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.forward_path.length_limits import LengthLimit, sparse_limit
from nereid_backend.model.forward_path.make_kv_cache import make_blocks, make_copied_cache
from nereid_backend.model.forward_path.path_spec import PathSpec, set_attention
from nereid_backend.model.forward_path.probe_layers import (
    plain_token_ids,
    probe_layers,
    probe_recurrent_model,
)
from nereid_backend.paths.gathered_cache import CacheLayout, probe_cache
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.padded import PaddedPath
from nereid_backend.paths.recurrent import RowsPath
from nereid_backend.paths.row_keys import Blocks, GatheredKeys, HookedKeys, RowKeys
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.step_runner import ForwardPath


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
        max_model_len: the setting max_model_len; None if the setting has no value. `packed`
            supports a model with sparse attention only if this setting is small enough.

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


def _packed_variants(
    checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None
) -> Iterator[PathSpec]:
    """Yield the only variant of the forward path `packed`; see `packed_spec`.

    This function is a generator, so that its code runs only when the path is tried.
    """
    yield packed_spec(checkpoint, hook, max_model_len)


def packed_spec(checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None) -> PathSpec:
    """Return the `PathSpec` of the forward path `packed`, the fastest way to run a model.

    In this path, one row contains the tokens of all sequences, and Nereid's attention function
    (`hook`) reads keys and values from blocks. `max_model_len` is the setting, or None.

    Mutates: `checkpoint`, because its attention is set to `hook`.

    Raises:
        UnfitError: if the path cannot compute correct logits.
    """
    limit = sparse_limit(checkpoint.text_config)
    if limit is not None:
        _check_attention_is_dense(limit, max_model_len)
        # A model with sparse attention requests a mask from the function that is registered under
        # the name of the attention. Nereid's attention needs no mask, because `hook` hides later
        # tokens itself.
        AttentionMaskInterface.register(hook.name, _open_mask)
    set_attention(checkpoint, hook)
    layers = probe_layers(checkpoint, hook)

    def build(sizes: Sizes) -> ForwardPath:
        cache, builder = make_blocks(checkpoint, layers, sizes)
        return PackedPath(checkpoint, hook, cache, builder)

    return PathSpec("packed", build, layers, hook)


def _check_attention_is_dense(limit: LengthLimit, max_model_len: int | None) -> None:
    """Raise an UnfitError if sequences can be longer than the limit of dense attention.

    `limit` is the largest length at which the sparse attention of the model still attends to every
    earlier token. `max_model_len` is the setting, or None.
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
    attention of the model, the model's own attention. If neither works, the exception that the
    model raised with `hook` is raised again. A model's code can raise an exception of any class.
    """
    try:
        variants = _rows_variants_with_hook(checkpoint, hook)
    except Exception:
        variants = _rows_variants_with_own_attention(checkpoint)
        if not variants:
            raise
    yield from variants


def _rows_variants_with_hook(checkpoint: Checkpoint, hook: AttentionHook) -> list[PathSpec]:
    """Return the variants of the path `rows` that use Nereid's attention function (`hook`).

    In this path, a forward pass has one row for each sequence. `hook` reads keys and values
    directly from the blocks of the KV cache. The blocks are allocated by `make_keys`, which is
    called when the engine or a test builds the path of a variant.

    Mutates: `checkpoint`, because its attention is set to `hook`.

    Raises:
        Exception: of any class, if `hook` cannot compute the attention of the model.
    """
    set_attention(checkpoint, hook)
    layers = probe_recurrent_model(checkpoint, hook)

    def make_keys(sizes: Sizes) -> RowKeys:
        if not layers:  # The model has only convolutions and recurrences.
            return HookedKeys(checkpoint.model.config, hook, blocks=None)
        blocks = Blocks(*make_blocks(checkpoint, layers, sizes))
        return HookedKeys(checkpoint.model.config, hook, blocks)

    return _make_rows_variants(checkpoint, make_keys, layers, hook)


def _rows_variants_with_own_attention(checkpoint: Checkpoint) -> list[PathSpec]:
    """Return the variants of the path `rows` that use the model's own attention.

    In this path, a forward pass has one row for each sequence. Before each pass, the keys and
    values of the sequences are copied from the blocks of the KV cache to tensors that the model's
    attention can read. The result is empty if the model has no recurrent state, or if blocks cannot
    contain its keys and values.
    """
    layout = _layout_with_states(checkpoint)
    if layout is None:
        return []

    def make_keys(sizes: Sizes) -> RowKeys:
        kv_cache = make_copied_cache(checkpoint, layout.layers, sizes)
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
        uses_generated_reference=True,
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
        uses_generated_reference=True,
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
        cache = make_copied_cache(checkpoint, layout.layers, sizes)
        return PaddedPath(checkpoint, layout, cache, batches_sequences=batches_sequences)

    return PathSpec(name, build, layout.layers)
