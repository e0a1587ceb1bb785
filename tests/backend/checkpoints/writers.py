"""Writes tiny quantised checkpoints, and the same checkpoints with dequantised weights.

If the library that defines a format is installed, this library writes and dequantises the weights.
The tests therefore do not only read files that Nereid's own code wrote.
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
    files = {name: f"model-{place % num_shards}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata=metadata)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _is_linear(name: str) -> bool:
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
            extra = {}
            if kind.startswith("nvfp4"):
                extra["global_scale"] = helpers.generate_gparam(weight.amin(), weight.amax())
            scale, zero = helpers.calculate_qparams(low, high, arguments, **extra)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            if extra:
                state["weight_global_scale"] = extra["global_scale"]
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
        parts = weight.reshape(1, 1, -1)
    elif strategy == "channel":
        parts = weight.reshape(rows, 1, columns)
    elif strategy == "block":
        height, width = arguments.block_structure
        parts = weight.reshape(rows // height, height, columns // width, width)
        parts = parts.transpose(1, 2).flatten(2)
    else:
        parts = weight.reshape(rows, -1, arguments.group_size)
    low, high = parts.amin(-1), parts.amax(-1)
    return (low[0], high[0]) if strategy == "tensor" else (low, high)


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
    """Return the settings and the encoder of bitsandbytes for "nf4", "fp4" or "int8"."""
    functional = library("bitsandbytes.functional")

    def encode(weight: Tensor) -> Encoded:
        with quiet():
            if kind == "int8":
                integers, largest, _ = functional.int8_vectorwise_quant(weight.half())
                dequantised = functional.int8_vectorwise_dequant(integers, largest)
                return {".weight": integers, ".SCB": largest.float()}, dequantised.float()
            # On a CPU, the library dequantises rows wrongly if they do not consist of whole blocks.
            packed, state = functional.quantize_4bit(
                weight.reshape(-1, 64), quant_type=kind, compress_statistics=is_nested, blocksize=64
            )
            dequantised = functional.dequantize_4bit(packed, state).view(weight.shape)
            state.shape = weight.shape
            tensors = {f".weight.{name}": t for name, t in state.as_dict(packed=True).items()}
            return {".weight": packed} | tensors, dequantised

    is_four_bits = kind != "int8"
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": is_four_bits,
        "load_in_8bit": not is_four_bits,
    }
    return settings, encode


# ---- Formats whose libraries need a GPU. The following functions write these formats themselves.


def bitsandbytes_stored_as(storage: torch.dtype) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of bitsandbytes with `bnb_4bit_quant_storage`.

    The encoder stores the bytes as numbers of the type `storage`.
    """
    numbers = torch.linspace(-1, 1, 16)

    def encode(weight: Tensor) -> Encoded:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        codes = ((blocks / largest[:, None]).unsqueeze(2) - numbers).abs().argmin(2)
        packed = (codes.view(-1, 2)[:, 0] << 4 | codes.view(-1, 2)[:, 1]).to(torch.uint8)
        state = json.dumps({"shape": list(weight.shape), "blocksize": 64}).encode()
        tensors = {
            ".weight": packed.view(storage)[:, None],
            ".weight.absmax": largest,
            ".weight.quant_map": numbers.clone(),
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
        }
        return tensors, (numbers[codes] * largest[:, None]).view(weight.shape)

    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, encode


def integers(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight to unsigned integers of `bits` bits.

    Returns:
        The integers [outputs, inputs], and the scales and the zeros [outputs, groups].
    """
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    values = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return values.clamp(0, 2**bits - 1).view(weight.shape), scales, zeros


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
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(weight: Tensor) -> Encoded:
        values, scales, zeros = integers(weight, 4, group_size)
        groups = torch.arange(weight.shape[1]) // group_size
        dequantised = (values - zeros[:, groups]) * scales[:, groups]
        tensors = {
            ".qweight": pack(values.T, 4, order),
            ".qzeros": pack(zeros.T, 4, order),
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
        groups = torch.empty(num_inputs, dtype=torch.int32)
        groups[order] = (torch.arange(num_inputs) // group_size).int()
        sorted_values, scales, zeros = integers(weight[:, order], bits, group_size)
        values = torch.empty_like(sorted_values)
        values[:, order] = sorted_values
        dequantised = (values - zeros[:, groups.long()]) * scales[:, groups.long()]
        qzeros = pack(zeros.T, bits)
        if not is_v2:
            qzeros = qzeros - pack(torch.ones_like(zeros.T), bits)
        tensors = {
            ".qweight": pack(values, bits).T,
            ".qzeros": qzeros,
            ".scales": scales.T.half(),
            ".g_idx": groups,
        }
        return tensors, dequantised

    name = "gptq_v2" if is_v2 else "gptq"
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": desc_act,
    }
    return settings | {"checkpoint_format": name}, encode


def fp8(*, block: int | None) -> tuple[dict, Callable[[Tensor], Encoded]]:
    """Return the settings and the encoder of float8 weights, which transformers dequantises.

    A scale applies to a block of `block` x `block` weights, or to the whole weight if it is None.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def encode(weight: Tensor) -> Encoded:
        rows, columns = weight.shape
        size = block or max(rows, columns)
        num_rows, num_columns = -(-rows // size), -(-columns // size)
        padded = torch.nn.functional.pad(
            weight, (0, num_columns * size - columns, 0, num_rows * size - rows)
        )
        blocks = padded.view(num_rows, size, num_columns, size)
        scales = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).view_as(padded).to(torch.float8_e4m3fn)
        dequantised = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
        tensors = {
            ".weight": values[:rows, :columns],
            ".weight_scale_inv": scales if block else scales.reshape(()),
            ".activation_scale": torch.ones(()),
        }
        return tensors, dequantised[:rows, :columns].contiguous()

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return settings | {"weight_block_size": [block, block] if block else None}, encode
