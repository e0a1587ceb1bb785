"""A program that converts a Qwen3 checkpoint to GGUF for llama.cpp and can quantize the weights.

    python -m loadtest.peers.gguf_export CHECKPOINT FILE
    python -m loadtest.peers.gguf_export CHECKPOINT FILE Q4_K_M

The package `gguf`, which belongs to llama.cpp, defines the names of tensors and metadata. llama.cpp
quantizes the weights.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from gguf.utility import SafetensorsLocal

_TYPES = {"F32": gguf.GGMLQuantizationType.F32, "BF16": gguf.GGMLQuantizationType.BF16}


def export(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint with one safetensors file as a GGUF file.

    The matrices keep their dtype, float32 or bfloat16. Vectors are float32, as llama.cpp requires.

    Raises:
        ValueError: a tensor has no counterpart in llama.cpp.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    add_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in SafetensorsLocal(checkpoint / "model.safetensors").tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"llama.cpp's qwen3 has no tensor for the weight {name}")
        kind, values = _TYPES[tensor.dtype], tensor.mmap_bytes()
        if len(tensor.shape) > 1:
            writer.add_tensor(gguf_name, values.reshape(tensor.shape[0], -1), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, gguf.dequantize(values, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the metadata of a model to a GGUF file. `config` is the content of config.json."""
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


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantize the weights of the GGUF file `source`, and write them to the GGUF file `target`.

    `kind` is llama.cpp's name of the quantization, such as "Q4_0" or "Q4_K_M".
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if code:
        raise RuntimeError(f"llama_model_quantize failed with the error code {code}.")


def main() -> None:
    """Export the checkpoint, and quantize the weights if the command line contains a kind."""
    checkpoint, file, *kinds = sys.argv[1:]
    if not kinds:
        export(Path(checkpoint), Path(file))
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported.gguf"
        export(Path(checkpoint), exported)
        quantize(exported, Path(file), kinds[0])


if __name__ == "__main__":
    main()
