from pathlib import Path

import pytest
from nereid_backend.core.draft_tokens.draft_lengths import StepCosts
from nereid_backend.fast_imports import importing
from nereid_backend.vision.torchvision_operators import declare_operators

with importing():
    # transformers imports torchvision. Without CUDA, this import requires these operators.
    declare_operators()
    import torch
    from backend.tiny_models import BY_NAME
    from transformers.utils import logging

    from backend import shrink

logging.disable_progress_bar()
# On a busy machine, threads that wait for each other would make tiny models slow.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that returns the folder of the tiny checkpoint of a family (see `FAMILIES`)."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = BY_NAME[name].save(tmp_path_factory.mktemp(BY_NAME[name].model_type))
        return folders[name]

    return folder_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the folder of a tiny checkpoint of a `model_type` of transformers."""
    folders = {}

    def folder_of(model_type):
        if model_type not in folders:
            folders[model_type] = shrink.save(model_type, tmp_path_factory.mktemp(model_type))
        return folders[model_type]

    return folder_of


@pytest.fixture
def cheap_drafts(monkeypatch):
    """Make the engine always propose draft tokens.

    Otherwise, it would propose hardly any, because drafts do not make the steps of tiny models
    faster.
    """
    monkeypatch.setattr(StepCosts, "ratio", lambda _costs, _num_sequences: 0.05)
