# SPDX-License-Identifier: Apache-2.0
"""Which path a model takes: the first of four tiers on which it computes what it computes alone.

    packed    one row of all tokens, keys and values in blocks     state is attention's alone
    rows      a row for each sequence, a state beside the blocks   convolutions, recurrences
    padded    rows padded to one length, keys and values copied    attention of the model's own
              out of blocks
    single    one sequence at a time, the model's own cache        what is left; slow

Every tier is tried, never chosen by a model's name. What does not run, or runs and differs, steps
down to the next one; what runs on none is refused with all the reasons.
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
from nereid_backend.checkpoint import Checkpoint
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

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tier:
    """A path that a model could take.

    Attributes:
        name: one of the four above.
        detail: what is particular about it here, or empty.
        build: makes the path, with room for so much.
        layers: what a token stores in blocks.
        bytes_per_sequence: memory of a running sequence besides its blocks.
        bytes_per_token: memory of a token that is in no block.
        shares_blocks: whether all that is kept of a sequence is in its blocks.
        whole_prefill: whether a prompt must go through in one forward pass.
        is_batched: whether several sequences share a forward pass.
        is_generated: whether it is compared with what transformers' generate makes, instead of with
            one pass over the whole sequence.
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
class Choice:
    """The tier that a model takes.

    Attributes:
        tier: which.
        difference: of its logits from those of the model alone, relative.
        limit: the longest sequence on it.
        reasons: why the tiers above it did not do, one for each.
        trial: what it was compared by.
    """

    tier: Tier
    difference: float
    limit: LengthLimit
    reasons: list[str]
    trial: Trial


def choose_tier(
    checkpoint: Checkpoint, hook: AttentionHook, config: EngineConfig, progress: Progress
) -> Choice:
    """Find the first tier that is exact, and leave the model with the attention that it uses.

    Args:
        checkpoint: a loaded model.
        hook: the engine's entry in transformers' attention interface.
        config: the settings; max_model_len and block_size matter here.
        progress: gets one line about the choice.

    Raises:
        UnsupportedModelError: there is none; the message says why not, tier by tier.
    """
    trials = _Trials(checkpoint, config)
    reasons: list[str] = []
    for name, candidates in _tiers(checkpoint, hook, config.max_model_len):
        try:
            tier, difference = _try(checkpoint, candidates, trials)
        except Exception as error:  # noqa: BLE001 - models fail in any way; the tier is not theirs
            reasons.append(f"{name}: {_reason(error)}")
            continue
        text = f"; {tier.detail}" if tier.detail else ""
        why = f" ({'; '.join(reasons)})" if reasons else ""
        slow = " This is slow." if tier.name == "single" else ""
        progress(f"path: {tier.name}{text}{why}.{slow}")
        limit = model_limit(checkpoint.text_config, is_batched=tier.is_batched)
        trial = trials.get(tier.layers, is_generated=tier.is_generated)
        return Choice(tier, difference, limit, reasons, trial)
    raise UnsupportedModelError(f"{checkpoint.architecture} is not supported: {'; '.join(reasons)}")


class _Trials:
    """What the model alone answers, computed when first asked for."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self._checkpoint = checkpoint
        self._block_size = config.block_size
        self.stored = config.kv_cache_dtype
        limit = model_limit(checkpoint.text_config).num_tokens
        self._max_len = min(limit, config.max_model_len or limit)
        self._made: dict[bool, Trial | UnfitError] = {}

    def get(self, layers: list[LayerSpec], *, is_generated: bool) -> Trial:
        """Sequences and expected logits. The model's attention is its own meanwhile.

        Raises:
            UnfitError: one pass over a whole sequence is not what the model generates with.
        """
        if is_generated not in self._made:
            with_own_attention(self._checkpoint, None)
            self._made[is_generated] = self._make(layers, is_generated)
        made = self._made[is_generated]
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self, layers: list[LayerSpec], is_generated: bool) -> Trial | UnfitError:
        if is_generated:
            return make_generated_trial(self._checkpoint, self._max_len, self._block_size)
        trial = make_trial(self._checkpoint, layers, self._max_len, self._block_size)
        try:
            check_generation(self._checkpoint, trial)
        except UnfitError as error:
            return error
        except Exception:  # noqa: BLE001 - models fail in any way
            return trial  # it does not generate by itself, so there is nothing to differ from
        return trial


def with_own_attention(checkpoint: Checkpoint, hook: AttentionHook | None) -> None:
    """Set the model's attention: ours, or its own in plain torch where hook is None."""
    if not checkpoint.takes_hook:
        if hook is not None:
            raise UnfitError("it does not use transformers' attention interface")
        return
    name = "eager" if hook is None else hook.name
    checkpoint.model.set_attn_implementation(name)
    # Models that cannot change it say so in a log only; a mask would then be missing.
    whole = checkpoint.model.config
    found = getattr(whole, "text_config", whole)._attn_implementation
    if found != name:
        raise UnfitError(f"its attention stays {found}")


Candidates = Iterator[tuple[Tier, AttentionHook | None]]


