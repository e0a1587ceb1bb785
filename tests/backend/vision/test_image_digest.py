"""Tests that different image arguments of a model have different digests."""

import numpy as np
import torch
from nereid_backend.vision.image_digest import arguments_digest

VALUES = [
    [1, 23],
    [12, 3],
    [[1], [2]],
    [[1, 2]],
    "1, 23",
    torch.tensor([1, 23]),
    torch.tensor([[1], [23]]),
    torch.tensor([1.0, 23.0]),
    np.array([1, 23], dtype=np.int32),
]


def test_different_arguments_have_different_digests():
    digests = {arguments_digest({"sizes": value}) for value in VALUES}
    assert len(digests) == len(VALUES)
    assert arguments_digest({"sizes": [1, 23]}) == arguments_digest({"sizes": [1, 23]})


def test_the_types_of_the_tokens_do_not_change_the_digest():
    pixels = {"pixel_values": torch.tensor([1.0, 23.0])}
    types = [{"mm_token_type_ids": torch.tensor([[0, 1, 1] + [0] * length])} for length in (1, 2)]
    assert len({arguments_digest({**pixels, **each}) for each in types}) == 1
