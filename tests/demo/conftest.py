"""Fixtures of the demo's tests.

The scripts of the demo are not a package, so their folder is added to `sys.path`.
"""

import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "demo"
sys.path.insert(0, str(DEMO))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return DEMO / "chat"


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def examinee(checkpoint):
    from evaluate import Examinee

    return Examinee(checkpoint)
