import random

import pytest
from backend.pooling.tiny import BY_NAME, text


@pytest.fixture(scope="session")
def encoder_of(tmp_path_factory):
    """A function that returns the folder of the tiny checkpoint for a family's name and a head."""
    folders = {}

    def folder_of(name, head="base", **config):
        key = (name, head, repr(config))
        if key not in folders:
            folder = tmp_path_factory.mktemp(BY_NAME[name].model_type)
            folders[key] = BY_NAME[name].save(folder, head, **config)
        return folders[key]

    return folder_of


@pytest.fixture(scope="session")
def texts():
    """Texts of different lengths in random order."""
    rng = random.Random(7)
    return [text(rng, num_words) for num_words in (3, 40, 1, 17, 3, 90, 28, 9)]
