"""Loads the model of a checkpoint on the CPU."""

from pathlib import Path

import torch
from nereid_backend.load_checkpoint import load_checkpoint
from transformers import PreTrainedModel


def load(path: str | Path, dtype: str = "float32", *, use_panels: bool = False) -> PreTrainedModel:
    """Return the model of a folder or a GGUF file.

    With `use_panels`, integer weights are copied into the layout of the CPU kernels.
    """
    return load_checkpoint(
        str(path),
        dtype=dtype,
        device=torch.device("cpu"),
        attention="eager",
        progress=lambda line: None,
        use_panels=use_panels,
    ).model
