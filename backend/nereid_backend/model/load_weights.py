# SPDX-License-Identifier: Apache-2.0
"""Loads the weights of a model, and stores the weights in the fastest layout for the device."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.freed_memory import discard_weights_after_use
from nereid_backend.huge_pages import move_weights
from nereid_backend.linear.float8_linear import find_product, store_linears_as_float8
from nereid_backend.linear.grouped_linear import GroupedLinear
from nereid_backend.linear.merged_linear import merge_linears, separate_linears
from nereid_backend.linear.packed_embedding import pack_embedding
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.linear.quantise_weights import (
    model_bytes,
    quantise_linears,
    slow_integers_warning,
)
from nereid_backend.load_checkpoint import Checkpoint, Progress, load_checkpoint
from nereid_backend.model.forward_path.path_spec import set_attention
from nereid_backend.model.forward_path.probe_layers import plain_token_ids
from nereid_backend.model.memory.weight_memory import WeightForm, form_that_fits
from nereid_backend.paths.model_call import ModelCall

# The largest accepted difference of a logit, relative to the standard deviation of the logits. A
# different order of summation causes differences of 1e-6 in float32 and of 0.05 in bfloat16.
_LAYOUT_TOLERANCE = 0.3
# The number of tokens for which the logits are compared.
_NUM_TEST_TOKENS = 4
# The type of device that each value of the setting weight_dtype requires.
_REQUIRED_DEVICES = {"int8": "cpu", "int4": "cpu", "fp8": "cuda"}


def load_weights(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """Load a model, and store the weights of its linear layers in the fastest layout.

    The settings weight_dtype (rounding) and prepack (rearranged weights) determine the layout.

    Args:
        config: the settings.
        device: the device for the weights.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.

    Raises:
        ConfigError: if the device or the model does not support the setting weight_dtype.
        ModelError: if the checkpoint is missing or broken, or the architecture is not supported.
    """
    _check_weight_dtype(config, device)
    load = _choose_loader(config, device)
    checkpoint = load(config, device, hook, progress)
    # Merging rearranges the weights in memory, which only the setting prepack permits. Rounded
    # weights can be merged, too.
    if config.prepack:
        _merge(checkpoint)
    # On a CPU, move the weights into huge memory pages, which are faster to read. This is done
    # last, because the functions above replace weights.
    move_weights(checkpoint.model)
    return checkpoint


def _choose_loader(
    config: EngineConfig, device: torch.device
) -> Callable[[EngineConfig, torch.device, AttentionHook, Progress], Checkpoint]:
    """Return the function that loads the weights in the form that the settings require.

    Raises:
        ConfigError: if the weights do not fit into the memory.
        ModelError: if the checkpoint is damaged or not supported.
    """
    if form_that_fits(config, device) is WeightForm.ROUNDED:
        return _load_rounded  # The unrounded weights do not fit into the memory.
    if config.weight_dtype != "auto":
        return _load_quantised  # The unrounded weights fit, but the setting requires rounding.
    if config.prepack:
        return _load_prepacked  # The weights are rearranged, but not rounded.
    return _read_checkpoint  # The settings permit no change of the weights.


def _load_rounded(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """Load the weights. To save memory, round each weight to 4 or 8 bits as soon as it is read.

    Args:
        config: the settings. weight_dtype is int4 or int8.
        device: the device for the weights.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.
    """
    rounded_bits = 4 if config.weight_dtype == "int4" else 8
    checkpoint = _read_checkpoint(config, device, hook, progress, rounded_bits=rounded_bits)
    # Round the embedding, and the linear layers that could not be rounded while their weights were
    # read.
    quantise_linears(checkpoint.model, rounded_bits, progress)
    _pack_embedding(checkpoint, can_round=True)
    progress(
        f"the weights of linear layers were rounded to {config.weight_dtype} while they were "
        "read, because the unrounded weights do not fit into the memory"
    )
    return replace(checkpoint, weights_bytes=model_bytes(checkpoint.model))


def _load_prepacked(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """Load the weights, and rearrange them for fast matrix products if the model permits this.

    Args:
        config: the settings.
        device: the device for the weights.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.
    """
    checkpoint = _read_checkpoint(config, device, hook, progress)
    if device.type == "cpu":
        has_changed_logits = _prepack(checkpoint, progress)
        if has_changed_logits:
            # Prepacking cannot be undone, so read the original weights again.
            progress(
                "prepack: the weights of linear layers are not rearranged, because the model's "
                "code reads them directly"
            )
            checkpoint = _read_checkpoint(config, device, hook, progress)
    # Compute the size of the model again, because it may have changed: if the layout of the output
    # layer was changed, the output layer and the embedding may no longer share one weight.
    return replace(checkpoint, weights_bytes=model_bytes(checkpoint.model))


def _check_weight_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raise a ConfigError if the setting weight_dtype requires another device."""
    required_type = _REQUIRED_DEVICES.get(config.weight_dtype)
    if required_type is not None and device.type != required_type:
        raise ConfigError(
            f"weight_dtype: the value {config.weight_dtype} requires device={required_type}, but "
            f"the device is {device}. Set weight_dtype=auto."
        )


