"""Writes tiny quantised checkpoints, and the same checkpoints with dequantised weights.

Some formats are defined by a library. The weights are quantised and dequantised by this library, so
that the tests also read files that Nereid's own code has not written. If the library is not
installed, the tests of the format are skipped.
"""

import contextlib
import importlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from backend.tiny_models import BY_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor

# The tensors into which one weight is quantised, such as {".qweight": ...}, and the dequantised
# weight. The keys are the suffixes of the tensors' names.
Encoded = tuple[dict[str, Tensor], Tensor]
Encoder = Callable[[Tensor], Encoded]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings from libraries, because pytest would turn the warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def library(name: str):
    """Return a module of a library. Skip the test if the library is not installed."""
    with quiet():
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name.partition('.')[0]} is not installed: {error}")


def write_pair(
    family: str,
    folder: Path,
    settings: dict,
    encode: Callable[[Tensor], Encoded],
    *,
    is_quantised: Callable[[str], bool] | None = None,
    metadata: dict | None = None,
    num_shards: int = 1,
) -> tuple[Path, Path]:
    """Write a tiny quantised checkpoint, and the same checkpoint with the dequantised weights.

    See `quantise_checkpoint` for the other arguments.

    Args:
        family: the name of a family in backend.tiny_models.
        folder: the folder in which the function creates the folders of both checkpoints.
    """
    plain = BY_NAME[family].save(folder / "plain")
    return quantise_checkpoint(
        plain,
        folder / "quantised",
        settings,
        encode,
        is_quantised=is_quantised,
        metadata=metadata,
        num_shards=num_shards,
    )


def quantise_checkpoint(
    plain: Path,
    quantised: Path,
    settings: dict,
    encode: Callable[[Tensor], Encoded],
    *,
    is_quantised: Callable[[str], bool] | None = None,
    metadata: dict | None = None,
    num_shards: int = 1,
) -> tuple[Path, Path]:
    """Write a quantised copy of a checkpoint, and return the folders of the original and the copy.

    Args:
        plain: the folder of the checkpoint. The function replaces its weights that are quantised in
            the copy with the dequantised weights.
        quantised: the new folder of the copy.
        settings: the value of `quantization_config` in the config.json of the copy.
        encode: a function that quantises one weight.
        is_quantised: a function that decides by the name of a weight whether it is quantised. By
            default, the weights of all linear layers except lm_head are quantised.
        metadata: the metadata of the safetensors file.
        num_shards: the number of files with weights.
    """
    shutil.copytree(plain, quantised)
    is_quantised = is_quantised or _is_linear
    reference, stored = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if weight.dim() == 2 and is_quantised(name):
            tensors, reference[name] = encode(weight)
            stem = name.removesuffix(".weight")
            stored |= {stem + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
        else:
            stored[name] = reference[name] = weight
    save_file(reference, plain / "model.safetensors", metadata={"format": "pt"})
    write_shards(quantised, stored, {"format": "pt"} | (metadata or {}), num_shards)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = settings
    (quantised / "config.json").write_text(json.dumps(config))
    return plain, quantised


def write_shards(folder: Path, tensors: dict, metadata: dict, num_shards: int) -> None:
    """Write the weights of a checkpoint as one file, or as several files with an index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        shard = {name: tensors[name] for name in names if files[name] == file}
        save_file(shard, folder / file, metadata=metadata)
    file_index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(file_index))


def _is_linear(name: str) -> bool:
    """Return whether a weight belongs to a linear layer other than lm_head."""
    return name.endswith("proj.weight")


# ---- compressed-tensors


def compressed_tensors(kind: str, **weights) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of a format of compressed-tensors.

    Args:
        kind: the format, such as "pack-quantized".
        weights: the fields of QuantizationArgs.
    """
    library("compressed_tensors")
    quantization = library("compressed_tensors.quantization")
    helpers = library("compressed_tensors.quantization.utils.helpers")
    compressors = library("compressed_tensors.compressors.base")
    arguments = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format=kind)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)

    def encode(weight: Tensor) -> Encoded:
        with quiet():
            low, high = _ranges(weight, arguments)
            global_scale = {}
            if kind.startswith("nvfp4"):
                global_scale["global_scale"] = helpers.generate_gparam(weight.amin(), weight.amax())
            scale, zero = helpers.calculate_qparams(low, high, arguments, **global_scale)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            state |= {f"weight_{name}": value for name, value in global_scale.items()}
            packed = compressor.compress(state, scheme)
            dequantised = compressor.decompress(packed, scheme)["weight"].float()
        return {f".{name}": tensor for name, tensor in packed.items()}, dequantised

    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    return settings, encode


