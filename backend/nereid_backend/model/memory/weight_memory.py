# SPDX-License-Identifier: Apache-2.0
"""Refuses a checkpoint if its weights do not fit into the free memory. The weights are not read."""

import json
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path

import torch

from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.checkpoints.weight_counts import WeightCounts, count_weights
from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError
from nereid_backend.linear.prepack import has_fast_bfloat16
from nereid_backend.main_memory import available_memory, format_bytes

_FLOAT16_BYTES = 2
_FLOAT32_BYTES = 4
# Maps each value of weight_dtype to the average size of a rounded weight in bytes. Examples: 64
# weights of int8 need 64 bytes, and their common scale needs 2 bytes. 32 weights of int4 need 16
# bytes, their common scale needs 2 bytes, and their common zero point needs 1 byte. Error messages
# recommend the first value of weight_dtype with which the weights fit into the memory.
_ROUNDED_BYTES = {"int8": 1 + 2 / 64, "int4": 0.5 + 3 / 32}


class WeightForm(Enum):
    """The form in which the weights of a checkpoint fit into the free memory."""

    UNROUNDED = auto()
    ROUNDED = auto()  # Each weight must be rounded as soon as it is read.


def form_that_fits(config: EngineConfig, device: torch.device) -> WeightForm:
    """Return the form in which the weights fit into the free memory: unrounded or rounded.

    If the unrounded weights fit, or if their size is unknown, the result is UNROUNDED.

    Raises:
        ConfigError: if the weights fit in no form that the settings permit. Example: "model: the
            weights need 128.0 GiB as 16-bit numbers, but only 20.1 GiB are free. Use a quantised
            checkpoint of the model, or a smaller model."
        ModelError: if the checkpoint is damaged or not supported.
    """
    folder = Path(checkpoint_folder(config.model))
    if not (folder / "config.json").is_file():
        return WeightForm.UNROUNDED  # load_checkpoint reports what is missing
    counts = count_weights(folder)
    bytes_per_number = _bytes_per_number(folder, config.dtype, device)
    unrounded_bytes = _weight_bytes(
        counts, bytes_per_number, keeps_integers=_keeps_integers(config, device)
    )
    # The main memory is checked even if the model runs on a GPU, because the weights are first read
    # into the main memory.
    free_bytes = available_memory()
    if unrounded_bytes <= free_bytes:
        return WeightForm.UNROUNDED
    can_round = device.type == "cpu" and config.weight_dtype in _ROUNDED_BYTES
    if can_round and _rounded_bytes(counts, config.weight_dtype, bytes_per_number) <= free_bytes:
        return WeightForm.ROUNDED
    number_type = "float32" if bytes_per_number == _FLOAT32_BYTES else "16-bit numbers"
    raise ConfigError(
        f"model: the weights need {format_bytes(unrounded_bytes)} as {number_type}, but only "
        f"{format_bytes(free_bytes)} are free. "
        + _remedy(config, counts, bytes_per_number, free_bytes, device)
    )


def _remedy(
    config: EngineConfig,
    counts: WeightCounts,
    bytes_per_number: int,
    free_bytes: int,
    device: torch.device,
) -> str:
    """Return a sentence that recommends a setting with which the weights fit into the memory.

    Example: "With dtype=bfloat16, they need 64.0 GiB." The word "they" means the weights, which the
    previous sentence of the message names. If there is no such setting, the sentence recommends
    another checkpoint.

    Args:
        config: the settings.
        counts: the number of weights of each kind in the checkpoint.
        bytes_per_number: the size of an unquantised weight with these settings.
        free_bytes: the free memory.
        device: the device of the model.
    """
    for setting, num_bytes in _alternative_settings(config, counts, bytes_per_number, device):
        if num_bytes <= free_bytes:
            return f"With {setting}, they need {format_bytes(num_bytes)}."
    return "Use a quantised checkpoint of the model, or a smaller model."


