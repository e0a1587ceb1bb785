"""Converts checkpoints to GGUF files, as the converter and the quantiser of llama.cpp do."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from backend.checkpoints.ggml_quantise import quantise
from backend.tiny_models import Family
from safetensors.torch import load_file

# A part of the name of a tensor in transformers, and the name of the tensor in GGUF files.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


# A tiny model whose rows have at least 256 weights, because a block of K-quants has 256 weights.
WIDE = Family("wide", "qwen3", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
# The types that llama.cpp uses for some tensors of a file with the name Q4_K_M.
Q4_K_M = {"token_embd": "Q6_K", "output": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}


def write_gguf(
    folder: Path,
    architecture: str,
    kind: str,
    *,
    other_kinds: Mapping[str, str] | None = None,
    metadata: dict | None = None,
    path: Path | None = None,
) -> Path:
    """Write a GGUF file of a checkpoint, and return its path.

    Args:
        folder: the folder of the checkpoint.
        architecture: the name of the architecture in GGUF files, such as "qwen3moe".
        kind: the type of the weights, such as "Q8_0". The weights of norms are float32. Weights
            whose rows cannot be divided into blocks are also float32.
        other_kinds: the types of tensors that differ from `kind`. A key is the part of the tensor's
            name before ".weight", such as "ffn_down".
        metadata: further metadata. The function adds the name of the architecture to each key.
        path: the path of the file; None for a file in `folder` with the name of the type.
    """
    config = json.loads((folder / "config.json").read_text())
    path = path or folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, number in (_sizes(config) | (metadata or {})).items():
        add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder)
    for name, weight in _converted_weights(folder, architecture, config).items():
        kind_name = (other_kinds or {}).get(name.split(".")[-2], kind)
        weight_kind = gguf.GGMLQuantizationType[kind_name]
        block_size, _ = gguf.GGML_QUANT_SIZES[weight_kind]
        if weight.dim() == 1 or weight.shape[-1] % block_size:
            weight_kind = gguf.GGMLQuantizationType.F32
        blocks = quantise(weight.float().numpy(), weight_kind)
        writer.add_tensor(name, blocks, raw_dtype=weight_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(config: dict) -> dict[str, int]:
    """Return the sizes of a model by their GGUF names, such as {"embedding_length": 64}."""
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    if config.get("head_dim"):
        sizes["attention.key_length"] = config["head_dim"]
    return sizes


def _converted_weights(folder: Path, architecture: str, config: dict) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by their GGUF names.

    The weights of all experts of a layer become one stacked weight.
    """
    weights, experts = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        gguf_name, converted = _convert(name, weight, architecture, config)
        if "exps" in gguf_name:
            experts.setdefault(gguf_name, []).append(converted)
        else:
            weights[gguf_name] = converted
    return weights | {name: torch.stack(stacked) for name, stacked in experts.items()}


def dequantised_weights(folder: Path, path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a GGUF file of the architecture qwen3, by their names in transformers.

    Args:
        folder: the checkpoint from which the file was written.
        path: the file.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensor = tensors[_convert(name, weight, "qwen3", config)[0]]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[name] = torch.from_numpy(values.reshape(weight.shape))
    return weights


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add the byte-level BPE tokenizer and the chat template of a checkpoint."""
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    ids |= {name: token["id"] for name, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    # The type 1 is a normal token, 3 is a special token, and 4 is another added token.
    kinds = [1 if name not in added else 3 if added[name]["special"] else 4 for name in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _convert(name: str, weight: torch.Tensor, architecture: str, config: dict):
    """Convert a weight of a checkpoint: return its name and its values in a GGUF file.

    Example: the name "model.layers.3.mlp.up_proj.weight" becomes "blk.3.ffn_up.weight".
    """
    is_gemma = architecture.startswith("gemma")
    if is_gemma and name.endswith("norm.weight"):
        weight = weight + 1
    if name in _TOP:
        return _TOP[name], weight.contiguous()
    _, _, layer, name_in_layer = name.split(".", 3)
    part, _, suffix = name_in_layer.rpartition(".")
    if ".experts." in part:
        # Remove the number of the expert: "mlp.experts.5.up_proj" becomes "mlp.experts.up_proj".
        part = re.sub(r"\.experts\.\d+\.", ".experts.", part)
    if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        # In GGUF files of this architecture, the two halves of each head are interleaved.
        is_key = part.endswith("k_proj")
        num_heads = config["num_key_value_heads" if is_key else "num_attention_heads"]
        halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    names = _NAMES | (_GEMMA_NORMS if is_gemma else _NORMS)
    return f"blk.{layer}.{names[part]}.{suffix}", weight.contiguous()