def _read_checkpoint(
    config: EngineConfig,
    device: torch.device,
    hook: AttentionHook,
    progress: Progress,
    *,
    rounded_bits: int | None = None,
) -> Checkpoint:
    """Load the model of a checkpoint, as the engine's settings require.

    If `rounded_bits` is not None, the weights of linear layers are rounded to integers with this
    number of bits while they are read.
    """
    # A panel is a block of a weight matrix. If quantised weights are stored in panels, the CPU
    # kernels compute directly with the integers of the weights. Other devices have no such kernels.
    # If `rounded_bits` is set, the panels are required, because no other layout supports integers.
    rounds_weights = rounded_bits is not None
    use_panels = device.type == "cpu" and (config.prepack or rounds_weights)
    return load_checkpoint(
        config.model,
        dtype=config.dtype,
        device=device,
        attention=hook.name,
        progress=progress,
        trust_remote_code=config.trust_remote_code,
        use_panels=use_panels,
        rounded_bits=rounded_bits,
    )


def _prepack(checkpoint: Checkpoint, progress: Progress) -> bool:
    """Rearrange the weights of linear layers, so that the CPU multiplies them faster.

    No weight is rearranged if the model cannot be called for a test of the logits, or if the
    kernels support no layer.

    Args:
        checkpoint: the model. Mutated.
        progress: called with one line every few seconds.

    Returns:
        Whether the logits of the model have changed. If True, the model must be loaded again.
    """
    original_logits = _logits_of_test_tokens(checkpoint)
    if original_logits is None:
        return False
    # An output layer can share its weight with the embedding. Such an output layer gets a copy of
    # the weight, and only the copy is rearranged.
    num_packed = prepack_linears(checkpoint.model, copy_shared=True, progress=progress)
    if num_packed == 0:
        return False
    if not _are_equal(original_logits, _logits_of_test_tokens(checkpoint)):
        return True
    # Let the embedding read the copy, too, so that the memory of the original weight is freed.
    _pack_embedding(checkpoint, can_round=False)
    return False


def _merge(checkpoint: Checkpoint) -> None:
    """Merge linear layers that have the same input. Undo the merging if the logits change.

    One matrix product then computes all merged layers. Mutates: the checkpoint.
    """
    original_logits: Tensor | None = None

    def run_unchanged_model() -> None:
        nonlocal original_logits
        original_logits = _logits_of_test_tokens(checkpoint)

    # `merge_linears` runs the model once before the merging, to find the layers with the same
    # input.
    merge_linears(checkpoint.model, run_unchanged_model)
    if not _are_equal(original_logits, _logits_of_test_tokens(checkpoint)):
        separate_linears(checkpoint.model)


def _pack_embedding(checkpoint: Checkpoint, *, can_round: bool) -> None:
    """Pack the embedding of a model; see `pack_embedding`. Undo it if the logits are not finite."""
    pack_embedding(
        checkpoint.model,
        is_correct=lambda: _logits_of_test_tokens(checkpoint) is not None,
        can_round=can_round,
    )


def _are_equal(before: Tensor | None, after: Tensor | None) -> bool:
    """Return whether two tensors of logits differ only by rounding. False if a tensor is missing.

    `before` and `after` are the logits before and after a change of the model.
    """
    if before is None or after is None:
        return False
    return bool((after - before).abs().max() <= _LAYOUT_TOLERANCE * before.std())


