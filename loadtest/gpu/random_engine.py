"""Creates an engine whose model has random weights. The weights are created on the device.

Writing a checkpoint of 16 GB and reading it again would take longer than the measurement.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nereid_backend import Engine, EngineConfig
from nereid_backend.linear.lora_layers import LoraLayers
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model import load_weights
from nereid_backend.model.fused_norms import fuse_norms
from transformers import Qwen3ForCausalLM

from loadtest.bench.random_models import config_of


def random_engine(
    folder: Path,
    shape: str,
    dtype: str,
    progress: Callable[[str], None],
    *,
    fused_norms: bool = False,
    **settings: Any,  # noqa: ANN401
) -> Engine:
    """Return an engine for a Qwen3 model with random weights.

    Args:
        folder: an empty folder, in which the configuration of the model is stored.
        shape: the shape of the model, a key of `SHAPES` in loadtest/bench/random_models.py.
        dtype: the data type of the weights.
        progress: receives the engine's lines about the load.
        fused_norms: whether torch's fused function computes the RMSNorm modules.
        settings: further settings of the engine.
    """
    config_of(shape).save_pretrained(folder)
    load = functools.partial(random_checkpoint, shape, fused_norms)
    with (
        mock.patch.object(load_weights, "load_checkpoint", load),
        # The folder has no files of weights whose size could be checked.
        mock.patch.object(load_weights, "form_that_fits", create=True),
    ):
        return Engine(EngineConfig(str(folder), dtype=dtype, **settings), progress=progress)


def random_checkpoint(
    shape: str,
    fused_norms: bool,
    _path: str,
    *,
    dtype: str,
    device: torch.device,
    attention: str,
    **_: object,
) -> Checkpoint:
    """Return a model with random weights. This function replaces `load_checkpoint`."""
    model = random_model(shape, getattr(torch, dtype), device, attention)
    if fused_norms:
        fuse_norms(model)
    tensors = [*model.parameters(), *model.buffers()]
    return Checkpoint(
        model=model,
        device=device,
        text_config=model.config,
        architecture=type(model).__name__,
        eos_token_ids=(2,),
        vocab_size=model.config.vocab_size,
        weights_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        adapters=LoraLayers(model),
    )


def random_model(
    shape: str, dtype: torch.dtype, device: torch.device, attention: str
) -> Qwen3ForCausalLM:
    """Return a model with random weights. The weights are created on the device."""
    torch.manual_seed(0)
    config = config_of(shape)
    config._attn_implementation = attention
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)