def _ranges(weight: Tensor, arguments) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest weight of each group, in the shape of the scales."""
    rows, columns = weight.shape
    strategy = getattr(arguments.strategy, "value", arguments.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        groups = weight.reshape(rows, 1, columns)
    elif strategy == "block":
        height, width = arguments.block_structure
        blocks = weight.reshape(rows // height, height, columns // width, width)
        groups = blocks.transpose(1, 2).flatten(2)
    else:
        groups = weight.reshape(rows, -1, arguments.group_size)
    return groups.amin(-1), groups.amax(-1)


# ---- torchao


def torchao(kind: str, *, group_size: int = 16) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of torchao for "int4", "int8" or "float8"."""
    library("torchao")
    api = library("torchao.quantization")
    support = library("torchao.prototype.safetensors.safetensors_support")
    granularity = library("torchao.quantization.granularity")
    configs = {
        "int4": lambda: api.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=granularity.PerGroup(group_size)
        ),
        "int8": lambda: api.Int8WeightOnlyConfig(version=2),
        "float8": lambda: api.Float8WeightOnlyConfig(),
    }

    def encode(weight: Tensor) -> Encoded:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        with quiet():
            api.quantize_(layer, configs[kind]())
            quantised = layer.weight.data
            tensors, _ = support.flatten_tensor_state_dict({"x.weight": quantised})
            dequantised = quantised.dequantize().float()
        return {name.removeprefix("x"): tensor for name, tensor in tensors.items()}, dequantised

    return {"quant_method": "torchao", "quant_type": kind}, encode


# ---- bitsandbytes


def bitsandbytes(kind: str, *, is_nested: bool = False) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of bitsandbytes for "nf4", "fp4" or "int8".

    With `is_nested`, the library also quantises the scales of 4-bit weights.
    """
    functional = library("bitsandbytes.functional")

    def encode_int8(weight: Tensor) -> Encoded:
        integers, scales, _ = functional.int8_vectorwise_quant(weight.half())
        dequantised = functional.int8_vectorwise_dequant(integers, scales)
        return {".weight": integers, ".SCB": scales.float()}, dequantised.float()

    def encode_4_bits(weight: Tensor) -> Encoded:
        # The weight is reshaped into rows of one block each, because on a CPU the library
        # dequantises rows wrongly if they do not consist of whole blocks.
        packed, state = functional.quantize_4bit(
            weight.reshape(-1, 64), quant_type=kind, compress_statistics=is_nested, blocksize=64
        )
        dequantised = functional.dequantize_4bit(packed, state).view(weight.shape)
        state.shape = weight.shape
        tensors = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {".weight": packed} | tensors, dequantised

    def encode(weight: Tensor) -> Encoded:
        with quiet():
            return encode_int8(weight) if kind == "int8" else encode_4_bits(weight)

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
    }
    return settings, encode


# ---- Formats whose libraries need a GPU. The following functions write these formats themselves.


def bitsandbytes_stored_as(storage: torch.dtype) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of bitsandbytes with `bnb_4bit_quant_storage`.

    The encoder stores the bytes as numbers of the type `storage`.
    """
    # A weight is a number of this table, multiplied by the scale of the weight's block. A block has
    # 64 weights. The file contains the index of the number.
    numbers = torch.linspace(-1, 1, 16)

    def encode(weight: Tensor) -> Encoded:
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        indices = ((blocks / scales[:, None]).unsqueeze(2) - numbers).abs().argmin(2)
        pairs = indices.view(-1, 2)
        packed = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)
        state = json.dumps({"shape": list(weight.shape), "blocksize": 64}).encode()
        tensors = {
            ".weight": packed.view(storage)[:, None],
            ".weight.absmax": scales,
            ".weight.quant_map": numbers.clone(),
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
        }
        return tensors, (numbers[indices] * scales[:, None]).view(weight.shape)

    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, encode


