# SPDX-License-Identifier: Apache-2.0
"""Chooses the forward path of a model: the first of four paths that computes the right logits.

    packed    one row with all tokens, keys and values in blocks     models with only attention
    rows      one row for each sequence, state outside of blocks     convolutions, recurrences
    padded    padded rows, keys and values copied from blocks        models with own attention code
    single    one sequence at a time, with the model's own cache     all other models; slow

The right logits are those of the model alone: transformers' code computes each sequence in a pass
of its own, with the model's own attention. The paths are tried in the order of the table. The
choice never depends on the model's name. A path is not used if it fails or if its logits differ. If
no path can be used, loading fails with an error that gives the reason for each path.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from transformers import AttentionMaskInterface

from nereid_backend.attention.choose_backend import cache_type, proven_type, stored_type
from nereid_backend.attention.interface import AttentionHook
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.checkpoint import Checkpoint, Progress
from nereid_backend.config import EngineConfig
from nereid_backend.errors import UnsupportedModelError
from nereid_backend.model.limits import LengthLimit, model_limit, sparse_limit
from nereid_backend.model.probe_layers import plain_token_ids, probe_layers, probe_rows
from nereid_backend.model.self_check import (
    Trial,
    check_generation,
    check_path,
    make_generated_trial,
    make_trial,
)
from nereid_backend.paths.model_call import Sizes, UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.padded import PaddedPath, probe_cache
from nereid_backend.paths.recurrent import RowsPath
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.runner import ForwardPath


@dataclass(frozen=True, slots=True)
class PathSpec:
    """The description of a path for one model.

    Attributes:
        name: "packed", "rows", "padded" or "single".
        build: builds the path with the given sizes.
        layers: the attention layers whose keys and values are stored in blocks.
        detail: a clause that describes a variant of the path, for the log; empty for the normal
            variant.
        bytes_per_sequence: the memory outside of blocks that a running sequence needs.
        bytes_per_token: the memory outside of blocks that a token needs.
        shares_blocks: whether the whole state of a sequence is in its blocks.
        whole_prefill: whether a prompt must be computed in one forward pass.
        is_batched: whether several sequences share a forward pass.
        is_generated: whether the path is compared with transformers' generate instead of one pass
            over the whole sequence.
    """

    name: str
    build: Callable[[Sizes], ForwardPath]
    layers: list[LayerSpec]
    detail: str = ""
    bytes_per_sequence: int = 0
    bytes_per_token: int = 0
    shares_blocks: bool = True
    whole_prefill: bool = False
    is_batched: bool = True
    is_generated: bool = False


@dataclass(frozen=True, slots=True)
class ChosenPath:
    """The path that was chosen for a model.

    Attributes:
        spec: the path.
        difference: the relative difference between the path's logits and those of the model alone.
        limit: the length of a sequence up to which the path is exact.
        reasons: one clause for each earlier path, which says why that path is not used.
        trial: the test sequences and the logits of the model alone.
    """

    spec: PathSpec
    difference: float
    limit: LengthLimit
    reasons: list[str]
    trial: Trial


def choose_path(
    checkpoint: Checkpoint, hook: AttentionHook, config: EngineConfig, progress: Progress
) -> ChosenPath:
    """Choose the first exact path. The model then uses the attention of that path.

    Args:
        checkpoint: a loaded model.
        hook: the engine's entry in transformers' attention interface.
        config: the settings. max_model_len, block_size and kv_cache_dtype are used.
        progress: called with one line about the choice.

    Raises:
        UnsupportedModelError: if no path is exact. The message contains the reason for each path.
    """
    trials = _Trials(checkpoint, config)
    reasons: list[str] = []
    for name, candidates in _candidates(checkpoint, hook, config.max_model_len):
        try:
            spec, difference = _try(checkpoint, candidates, trials)
        except Exception as error:  # noqa: BLE001 - a model can raise any exception; then the path is not used
            reasons.append(f"{name}: {_reason(error)}")
            continue
        detail = f"; {spec.detail}" if spec.detail else ""
        reason = f" ({'; '.join(reasons)})" if reasons else ""
        warning = " This is slow." if spec.name == "single" else ""
        progress(f"path: {spec.name}{detail}{reason}.{warning}")
        limit = model_limit(checkpoint.text_config, is_batched=spec.is_batched)
        trial = trials.get(spec.layers, is_generated=spec.is_generated)
        return ChosenPath(spec, difference, limit, reasons, trial)
    raise UnsupportedModelError(
        f"{checkpoint.architecture} is not supported, because no path computes the same logits as "
        f"the model alone: {'; '.join(reasons)}."
    )


class _Trials:
    """The test sequences with the logits of the model alone. They are computed on first use."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self._checkpoint = checkpoint
        self._block_size = config.block_size
        self.kv_cache_dtype = config.kv_cache_dtype
        limit = model_limit(checkpoint.text_config).num_tokens
        self._max_len = min(limit, config.max_model_len or limit)
        # The key is the argument `is_generated` of `get`. The value is the trial, or the error that
        # explains why there is no trial.
        self._trials: dict[bool, Trial | UnfitError] = {}

    def get(self, layers: list[LayerSpec], *, is_generated: bool) -> Trial:
        """Return the test sequences and the expected logits.

        Args:
            layers: the attention layers of the path, whose windows the sequences must exceed.
            is_generated: whether the logits come from transformers' generate. If False, the logits
                come from one forward pass over each whole sequence.

        Mutates: if the trial is not cached, the model uses its own attention after the call.

        Raises:
            UnfitError: if the logits of one forward pass over a sequence differ from the logits of
                token-by-token generation.
        """
        if is_generated not in self._trials:
            set_attention(self._checkpoint, None)
            self._trials[is_generated] = self._make(layers, is_generated)
        trial = self._trials[is_generated]
        if isinstance(trial, Exception):
            raise trial
        return trial

    def _make(self, layers: list[LayerSpec], is_generated: bool) -> Trial | UnfitError:
        if is_generated:
            return make_generated_trial(self._checkpoint, self._max_len, self._block_size)
        trial = make_trial(self._checkpoint, layers, self._max_len, self._block_size)
        try:
            check_generation(self._checkpoint, trial)
        except UnfitError as error:
            return error
        except Exception:  # noqa: BLE001 - a model can raise any exception
            # The model cannot generate with transformers, so there is nothing to compare.
            return trial
        return trial