def _load_quantised(
    config: EngineConfig, device: torch.device, hook: AttentionHook, progress: Progress
) -> Checkpoint:
    """Load the weights, and then round the weights of the linear layers.

    Args:
        config: the settings. weight_dtype is int8, int4 or fp8.
        device: the device for the weights.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line about the result, and for each slow operation.

    Raises:
        ConfigError: if the model or the device does not support such weights.
    """
    weight_dtype = config.weight_dtype
    checkpoint = _read_checkpoint(config, device, hook, progress)
    # The difference between `before` and `after` shows how much the rounding changes the logits.
    before = _logits_of_test_tokens(checkpoint)
    if before is None:
        raise ConfigError(
            f"weight_dtype: the value {weight_dtype} requires a model that computes finite logits, "
            f"but {checkpoint.architecture} does not. Set weight_dtype=auto."
        )
    num_layers = _round_weights(checkpoint, weight_dtype, progress)
    # `after` is None if the model fails with rounded weights. Example of such a model: its own code
    # reads the weights of linear layers, instead of calling the layers.
    after = _logits_of_test_tokens(checkpoint) if num_layers > 0 else None
    if after is None:
        raise ConfigError(_why_not_rounded(checkpoint, weight_dtype, num_layers))
    warning = "" if weight_dtype == "fp8" else slow_integers_warning()
    progress(
        f"the weights of {num_layers} linear layers are stored as {weight_dtype}, which changes "
        f"the logits by {_relative_change(before, after):.2g} of their standard deviation{warning}"
    )
    return replace(checkpoint, weights_bytes=model_bytes(checkpoint.model))


def _relative_change(before: Tensor, after: Tensor) -> float:
    """Return the root mean square of `after - before`, in standard deviations of `before`."""
    root_mean_square = (after - before).square().mean().sqrt()
    return (root_mean_square / before.std()).item()


def _why_not_rounded(checkpoint: Checkpoint, weight_dtype: str, num_layers: int) -> str:
    """Return the error message for a model whose linear layers cannot be rounded.

    `num_layers` is the number of layers that were rounded. If it is 0, either all linear layers
    already store integers, or the model has no linear layers of torch's class. If it is not 0, the
    model has failed with the rounded layers, because its own code does not use them as linear
    layers of torch's class.
    """
    has_integers = any(type(layer) is GroupedLinear for layer in checkpoint.model.modules())
    if num_layers == 0 and has_integers:
        return (
            f"weight_dtype: the value {weight_dtype} has no effect, because all linear layers of "
            "the checkpoint already store integers. Set weight_dtype=auto."
        )
    return (
        f"weight_dtype: the value {weight_dtype} requires a model with standard linear layers, "
        f"which {checkpoint.architecture} does not have. Set weight_dtype=auto."
    )


def _round_weights(checkpoint: Checkpoint, weight_dtype: str, progress: Progress) -> int:
    """Round the weights of a model's linear layers, and return the number of these layers.

    With int8 and int4, the embedding is also rounded to 8 bits. It stays unchanged if it cannot be
    rounded, or if the logits with the rounded embedding are not finite.

    Args:
        checkpoint: the model. Mutated.
        weight_dtype: "int8", "int4" or "fp8".
        progress: called with one line for each slow operation.

    Raises:
        ConfigError: if the device does not support such weights.
    """
    if weight_dtype == "fp8":
        return _store_as_float8(checkpoint)
    bits = 4 if weight_dtype == "int4" else 8
    num_layers = quantise_linears(checkpoint.model, bits, progress)
    _pack_embedding(checkpoint, can_round=True)
    return num_layers


def _store_as_float8(checkpoint: Checkpoint) -> int:
    """Round the weights of a model's linear layers to e4m3, an 8-bit floating-point type.

    Return the number of layers.

    Raises:
        ConfigError: if the device cannot multiply 8-bit floating point numbers.
    """
    # The function that multiplies matrices of e4m3 numbers on the device.
    product = find_product(checkpoint.device, checkpoint.model.dtype)
    if product is None:
        raise ConfigError(
            "weight_dtype: the value fp8 requires a GPU that multiplies 8-bit floating point "
            f"numbers (compute capability 8.9 or later), but {checkpoint.device} does not do so. "
            "Set weight_dtype=auto."
        )
    return store_linears_as_float8(checkpoint.model, product)


@torch.inference_mode()
def _logits_of_test_tokens(checkpoint: Checkpoint) -> Tensor | None:
    """Switch a model to its own attention, and return its logits for a few test tokens.

    The logits show whether a change of the weights has changed the model. Return None if the model
    cannot be called, or if its logits are not finite.

    Mutates: the checkpoint. The model still uses its own attention after the call. Later, each
        forward path sets the attention that it needs.
    """
    token_ids = plain_token_ids(checkpoint)[:_NUM_TEST_TOKENS]
    ids = torch.tensor([token_ids], device=checkpoint.device)
    positions = torch.arange(ids.shape[1], device=checkpoint.device)[None]
    try:
        set_attention(checkpoint, None)
        # If a weight is still in a memory-mapped file of the checkpoint, its pages are removed from
        # memory after each use.
        with discard_weights_after_use(checkpoint.model):
            logits = ModelCall(checkpoint.model)(ids, num_logits=1, position_ids=positions).float()
    except Exception:  # noqa: BLE001 - The check of the forward path reports the error later.
        return None
    return logits if logits.isfinite().all() else None
