# SPDX-License-Identifier: Apache-2.0
"""Converts the weights of a checkpoint to integers or another data type, for `nereid convert`.

    python -m nereid_backend.tools.convert_checkpoint SOURCE TARGET int4

The source can have any format that Nereid loads, a GGUF file included. Integers are written in the
layout of the compressed-tensors library. The weights are read, converted and written in parts, so
the memory for the whole checkpoint is not needed.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.checkpoints.integer_panels import linear_names
from nereid_backend.checkpoints.load_model import model_class
from nereid_backend.checkpoints.read_config import check_files, read_config
from nereid_backend.checkpoints.safetensors_files import INDEX
from nereid_backend.checkpoints.weight_arguments import weight_arguments
from nereid_backend.errors import ConfigError, NereidError, UnsupportedModelError
from nereid_backend.linear.quantise_weights import GROUP_SIZES, quantise_weight
from nereid_backend.pooling.loading.sentence_modules import ModuleSpec, read_modules

Target = Literal["int4", "int8", "bfloat16", "float32"]

_BITS = {"int4": 4, "int8": 8}
_SHARD_BYTES = 2 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WRITTEN_FILES = ("config.json", INDEX)
_FAILURE = 2  # the exit code if the conversion fails


class _Integers(NamedTuple):
    """States which weights of a checkpoint become integers.

    Attributes:
        bits: the size of an integer, 4 or 8.
        names: the names of the weights that become integers.
        missing_names: the names of the linear layers' weights that the checkpoint does not contain.
    """

    bits: int
    names: set[str]
    missing_names: set[str]


class _Conversion(NamedTuple):
    """The weights of a checkpoint, and the data types that they get.

    Attributes:
        weights: the weights of the source by name. A weight is read from disk when it is indexed.
        float_dtype: the new data type of all floating point weights that do not become integers.
        integers: states which weights become integers; None if no weight becomes integers.
    """

    weights: Mapping[str, Any]
    float_dtype: torch.dtype
    integers: _Integers | None = None


def convert(source: str, target: str, dtype: Target) -> None:
    """Write a copy of a checkpoint in which the weights have another data type.

    Args:
        source: the folder of a checkpoint, or a GGUF file.
        target: the folder of the copy. It must be empty or missing.
        dtype: the data type. int4 and int8 apply only to linear layers, and not to the output
            layer.

    Raises:
        ConfigError: if the target folder is not empty.
        ModelError: if the source is damaged or not supported.
    """
    folder = Path(checkpoint_folder(source))
    new_folder = Path(target)
    check_files(folder)
    _check_target(new_folder)
    modules = read_modules(folder)
    conversion = _plan_conversion(folder, dtype)
    new_folder.mkdir(parents=True, exist_ok=True)
    _copy_other_files(folder, new_folder)
    _copy_modules(folder, new_folder, modules)
    _write_shards(new_folder, _converted_tensors(conversion))
    _write_config(folder, new_folder, conversion)


def _plan_conversion(folder: Path, dtype: Target) -> _Conversion:
    """Decide which data type each weight of the checkpoint in `folder` gets.

    Raises: UnsupportedModelError if the model has no class, or if `dtype` is an integer type and no
    weight belongs to a linear layer.
    """
    config = read_config(folder, trust_remote_code=False)
    if model_class(config) is None:
        raise UnsupportedModelError(f"transformers has no class for {config.model_type}.")
    is_integer = dtype in _BITS
    float_dtype = _dtype_of(config) if is_integer else getattr(torch, dtype)
    arguments = weight_arguments(folder, config, float_dtype, as_dict=True)
    weights = arguments["state_dict"]
    if not is_integer:
        return _Conversion(weights, float_dtype)
    unquantised_config = arguments["config"]  # `config` without quantization_config
    integers = _choose_integers(folder, dtype, unquantised_config, weights)
    return _Conversion(weights, float_dtype, integers)


def _choose_integers(
    folder: Path,
    dtype: Target,
    config: Any,  # noqa: ANN401 - configs of transformers
    weights: Mapping[str, Any],
) -> _Integers:
    """Choose the weights of the checkpoint in `folder` that become integers of the type `dtype`.

    `weights` contains all weights by name. `config` must not contain quantization_config.
    """
    linear_weights = _linear_weights(config)
    integer_names = linear_weights & weights.keys()
    if not integer_names:  # example: an embedding model without the prefix "bert." in the names
        raise UnsupportedModelError(
            f"No weight of {folder} can become {dtype}, because none has the name of a linear "
            f"layer of {model_class(config).__name__}. Convert the checkpoint to "
            "bfloat16 or float32."
        )
    return _Integers(_BITS[dtype], integer_names, linear_weights - integer_names)


def _check_target(folder: Path) -> None:
    """Raise a ConfigError if the folder of the copy is a file or contains files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Choose an empty or a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Choose an empty or a new folder.")