def _alternative_settings(
    config: EngineConfig, counts: WeightCounts, bytes_per_number: int, device: torch.device
) -> Iterator[tuple[str, int]]:
    """Yield settings that can reduce the size of the weights, with the resulting number of bytes.

    Example of an item: ("dtype=bfloat16", 2000000). Only settings that the device supports are
    yielded.

    Args:
        config: the present settings.
        counts: the number of weights of each kind in the checkpoint.
        bytes_per_number: the size of an unquantised weight with the present settings.
        device: the device of the model.
    """
    if bytes_per_number > _FLOAT16_BYTES:
        keeps_integers = _keeps_integers(config, device)
        yield "dtype=bfloat16", _weight_bytes(counts, _FLOAT16_BYTES, keeps_integers=keeps_integers)
    if device.type != "cpu":
        return  # The other settings require a CPU.
    if counts.num_quantised_linear > 0:
        yield "prepack=true", _weight_bytes(counts, bytes_per_number, keeps_integers=True)
    for weight_dtype in _ROUNDED_BYTES:
        size = _rounded_bytes(counts, weight_dtype, bytes_per_number)
        yield f"weight_dtype={weight_dtype}", size


def _keeps_integers(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the weights of a quantised checkpoint stay integers in memory.

    With prepack, the CPU kernels compute directly with the integers. Otherwise, the integers are
    converted to floating-point numbers.
    """
    return config.prepack and device.type == "cpu"


def memory_by_setting(counts: WeightCounts) -> dict[str, int]:
    """Return how many bytes the weights need on a CPU with each value of dtype and weight_dtype.

    Example: {"dtype=float32": 4000000, "dtype=bfloat16": 2000000, "weight_dtype=int8": 1031250}. A
    setting that has no effect on the checkpoint is left out. Quantised weights stay integers in
    memory (keeps_integers), because the CPU kernels compute with integers.
    """
    sizes = {
        "dtype=float32": _weight_bytes(counts, _FLOAT32_BYTES, keeps_integers=True),
        "dtype=bfloat16": _weight_bytes(counts, _FLOAT16_BYTES, keeps_integers=True),
    }
    # The setting weight_dtype does not apply to checkpoints that are already quantised.
    can_be_rounded = counts.num_unquantised_linear > 0 and counts.num_quantised_linear == 0
    if can_be_rounded:
        for weight_dtype in _ROUNDED_BYTES:
            size = _rounded_bytes(counts, weight_dtype, _FLOAT16_BYTES)
            sizes[f"weight_dtype={weight_dtype}"] = size
    return sizes


def _rounded_bytes(counts: WeightCounts, weight_dtype: str, bytes_per_number: int) -> int:
    """Return the size of the weights in bytes after the weights of linear layers are rounded.

    `weight_dtype` is the type of the rounded numbers, such as int4 or int8.
    """
    rounded_bytes = int(counts.num_unquantised_linear * _ROUNDED_BYTES[weight_dtype])
    num_others = counts.num_weights - counts.num_unquantised_linear
    return rounded_bytes + num_others * bytes_per_number


def _weight_bytes(counts: WeightCounts, bytes_per_number: int, *, keeps_integers: bool) -> int:
    """Return the size of the weights in memory, in bytes.

    If keeps_integers is False, the integers of quantised weights are converted to floating-point
    numbers of `bytes_per_number` bytes.
    """
    if not keeps_integers:
        return counts.num_weights * bytes_per_number
    others = counts.num_weights - counts.num_quantised_linear
    return counts.integer_bytes + others * bytes_per_number


def _bytes_per_number(folder: Path, dtype_setting: str, device: torch.device) -> int:
    """Return the size of one floating-point number of the weights in bytes: 2 or 4.

    `dtype_setting` is the name of a data type, such as "bfloat16", or "auto".
    """
    dtype_name = _automatic_dtype(folder, device) if dtype_setting == "auto" else dtype_setting
    return _FLOAT16_BYTES if dtype_name in ("bfloat16", "float16") else _FLOAT32_BYTES


def _automatic_dtype(folder: Path, device: torch.device) -> str:
    """Return the name of the data type that `load_checkpoint` chooses for the setting dtype=auto.

    This is the data type in config.json, unless the CPU is slow with this type. For a slow type,
    the result is "float32".
    """
    dtype_name = _dtype_in_config(folder)
    is_slow_on_cpu = dtype_name == "float16" or (
        dtype_name == "bfloat16" and not has_fast_bfloat16()
    )
    return "float32" if device.type == "cpu" and is_slow_on_cpu else dtype_name


def _dtype_in_config(folder: Path) -> str:
    """Return the data type in a checkpoint's config.json, or "float32" if the file has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return "float32"  # load_checkpoint reports the damaged file
    for section in (config, config.get("text_config")):
        if not isinstance(section, dict):
            continue
        dtype_name = section.get("dtype") or section.get("torch_dtype")
        if dtype_name:
            return str(dtype_name)
    return "float32"
