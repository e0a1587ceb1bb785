# SPDX-License-Identifier: Apache-2.0
"""Tests that the states of several sequences are merged into the cache of a batch."""

from types import SimpleNamespace

import pytest
import torch
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.recurrent_cache import merge_states


def cache_of_one_layer():
    return SimpleNamespace(layers=[SimpleNamespace()])


def test_tensors_are_concatenated_and_equal_values_are_kept():
    cache = cache_of_one_layer()
    states = [[{"states": {0: torch.full((1, 2), float(row))}, "is_ready": True}] for row in (3, 4)]
    merge_states(cache, states)
    layer = cache.layers[0]
    assert layer.states[0].tolist() == [[3, 3], [4, 4]]
    assert layer.is_ready is True


def test_the_error_names_the_two_values_that_differ():
    states = [[{"offset": 1}], [{"offset": 2}], [{"offset": 1}]]
    with pytest.raises(UnfitError, match="differs: 1 and 2"):
        merge_states(cache_of_one_layer(), states)
