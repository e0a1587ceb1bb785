# SPDX-License-Identifier: Apache-2.0
"""Chooses how the engine computes the forward passes of a model.

The engine uses the first forward path that computes the correct logits.

A forward path is a way to run the forward passes of a model:

    packed    one row with all tokens, keys and values in blocks     models with only attention
    rows      one row for each sequence, state outside of blocks     convolutions, recurrences
    padded    padded rows, keys and values copied from blocks        models with own attention code
    single    one sequence at a time, with the model's own cache     all other models; slow

The correct logits are those of the unmodified model: transformers' code computes each sequence in a
separate pass, with the model's own attention. The paths are tried in the order of the table. The
choice never depends on the model's name. A path that fails or computes wrong logits is not used. If
no path can be used, loading fails with an error that gives the reason for each path.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ModelError, UnsupportedModelError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.forward_path.length_limits import LengthLimit, model_limit
from nereid_backend.model.forward_path.path_spec import PathSpec, set_attention
from nereid_backend.model.forward_path.path_variants import path_variants
from nereid_backend.model.forward_path.reference_logits import (
    ReferenceLogits,
    compute_reference,
    generate_reference,
)
from nereid_backend.model.forward_path.self_check import check_generation, check_path
from nereid_backend.model.forward_path.snapshot_check import NO_SNAPSHOTS, has_exact_snapshots
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.recurrent import RowsPath
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.step_runner import ForwardPath

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPath:
    """The way in which the engine runs the forward passes of a model.

    Attributes:
        spec: the forward path, with measured values.
        difference: the difference from the logits of the unmodified model, relative to the standard
            deviation of the logits. Example: 0.02. With an 8-bit KV cache, rounded keys and values
            cause this difference.
        limit: the largest length of a sequence for which the logits of the path are correct.
        reference: the test sequences, and the logits of the unmodified model for these sequences.
    """

    spec: PathSpec
    difference: float
    limit: LengthLimit
    reference: ReferenceLogits


def choose_path(
    checkpoint: Checkpoint, hook: AttentionHook, config: EngineConfig, progress: Progress
) -> ChosenPath:
    """Choose the fastest forward path whose logits equal the logits of the unmodified model.

    A forward path is a way to run the forward passes of a model, such as one row with the tokens
    of all sequences. Faster paths are tried first.

    Args:
        checkpoint: a loaded model. Its attention is set to the attention that the chosen path
            needs.
        hook: Nereid's attention function, which transformers calls in each layer.
        config: the settings. max_model_len, block_size and kv_cache_dtype are used.
        progress: called with one line about the choice.

    Raises:
        UnsupportedModelError: if no path has correct logits. The message contains the reason for
            each path.
        ModelError: if no path has correct logits, because a weight contains NaN or infinity.
    """
    references = ReferenceCache(checkpoint, config)
    reasons: list[str] = []
    for name, variants in path_variants(checkpoint, hook, config.max_model_len):
        try:
            chosen = try_variants(checkpoint, variants, references)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            reasons.append(f"{name}: {_reason(error)}")
            continue
        progress(_describe_choice(chosen.spec, reasons))
        return chosen
    _check_weights_are_finite(checkpoint, config.model)
    raise UnsupportedModelError(
        f"{checkpoint.architecture} is not supported, because none of the forward paths computes "
        f"the same logits as the model's own code: {'; '.join(reasons)}."
    )


def _check_weights_are_finite(checkpoint: Checkpoint, folder: str) -> None:
    """Raise a ModelError if a weight of the checkpoint in `folder` contains NaN or infinity."""
    for name, weight in checkpoint.model.named_parameters():
        # torch implements `isfinite` only for some of the float8 types.
        if weight.is_floating_point() and not weight.float().isfinite().all():
            raise ModelError(
                f"{folder}: the weight {name} contains NaN or infinity as {weight.dtype}. Download "
                "the checkpoint again. If its numbers are too large for this type, set "
                "dtype=float32."
            )


def _describe_choice(spec: PathSpec, reasons: list[str]) -> str:
    """Return a log line that names the chosen way to run the model (the forward path).

    The line also contains the reasons why the earlier paths were not chosen.

    Example: "path: padded (packed: it does not use transformers' attention interface)."
    """
    detail = f"; {spec.detail}" if spec.detail else ""
    reason = f" ({'; '.join(reasons)})" if reasons else ""
    warning = " This is slow." if spec.name == "single" else ""
    return f"path: {spec.name}{detail}{reason}.{warning}"


class ReferenceCache:
    """Computes and caches the test sequences and the logits of the unmodified model."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self._checkpoint = checkpoint
        self._block_size = config.block_size
        self.kv_cache_dtype = config.kv_cache_dtype
        limit = model_limit(checkpoint.text_config).num_tokens
        self._max_len = min(limit, config.max_model_len or limit)
        # Maps the argument `is_generated` of `get` to the cached result of `get`.
        self._references: dict[bool, ReferenceLogits] = {}
        # Maps each argument `is_generated` for which `get` raised an UnfitError to the error's
        # message.
        self._refusals: dict[bool, str] = {}

    def get_for(self, spec: PathSpec) -> ReferenceLogits:
        """Return the test sequences and the expected logits for the path that `spec` describes."""
        return self.get(spec.layers, is_generated=spec.uses_generated_reference)

    def get(self, layers: list[LayerSpec], *, is_generated: bool) -> ReferenceLogits:
        """Return the test sequences and the expected logits.

        They are computed in the first call with each value of `is_generated`, and then cached.

        Args:
            layers: the attention layers of the path. One test sequence is longer than the windows
                of these layers. `layers` is no part of the cache key, because the layers of all
                paths of a model have the same windows.
            is_generated: whether the tokens and logits come from transformers' generate. If False,
                the logits come from one forward pass over each whole sequence.

        Mutates: if the result is not cached, the model uses its own attention after the call.

        Raises:
            UnfitError: if the logits of one forward pass over a sequence differ from the logits of
                token-by-token generation.
        """
        if is_generated in self._refusals:
            raise UnfitError(self._refusals[is_generated])
        if is_generated in self._references:
            return self._references[is_generated]
        try:
            reference = self._compute(layers, is_generated=is_generated)
        except UnfitError as error:
            self._refusals[is_generated] = str(error)
            raise
        self._references[is_generated] = reference
        return reference

    def _compute(self, layers: list[LayerSpec], *, is_generated: bool) -> ReferenceLogits:
        """Return test sequences, and the expected logits, computed with the model's own attention.

        Mutates: the model, which uses its own attention after the call.
        """
        set_attention(self._checkpoint, None)
        if is_generated:
            return generate_reference(self._checkpoint, self._max_len, self._block_size)
        return self._compute_in_one_pass(layers)

    def _compute_in_one_pass(self, layers: list[LayerSpec]) -> ReferenceLogits:
        """Return test sequences, and the logits of one forward pass over each whole sequence.

        One test sequence is longer than the windows of the attention layers `layers`. The logits
        are compared with the logits of token-by-token generation. If the model's code fails during
        the generation, the error is logged, and nothing is compared.

        Raises:
            UnfitError: if one forward pass gives other logits than token-by-token generation.
        """
        reference = compute_reference(self._checkpoint, layers, self._max_len, self._block_size)
        try:
            check_generation(self._checkpoint, reference)
        except UnfitError:  # The logits differ, so one pass gives wrong logits.
            raise
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            log.info("Token-by-token generation is not checked: %s", first_line(error))
        return reference


