"""Loads the model of a checkpoint on the CPU."""

from pathlib import Path

import torch
from nereid_backend.load_checkpoint import load_checkpoint
from transformers import PreTrainedModel


def load(path: str | Path, dtype: str = "float32", *, use_panels: bool = False) -> PreTrainedModel:
    """Load the model of a checkpoint folder or of a GGUF file.

    If `use_panels` is true, convert integer weights to the layout of the CPU kernels.
    """
    return load_checkpoint(
        str(path),
        dtype=dtype,
        device=torch.device("cpu"),
        attention="eager",
        progress=lambda line: None,
        use_panels=use_panels,
    ).model
