"""Saves a tiny checkpoint with a layer for multi-token prediction (MTP)."""

import json
from pathlib import Path

import torch
from backend.tiny_models import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from transformers import MellumConfig, MellumForCausalLM


def save_with_mtp(folder: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Save a model with three layers whose third layer becomes an MTP layer; return the folder."""
    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
        max_position_embeddings=256,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=False,
    )
    model = MellumForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02 if "layers" in name else 0.5)
    model.save_pretrained(folder)
    _add_mtp_weights(folder / "model.safetensors", config.hidden_size)

    config_file = folder / "config.json"
    changed_config = json.loads(config_file.read_text())
    changed_config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        changed_config[name] = changed_config[name][:2]
    config_file.write_text(json.dumps(changed_config))
    return folder


def _add_mtp_weights(path: Path, hidden_size: int) -> None:
    """Turn the third layer of a checkpoint into an MTP layer: rename and add weights."""
    tensors = {
        name.replace("model.layers.2.", "mtp.layers.0."): tensor
        for name, tensor in load_file(path).items()
    }
    # In this model, the next token mostly depends on the last token. If the MTP layer mostly reads
    # the embedding of the last token, it therefore often proposes the right token.
    read_embedding, read_hidden = torch.eye(hidden_size), torch.randn(hidden_size, hidden_size)
    tensors["mtp.fc.weight"] = torch.cat([read_embedding, 0.1 * read_hidden], dim=1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.ones(hidden_size)
    save_file(tensors, path, metadata={"format": "pt"})
