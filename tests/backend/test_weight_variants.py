"""Tests that engines with rounded weights or an adapter generate the tokens of transformers.

These tests compare a few types of model. tests/backend/archs.py compares all types.
"""

import pytest
from backend.weight_variants import VARIANTS

from backend import shrink

# In axk2, a linear layer expands the compressed keys and values of the whole context in every step.
# In llama4_text, the router of the experts is a linear layer that returns two tensors.
TYPES = ["llama", "axk2", "llama4_text"]
_USUAL = [
    ("llama", "int4"),
    ("llama", "int8 kernels"),
    ("axk2", "LoRA"),
    ("llama4_text", "LoRA"),
]
CASES = [
    pytest.param(model_type, name, marks=() if (model_type, name) in _USUAL else pytest.mark.long)
    for model_type in TYPES
    for name in VARIANTS
]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_the_tokens_of_a_variant_equal_those_of_transformers(model_type, name, tmp_path):
    expected, answers = VARIANTS[name](shrink.save(model_type, tmp_path))
    assert answers == expected
