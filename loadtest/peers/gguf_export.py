"""Conversion of a Qwen3 checkpoint to GGUF, with or without quantization, for llama.cpp.

    python -m loadtest.peers.gguf_export CHECKPOINT FILE bfloat16
    python -m loadtest.peers.gguf_export CHECKPOINT FILE bfloat16 Q4_K_M

The names of tensors and metadata come from the package `gguf`, which belongs to llama.cpp.
llama.cpp itself quantizes the weights.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

# A safetensors file begins with this number of bytes. They contain the length of the JSON header as
# a little-endian uint64.
_HEADER_LENGTH_BYTES = 8
_ARCHITECTURE = "qwen3"


def export(checkpoint: Path, file: Path, dtype: str) -> None:
    """Write a checkpoint with one safetensors file as a GGUF file.

    Args:
        checkpoint: the folder with config.json and model.safetensors.
        file: the path of the GGUF file.
        dtype: the dtype of the matrices, "float32" or "bfloat16". Vectors are float32, as llama.cpp
            requires.

    Raises:
        ValueError: a tensor has no counterpart in llama.cpp, or has another dtype than float32 and
            bfloat16.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, _ARCHITECTURE)
    add_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in read_safetensors(checkpoint / "model.safetensors"):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"llama.cpp's {_ARCHITECTURE} has no tensor for the weight {name}")
        if tensor.ndim > 1 and dtype == "bfloat16":
            words = to_bfloat16(tensor).view(np.uint8)
            writer.add_tensor(target, words, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of a model to a GGUF file. `config` is the content of config.json."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and values of all tensors in a file, converted to float32.

    numpy has no bfloat16, so the library safetensors cannot read such tensors without torch.

    Raises:
        ValueError: a tensor has another dtype than float32 and bfloat16.
    """
    content = path.read_bytes()
    header_end = _HEADER_LENGTH_BYTES + int.from_bytes(content[:_HEADER_LENGTH_BYTES], "little")
    header = json.loads(content[_HEADER_LENGTH_BYTES:header_end])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = content[header_end + start : header_end + end]
        if entry["dtype"] == "BF16":
            values = from_bfloat16(np.frombuffer(raw, np.uint16))
        elif entry["dtype"] == "F32":
            values = np.frombuffer(raw, np.float32)
        else:
            raise ValueError(
                f"the tensor {name} has the dtype {entry['dtype']}, which cannot be exported; save "
                "the checkpoint as float32 or bfloat16"
            )
        yield name, values.reshape(entry["shape"])


def from_bfloat16(words: np.ndarray) -> np.ndarray:
    """Convert the bit patterns of bfloat16 to float32.

    A bfloat16 number consists of the upper 16 bits of a float32 number.
    """
    return (words.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert float32 to the bit patterns of bfloat16, rounded to the nearest even number."""
    words = np.ascontiguousarray(values).view(np.uint32)
    is_odd = (words >> 16) & 1
    # The sum carries into the upper 16 bits if the lower ones are more than half, or if they are
    # half and the upper ones are odd.
    return ((words + 0x7FFF + is_odd) >> 16).astype(np.uint16)


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with quantized weights.

    Args:
        source: a GGUF file with float32 or bfloat16 weights.
        target: the path of the new file.
        kind: llama.cpp's name of the mixture of block types, such as "Q4_0" or "Q4_K_M".

    Raises:
        RuntimeError: llama.cpp failed.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if code:
        raise RuntimeError(f"llama_model_quantize failed with the error code {code}.")


def main() -> None:
    """Export the checkpoint that the command line names."""
    checkpoint, file, dtype, *kinds = sys.argv[1:]
    if not kinds:
        export(Path(checkpoint), Path(file), dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported.gguf"
        export(Path(checkpoint), exported, dtype)
        quantize(exported, Path(file), kinds[0])


if __name__ == "__main__":
    main()
