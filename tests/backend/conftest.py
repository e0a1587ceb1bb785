from pathlib import Path

import pytest
from nereid_backend.core.draft_tokens.draft_lengths import StepCosts
from nereid_backend.fast_imports import importing
from nereid_backend.vision.torchvision_operators import declare_operators

with importing():
    # transformers imports torchvision if it is installed.
    declare_operators()
    import torch
    from backend.tiny_models import BY_NAME
    from transformers.utils import logging

    from backend import shrink

logging.disable_progress_bar()
# Threads that wait for each other make tiny models slow on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function from a family's name to the folder of its tiny checkpoint, saved on first use."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = BY_NAME[name].save(tmp_path_factory.mktemp(BY_NAME[name].model_type))
        return folders[name]

    return folder_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a type of transformers to the folder of its tiny checkpoint."""
    folders = {}

    def folder_of(model_type):
        if model_type not in folders:
            folders[model_type] = shrink.save(model_type, tmp_path_factory.mktemp(model_type))
        return folders[model_type]

    return folder_of


@pytest.fixture
def cheap_drafts(monkeypatch):
    """Draft tokens are always proposed, although steps of tiny models are too short for a gain."""
    monkeypatch.setattr(StepCosts, "ratio", lambda _costs, _num_sequences: 0.05)