def try_variants(
    checkpoint: Checkpoint, variants: Iterator[PathSpec], references: ReferenceCache
) -> ChosenPath:
    """Return the first variant of a forward path that computes correct logits.

    A forward path is a way to run a model. Its variants differ in speed.

    Args:
        checkpoint: the model. Its attention is set to the attention that the variant needs.
        variants: the variants of one forward path, from the fastest to the slowest.
        references: the test sequences, and the logits of the unmodified model.

    Raises:
        Exception: if no variant has correct logits. The exception is the error of the last variant.
    """
    last_error: Exception = UnfitError("it has no variant")
    for spec in variants:
        try:
            return check_variant(checkpoint, spec, references)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            last_error = error
    raise last_error


def check_variant(checkpoint: Checkpoint, spec: PathSpec, references: ReferenceCache) -> ChosenPath:
    """Check that a model computes correct logits if the engine runs it as `spec` describes.

    Args:
        checkpoint: the model. Its attention is set to the attention that `spec` needs.
        spec: describes a way to run the model (a variant of a forward path).
        references: the test sequences, and the logits of the unmodified model.

    Raises:
        Exception: of any class, if the logits are wrong, or if the model's code fails.
    """
    reference = references.get_for(spec)
    set_attention(checkpoint, spec.hook)
    path = spec.build(reference.sizes)
    dtype = checkpoint.model.dtype
    unrounded_difference = check_path(path, reference, dtype)
    difference = unrounded_difference
    if references.kv_cache_dtype != "auto" and spec.layers:
        # The check above used unrounded keys and values. Check the model again with the 8-bit KV
        # cache, which rounds keys and values.
        rounded_path = spec.build(
            replace(reference.sizes, kv_cache_dtype=references.kv_cache_dtype)
        )
        difference = check_path(rounded_path, reference, dtype, is_rounded=True)
    measured_spec = _with_measurements(spec, path, reference, unrounded_difference, dtype)
    # For some models, the length limit is lower in a batch than for a sequence that is computed
    # alone, because the code of these models is wrong for long sequences in a batch.
    limit = model_limit(checkpoint.text_config, is_batched=spec.is_batched)
    return ChosenPath(measured_spec, difference, limit, reference)


