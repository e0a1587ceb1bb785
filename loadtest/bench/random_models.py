"""Qwen3 models with random weights, in the shapes that the benchmarks measure."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


class ModelShape(NamedTuple):
    """The sizes of a Qwen3 model, with the names of `Qwen3Config`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


# The sizes are in the order of the fields of ModelShape.
SHAPES = {
    "demo": ModelShape(160, 480, 6, 5, 1, 32, 2048),
    "0.1b": ModelShape(768, 2304, 12, 12, 4, 64, 32000),
    "0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, 151936),
    "8b": ModelShape(4096, 12288, 36, 32, 8, 128, 151936),
    # Two large layers with 0.6 GiB of bfloat16 weights, and a small vocabulary.
    "wide": ModelShape(3072, 12288, 2, 24, 8, 128, 2048),
}


def config_of(shape: str) -> Qwen3Config:
    """Return the configuration of a model shape. `shape` is a key of SHAPES."""
    return Qwen3Config(
        **SHAPES[shape]._asdict(),
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_checkpoint(path: Path, shape: str, dtype: str) -> int:
    """Save a model with random weights, and return its number of parameters.

    If the folder `path` already contains the model, the model is not saved again.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config_of(shape)).to(getattr(torch, dtype))
    if not (path / "config.json").is_file():
        model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())