def set_attention(checkpoint: Checkpoint, hook: AttentionHook | None) -> None:
    """Set the attention implementation of a model.

    Args:
        checkpoint: the model. Mutated.
        hook: the engine's entry in transformers' attention interface; None selects the model's own
            attention in torch.

    Raises:
        UnfitError: if the attention of the model cannot be set.
    """
    if not checkpoint.takes_hook:
        if hook is not None:
            raise UnfitError("it does not use transformers' attention interface")
        return
    name = "eager" if hook is None else hook.name
    checkpoint.model.set_attn_implementation(name)
    # transformers only logs a warning if the attention of a model cannot be changed. Such a model
    # would run without masks.
    config = checkpoint.model.config
    actual = getattr(config, "text_config", config)._attn_implementation
    if actual != name:
        raise UnfitError(f"its attention cannot be changed from {actual}")


Candidates = Iterator[tuple[PathSpec, AttentionHook | None]]


def _candidates(
    checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None
) -> list[tuple[str, Candidates]]:
    """Return the name and the variants of each path. The variants are created on demand."""
    return [
        ("packed", _packed(checkpoint, hook, max_model_len)),
        ("rows", _rows(checkpoint, hook)),
        ("padded", _padded(checkpoint, together=True)),
        ("single", _single(checkpoint)),
    ]


def _try(checkpoint: Checkpoint, candidates: Candidates, trials: _Trials) -> tuple[PathSpec, float]:
    """Return the first exact variant of a path, and the relative difference of its logits.

    Raises:
        Exception: if no variant is exact. The exception is the error of the last variant.
    """
    last_error: Exception = UnfitError("it has no variant")
    for spec, hook in candidates:
        try:
            trial = trials.get(spec.layers, is_generated=spec.is_generated)
            set_attention(checkpoint, hook)
            path = spec.build(trial.sizes)
            dtype = checkpoint.model.dtype
            difference = check_path(path, trial, dtype)
            if trials.kv_cache_dtype != "auto" and spec.layers:
                # The first check has shown that the path is exact. The second check covers the
                # rounding of the 8-bit cache.
                rounded_path = spec.build(replace(trial.sizes, stored=trials.kv_cache_dtype))
                difference = check_path(rounded_path, trial, dtype, is_rounded=True)
            return _with_measured_memory(spec, path, trial), difference
        except Exception as error:  # noqa: BLE001 - a model can raise any exception
            last_error = error
    raise last_error