def _with_measurements(
    spec: PathSpec,
    path: ForwardPath,
    reference: ReferenceLogits,
    difference: float,
    dtype: torch.dtype,
) -> PathSpec:
    """Measure the data that a path stores outside of blocks. Return `spec` with the results.

    If the path stores no such data, return `spec` unchanged.

    Args:
        spec: the description of the path.
        path: the path, which has computed the test sequences of `reference`.
        reference: the test sequences.
        difference: the relative difference of the logits of `path`.
        dtype: the data type of the model.
    """
    match path:
        case SinglePath():
            return replace(spec, bytes_per_token=_bytes_per_token(path, reference))
        case RowsPath():
            return _with_state_measurements(spec, path, reference, difference, dtype)
        case _:
            return spec


def _bytes_per_token(path: SinglePath, reference: ReferenceLogits) -> int:
    """Return how many bytes the path stores for one token of a test sequence.

    Example: the path stores 6000 bytes for test sequences with 60 tokens. The result is 100.
    """
    num_tokens = sum(len(sequence.token_ids) for sequence in reference.sequences)
    return math.ceil(path.stored_bytes() / num_tokens)


def _with_state_measurements(
    spec: PathSpec,
    path: RowsPath,
    reference: ReferenceLogits,
    difference: float,
    dtype: torch.dtype,
) -> PathSpec:
    """Measure the recurrent states of a path. Return a copy of `spec` that contains the results.

    The results are the size of a state, and whether snapshots work. A snapshot is a copy of the
    recurrent state, from which a sequence can continue. If snapshots do not work, the result also
    has another `detail` for the log.

    `path` has computed the test sequences of `reference`. `difference` is the relative difference
    of its logits, and `dtype` is the data type of the model.
    """
    measured_spec = replace(spec, bytes_per_sequence=path.state_bytes())
    if spec.whole_prefill:
        # A prompt is computed in one pass, so it cannot continue from a snapshot.
        return measured_spec
    if has_exact_snapshots(path, reference, difference, dtype):
        return replace(measured_spec, has_snapshots=True)
    # Without snapshots, there is no prefix cache. The log line about the path must tell users this
    # fact. The line contains only one detail. Therefore, the detail `NO_SNAPSHOTS` replaces the
    # previous detail (such as "keys and values are copied"), which is less important.
    return replace(measured_spec, detail=NO_SNAPSHOTS)


def _reason(error: Exception) -> str:
    """Return the first line of an error message, such as "RuntimeError: shapes differ".

    The message of an UnfitError is written for users, so it is returned without the class.
    """
    text = first_line(error)
    return text if isinstance(error, UnfitError) else f"{type(error).__name__}: {text}"