def _dtype_of(config: Any) -> torch.dtype:  # noqa: ANN401 - transformers' configs are untyped
    """Return the data type in a config, or float32 if the config has none."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _linear_weights(config: Any) -> set[str]:  # noqa: ANN401 - configs of transformers
    """Return the names of the weights of all linear layers of a model except the output layer.

    `config` must not contain the field quantization_config, because transformers would then create
    the layers of a quantisation library.
    """
    with torch.device("meta"):  # The weights of this model need no memory.
        return linear_names(model_class(config)(config))


def _converted_tensors(conversion: _Conversion) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each tensor in the new checkpoint.

    Example: with 8 bits, the weight "up_proj.weight" gives the integers "up_proj.weight" and the
    scales "up_proj.weight_scale".

    `conversion` contains the weights of the source, and the data types that they get.
    """
    integers = conversion.integers
    for name, lazy_weight in conversion.weights.items():
        weight = lazy_weight[...]  # read from disk
        is_matrix = weight.dim() == 2  # `quantise_weight` accepts only matrices.
        if integers is not None and name in integers.names and is_matrix:
            layer_name = name.removesuffix(".weight")
            for suffix, tensor in _rounded_tensors(weight, integers.bits).items():
                yield layer_name + suffix, tensor
        elif weight.is_floating_point():
            yield name, weight.to(conversion.float_dtype)
        else:
            yield name, weight


def _rounded_tensors(weight: Tensor, bits: int) -> dict[str, Tensor]:
    """Round a weight to integers. Return the resulting tensors, by the suffixes of their names.

    The suffixes are those of the compressed-tensors format, such as ".weight_scale". A group of
    integers has one scale and, with 4 bits, one zero point. Integers of 4 bits are packed.
    """
    values, scales, zeros = quantise_weight(weight, bits)
    if zeros is None:  # Integers of 8 bits have no zero points, and torch has a type for them.
        return {".weight": values, ".weight_scale": scales.half()}
    # The format packs the zero points of 8 consecutive outputs, and `_pack` packs along rows.
    zeros_by_group = zeros.to(torch.uint8).T  # [groups, outputs]
    packed_zeros_by_group = _pack(zeros_by_group)  # [groups, outputs / 8]
    return {
        ".weight_packed": _pack(values),
        ".weight_scale": scales.half(),
        ".weight_zero_point": packed_zeros_by_group.T.contiguous(),
        ".weight_shape": torch.tensor(weight.shape),
    }


