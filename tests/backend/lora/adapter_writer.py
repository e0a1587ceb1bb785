"""Writes random LoRA adapters in PEFT's layout, and merges them into the weights of a model."""

import copy
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_ALPHA = 8


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that an adapter can change in every architecture."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and not any(part in name for part in ("router", "experts.", "dt_proj"))
    ]


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    names: list[str],
    *,
    rank: int,
    seed: int,
    **settings,
) -> PreTrainedModel:
    """Write an adapter for the layers `names`, and return a copy of the model with merged weights.

    Args:
        folder: the folder of the adapter, which is created.
        model: the model.
        names: the names of linear layers.
        rank: the rank of all layers.
        seed: the seed of the random matrices.
        settings: further settings of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    scale = _ALPHA / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    for name in names:
        layer = merged.get_submodule(name)
        is_transposed = isinstance(layer, Conv1D)
        num_outputs, num_inputs = layer.weight.shape[:: -1 if is_transposed else 1]
        down = torch.randn(rank, num_inputs, generator=generator) * 0.1
        up = torch.randn(num_outputs, rank, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        product = (up @ down) * scale
        layer.weight.data += product.t() if is_transposed else product
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_config(folder, r=rank, **settings)
    return merged


def write_config(folder: Path, **settings) -> None:
    """Write adapter_config.json with PEFT's usual settings and with `settings`."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_alpha": _ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