def integers(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight to unsigned integers of `bits` bits.

    Returns:
        The integers [outputs, inputs], and the scales and the zeros [outputs, groups].
    """
    largest = 2**bits - 1
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / largest).half().float()
    zeros = (-low / scales).round().clamp(0, largest)
    values = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return values.clamp(0, largest).view(weight.shape), scales, zeros


def pack(rows: Tensor, bits: int, order=range(8)) -> Tensor:
    """Pack the integers of each row into 32-bit integers.

    If `bits` is 4, `order` is the order of the eight integers in a 32-bit integer.
    """
    rows = rows.long()
    if bits == 4:
        rows = rows.view(len(rows), -1, 8)[:, :, list(order)].flatten(1)
    digits = (rows.unsqueeze(2) >> torch.arange(bits)) & 1
    words = digits.reshape(len(rows), -1, 32) << torch.arange(32)
    return words.sum(2).to(torch.int32)


def awq(*, group_size: int = 16) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of AWQ."""
    order_in_word = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(weight: Tensor) -> Encoded:
        values, scales, zeros = integers(weight, 4, group_size)
        group_of_input = torch.arange(weight.shape[1]) // group_size
        dequantised = (values - zeros[:, group_of_input]) * scales[:, group_of_input]
        tensors = {
            ".qweight": pack(values.T, 4, order_in_word),
            ".qzeros": pack(zeros.T, 4, order_in_word),
            ".scales": scales.T.half(),
        }
        return tensors, dequantised

    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size}, encode


def gptq(
    bits: int, *, is_v2: bool = False, desc_act: bool = False, group_size: int = 16
) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of GPTQ.

    Version 1 of the format stores the zeros minus one. Version 2 (`is_v2`) stores the zeros. With
    `desc_act`, the groups consist of weights in activation order.
    """

    def encode(weight: Tensor) -> Encoded:
        num_inputs = weight.shape[1]
        order = torch.arange(num_inputs)
        if desc_act:
            order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))
        sorted_values, scales, zeros = integers(weight[:, order], bits, group_size)
        # Undo the sorting: column i of `sorted_values` belongs to the input order[i].
        values = torch.empty_like(sorted_values)
        values[:, order] = sorted_values
        group_of_input = torch.empty(num_inputs, dtype=torch.int64)
        group_of_input[order] = torch.arange(num_inputs) // group_size
        dequantised = (values - zeros[:, group_of_input]) * scales[:, group_of_input]
        packed_zeros = pack(zeros.T, bits)
        if not is_v2:
            packed_zeros = packed_zeros - pack(torch.ones_like(zeros.T), bits)
        tensors = {
            ".qweight": pack(values, bits).T,
            ".qzeros": packed_zeros,
            ".scales": scales.T.half(),
            ".g_idx": group_of_input.int(),
        }
        return tensors, dequantised

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq",
    }
    return settings, encode


def fp8(*, block: int | None) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of float8 weights, which transformers dequantises.

    A scale applies to a block of `block` x `block` weights, or to the whole weight if it is None.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def encode(weight: Tensor) -> Encoded:
        rows, columns = weight.shape
        size = block or max(rows, columns)
        padding = (0, -columns % size, 0, -rows % size)
        padded = torch.nn.functional.pad(weight, padding)
        blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        # The largest number of the format e4m3 is 448.
        scales = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).view_as(padded).to(torch.float8_e4m3fn)
        dequantised = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
        tensors = {
            ".weight": values[:rows, :columns],
            ".weight_scale_inv": scales if block else scales.reshape(()),
            ".activation_scale": torch.ones(()),
        }
        return tensors, dequantised[:rows, :columns].contiguous()

    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block] if block else None,
    }
    return settings, encode