def _pack(values: Tensor) -> Tensor:
    """Pack 8 consecutive 4-bit integers of a row into one 32-bit integer.

    The argument is uint8 [rows, columns], and the result is int32 [rows, columns / 8].

    Example: [[0, 1, 2, 3, 4, 5, 6, 7]] becomes [[0x76543210]].
    """
    num_padding = -values.shape[1] % 8  # rounds the number of columns up to a multiple of 8
    padded = functional.pad(values, (0, num_padding))
    low_halves = padded[:, 0::2]
    high_halves = padded[:, 1::2] << 4
    packed_bytes = low_halves | high_halves
    return packed_bytes.contiguous().view(torch.int32)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors to safetensors files of about 2 GiB, and write the index of these files.

    The index maps the name of each tensor to the file that contains the tensor. Each file name
    contains the number of files, such as "model-00001-of-00003.safetensors". This number is known
    only at the end, so the files get their names after the last file was written.
    """
    names_by_shard: list[list[str]] = []
    total_bytes = 0
    for index, shard in enumerate(_shards(tensors)):
        try:
            save_file(shard, folder / _unfinished(index), metadata={"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(
                f"The folder {folder} cannot be written ({error}). Delete the folder, free space "
                "on the disk and run the command again."
            ) from error
        names_by_shard.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        sys.stderr.write(f"nereid convert: wrote {total_bytes / 2**30:.2f} GiB of weights\n")
    weight_map: dict[str, str] = {}
    for index, names in enumerate(names_by_shard):
        file = f"model-{index + 1:05}-of-{len(names_by_shard):05}.safetensors"
        (folder / _unfinished(index)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict of tensors for each file that will be written. The last dict may be empty."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard = {}
            shard_bytes = 0
        shard[name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
    yield shard


def _unfinished(index: int) -> str:
    """Return the temporary name of the file with the number `index`.

    All files are renamed after the last file was written, because the final names contain the
    number of files.
    """
    return f"part-{index}.unfinished"


def _copy_other_files(folder: Path, new_folder: Path) -> None:
    """Copy the tokenizer, the chat template and all other files except the weights."""
    for file in folder.iterdir():
        is_weights = file.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
        if file.is_file() and not is_weights and file.name not in _WRITTEN_FILES:
            shutil.copy(file, new_folder)


def _copy_modules(folder: Path, new_folder: Path, modules: list[ModuleSpec]) -> None:
    """Copy the folders of a sentence-transformers checkpoint's modules, such as 1_Pooling.

    Without these folders, the embeddings would be different. The weights of modules are small, so
    they keep their data type.
    """
    for module in modules:
        if module.folder.is_dir() and module.folder.parent == folder:
            shutil.copytree(module.folder, new_folder / module.folder.name)


def _quantization_config(integers: _Integers) -> dict[str, Any]:
    """Return the quantization_config of the new checkpoint.

    This part of config.json describes the integers in the format of the compressed-tensors library.
    The output layer and the layers whose weights are missing are listed as not converted.
    """
    bits = integers.bits
    # `quantise_weight` returns zero points only for 4-bit integers. 8-bit integers are symmetric,
    # so the integer 0 always represents the weight 0.
    is_symmetric = bits == 8
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group",
        "group_size": GROUP_SIZES[bits],
    }
    # The format "pack-quantized" stores several integers in one 32-bit word.
    file_format = "pack-quantized" if bits == 4 else "int-quantized"
    unconverted = sorted(name.removesuffix(".weight") for name in integers.missing_names)
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", *unconverted],
    }


def _write_config(folder: Path, new_folder: Path, conversion: _Conversion) -> None:
    """Write a copy of a checkpoint's config.json that describes the new data type of the weights.

    Args:
        folder: the folder of the source.
        new_folder: the folder of the copy.
        conversion: the weights, and the data types that they get.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config") or {}
    # If a model accepts images, its config has a second section, `text_config`. From both sections,
    # remove the old quantization_config, and the field `torch_dtype`, which is the old name of
    # `dtype`.
    for section in (config, text_config):
        section.pop("quantization_config", None)
        section.pop("torch_dtype", None)
    # `dtype` in the main section of the config determines the data type of the whole model. A field
    # `dtype` in `text_config` has no effect, so it is not changed.
    config["dtype"] = str(conversion.float_dtype).removeprefix("torch.")  # such as "bfloat16"
    if conversion.integers is not None:
        config["quantization_config"] = _quantization_config(conversion.integers)
    text = json.dumps(config, indent=2)
    (new_folder / "config.json").write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Convert the checkpoint in the command-line arguments, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="nereid convert", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("source", help="the folder of a checkpoint, or a GGUF file")
    parser.add_argument("target", help="the new folder")
    parser.add_argument("dtype", choices=get_args(Target), help="the data type of the weights")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.target, options.dtype)
    except (NereidError, OSError) as error:
        sys.stderr.write(f"nereid convert: {error}\n")
        return _FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
