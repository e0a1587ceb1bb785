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
# With several threads, each operation would wait for the slowest thread. On a busy machine, these
# waits would take longer than the computation of a tiny model.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that returns the folder of the tiny checkpoint of a family (see `FAMILIES`).

    The function saves each checkpoint once in a test session.
    """
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = BY_NAME[name].save(tmp_path_factory.mktemp(BY_NAME[name].model_type))
        return folders[name]

    return folder_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the folder of a tiny checkpoint of a `model_type` of transformers.

    The function saves each checkpoint once for each test module.
    """
    folders = {}

    def folder_of(model_type):
        if model_type not in folders:
            folders[model_type] = shrink.save(model_type, tmp_path_factory.mktemp(model_type))
        return folders[model_type]

    return folder_of


@pytest.fixture
def cheap_drafts(monkeypatch):
    """Make the engine propose draft tokens in all steps.

    Without this fixture, the engine would propose hardly any, because drafts do not make the short
    steps of a tiny model faster. The fixture sets the cost of a draft token to 5 % of the cost of a
    sequence in a step.
    """
    monkeypatch.setattr(StepCosts, "ratio", lambda _costs, _num_sequences: 0.05)