def _tiers(
    checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None
) -> list[tuple[str, Candidates]]:
    return [
        ("packed", _packed(checkpoint, hook, max_model_len)),
        ("rows", _rows(checkpoint, hook)),
        ("padded", _padded(checkpoint, together=True)),
        ("single", _single(checkpoint)),
    ]


def _try(checkpoint: Checkpoint, candidates: Candidates, trials: _Trials) -> tuple[Tier, float]:
    """The first of a tier's candidates that is exact, and its difference."""
    last: Exception = UnfitError("nothing to try")
    for tier, hook in candidates:
        try:
            trial = trials.get(tier.layers, is_generated=tier.is_generated)
            with_own_attention(checkpoint, hook)
            path = tier.build(trial.sizes)
            dtype = checkpoint.model.dtype
            difference = check_path(path, trial, dtype)
            if trials.stored != "auto" and tier.layers:
                # What is wrong with the path shows above; this is about the rounding alone.
                rounded = tier.build(replace(trial.sizes, stored=trials.stored))
                difference = check_path(rounded, trial, dtype, is_rounded=True)
            return _measured(tier, path, trial), difference
        except Exception as error:  # noqa: BLE001 - as above
            last = error
    raise last


def _measured(tier: Tier, path: ForwardPath, trial: Trial) -> Tier:
    """The tier with what a path that has run keeps besides its blocks."""
    if isinstance(path, RowsPath):
        return replace(tier, bytes_per_sequence=path.state_bytes())
    if isinstance(path, SinglePath):
        num_tokens = sum(len(tokens) for tokens, _ in trial.sequences)
        return replace(tier, bytes_per_token=-(-path.kept_bytes() // num_tokens))
    return tier


def _packed(checkpoint: Checkpoint, hook: AttentionHook, max_model_len: int | None) -> Candidates:
    limit = sparse_limit(checkpoint.text_config)
    if limit is not None and (max_model_len is None or max_model_len > limit.num_tokens):
        raise UnfitError(
            f"attention beyond {limit.num_tokens} tokens is sparse ({limit.reason}); a "
            "max_model_len up to that would run packed"
        )
    if limit is not None:
        # Up to there the indexer's choice is every token, and only asks for some mask to be there.
        AttentionMaskInterface.register(hook.name, _open_mask)
    with_own_attention(checkpoint, hook)
    layers = probe_layers(checkpoint, hook)

    def build(sizes: Sizes) -> ForwardPath:
        cache, builder = make_blocks(checkpoint, layers, sizes)
        return PackedPath(checkpoint.model, hook, layers, cache, builder)

    yield Tier("packed", build, layers), hook


def _open_mask(*, device: torch.device, **kwargs: object) -> torch.Tensor:  # noqa: ARG001
    """A mask that hides nothing, as transformers' mask interface asks for one."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _rows(checkpoint: Checkpoint, hook: AttentionHook) -> Candidates:
    with_own_attention(checkpoint, hook)
    layers = probe_rows(checkpoint, hook)

    def build_as(whole: bool, replays: bool) -> Callable[[Sizes], RowsPath]:
        def build(sizes: Sizes) -> RowsPath:
            paged = make_blocks(checkpoint, layers, sizes) if layers else None
            return RowsPath(checkpoint, hook, layers, paged, whole=whole, replays=replays)

        return build

    for whole, replays in ((False, False), (True, False), (True, True)):
        tier = Tier(
            "rows",
            build_as(whole, replays),
            layers,
            "prompts go whole, since chunks of them are not exact" if whole else "",
            shares_blocks=False,
            whole_prefill=whole,
            is_generated=replays,
        )
        yield tier, hook


def _padded(checkpoint: Checkpoint, *, together: bool) -> Candidates:
    with_own_attention(checkpoint, None)
    layout = probe_cache(checkpoint, plain_token_ids(checkpoint)[0])

    def build(sizes: Sizes) -> ForwardPath:
        kind = stored_type(KVCache, sizes.stored)
        cache = make_cache(kind, checkpoint, layout.layers, sizes)
        return PaddedPath(checkpoint, layout, cache, together=together)

    if together:
        yield Tier("padded", build, layout.layers), None
    else:
        yield (
            Tier("single", build, layout.layers, "keys and values in blocks", is_batched=False),
            None,
        )


def _single(checkpoint: Checkpoint) -> Candidates:
    with suppress(UnfitError, ValueError, TypeError, AttributeError):
        yield from _padded(checkpoint, together=False)
    for keeps in (True, False):
        detail = "with the model's own cache" if keeps else "each token computes its whole sequence"

        def build(sizes: Sizes, keeps: bool = keeps) -> ForwardPath:  # noqa: ARG001 - holds no room
            return SinglePath(checkpoint, keeps=keeps)

        yield (
            Tier(
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
    """Empty blocks for these layers, and the tables that name them."""
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
    """Empty blocks of one kind; what is copied out of them must be in the common layout."""
    return kind(
        layers,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        dtype=checkpoint.model.dtype,
        device=checkpoint.device,
    )


def _reason(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, UnfitError) else f"{type(error).__name__}: {text}"
