"""Checkpoints with more or fewer layers than an existing checkpoint."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def save_with_layers(source: Path, folder: Path, count: int, *, is_addition: bool) -> None:
    """Save a model with `count` additional layers, or with only its first `count` layers.

    An additional layer adds zeros to the hidden states, so it does not change the answers.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = model.state_dict()
    num_layers = model.config.num_hidden_layers
    total = num_layers + count if is_addition else count
    entries = json.loads((source / "config.json").read_text())
    config = type(model.config)(
        **{**entries, "num_hidden_layers": total, "layer_types": None, "max_window_layers": total}
    )
    new = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in new.state_dict().items():
        if name in old:
            tensor.copy_(old[name])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