def _with_measured_memory(spec: PathSpec, path: ForwardPath, trial: Trial) -> PathSpec:
    """Return `spec` with the memory outside of blocks, which is measured on `path`.

    Args:
        spec: the description of the path.
        path: the path after it has computed the test sequences.
        trial: the test sequences.
    """
    if isinstance(path, RowsPath):
        return replace(spec, bytes_per_sequence=path.state_bytes())
    if isinstance(path, SinglePath):
        num_tokens = sum(len(tokens) for tokens, _ in trial.sequences)
        return replace(spec, bytes_per_token=-(-path.stored_bytes() // num_tokens))
    return spec


def _packed(checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None) -> Candidates:
    """Yield the packed path. Raise an UnfitError if the path cannot be exact."""
    limit = sparse_limit(checkpoint.text_config)
    if limit is not None and (max_model_len is None or max_model_len > limit.num_tokens):
        raise UnfitError(
            f"its attention is sparse beyond {limit.num_tokens} tokens ({limit.reason}), so this "
            f"path requires a max_model_len of at most {limit.num_tokens}"
        )
    if limit is not None:
        # Up to this length, sparse attention selects every token. The model's code only requires
        # that there is a mask.
        AttentionMaskInterface.register(hook.name, _open_mask)
    set_attention(checkpoint, hook)
    layers = probe_layers(checkpoint, hook)

    def build(sizes: Sizes) -> ForwardPath:
        cache, builder = make_blocks(checkpoint, layers, sizes)
        return PackedPath(checkpoint.model, hook, layers, cache, builder)

    yield PathSpec("packed", build, layers), hook


def _open_mask(*, device: torch.device, **kwargs: object) -> torch.Tensor:  # noqa: ARG001
    """Return a mask that hides no token, for transformers' mask interface."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _rows(checkpoint: Checkpoint, hook: AttentionHook) -> Candidates:
    """Yield the variants of the rows path.

    The first variant divides prompts into chunks. The second variant computes each prompt in one
    pass. The third variant also computes a preempted sequence again in the same passes as before.
    """
    set_attention(checkpoint, hook)
    layers = probe_rows(checkpoint, hook)

    def build_as(whole: bool, replays: bool) -> Callable[[Sizes], RowsPath]:
        def build(sizes: Sizes) -> RowsPath:
            blocks = make_blocks(checkpoint, layers, sizes) if layers else None
            return RowsPath(
                checkpoint,
                hook,
                layers,
                blocks,
                computes_from_start=whole,
                replays_preempted=replays,
            )

        return build

    for whole, replays in ((False, False), (True, False), (True, True)):
        spec = PathSpec(
            "rows",
            build_as(whole, replays),
            layers,
            "each prompt is computed in one pass, because chunks are not exact" if whole else "",
            shares_blocks=False,
            whole_prefill=whole,
            is_generated=replays,
        )
        yield spec, hook


def _padded(checkpoint: Checkpoint, *, together: bool) -> Candidates:
    """Yield the padded path, or a variant of the single path if `together` is false."""
    set_attention(checkpoint, None)
    layout = probe_cache(checkpoint, plain_token_ids(checkpoint)[0])

    def build(sizes: Sizes) -> ForwardPath:
        kind = stored_type(KVCache, sizes.stored)
        cache = make_cache(kind, checkpoint, layout.layers, sizes)
        return PaddedPath(checkpoint, layout, cache, batches_sequences=together)

    if together:
        yield PathSpec("padded", build, layout.layers), None
    else:
        yield (
            PathSpec(
                "single", build, layout.layers, "with keys and values in blocks", is_batched=False
            ),
            None,
        )


def _single(checkpoint: Checkpoint) -> Candidates:
    """Yield the variants of the single path: with blocks, with its own cache, without a cache."""
    with suppress(UnfitError, ValueError, TypeError, AttributeError):
        yield from _padded(checkpoint, together=False)
    for keeps in (True, False):
        detail = (
            "with the model's own cache"
            if keeps
            else "each token requires a pass over its whole sequence"
        )

        def build(sizes: Sizes, keeps: bool = keeps) -> ForwardPath:  # noqa: ARG001 - this path has no blocks
            return SinglePath(checkpoint, uses_cache=keeps)

        yield (
            PathSpec(
                "single",
                build,
                [],
                detail,
                shares_blocks=False,
                whole_prefill=True,
                is_batched=False,
                is_generated=True,
            ),
            None,
        )


def make_blocks(
    checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes
) -> tuple[KVCache, BatchBuilder]:
    """Return the blocks for `layers`, and the builder of the steps' block tables."""
    kind = cache_type(sizes.block_size, checkpoint.model.dtype, checkpoint.device)
    kind = stored_type(kind, sizes.stored)
    model = checkpoint.model
    kind = proven_type(kind, layers, sizes.block_size, model.dtype, checkpoint.device)
    cache = make_cache(kind, checkpoint, layers, sizes)
    builder = BatchBuilder(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        null_block=cache.null_block,
    )
    return cache, builder


def make_cache(
    kind: type[KVCache], checkpoint: Checkpoint, layers: list[LayerSpec], sizes: Sizes
) -> KVCache:
    """Return the blocks of a KV cache of the class `kind`."""
    return kind(
        layers,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        dtype=checkpoint.model.dtype,
        device=checkpoint.device,
    )


def _reason(error: Exception) -> str:
    """Return the first line of an error message.

    The class of the error precedes the line if the error is not an `UnfitError`.
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, UnfitError) else f"{type(error).__name__}: {text}"
