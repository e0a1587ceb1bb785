import pytest
from backend.exactness import SITUATIONS, reference
from backend.tiny_models import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request, checkpoint):
    folder = checkpoint(request.param.name)
    return folder, reference(folder)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_greedy_tokens_equal_those_of_transformers(family, situation):
    folder, expected = family
    assert SITUATIONS[situation](folder) == expected


def test_the_answers_vary_so_that_equality_means_something(family):
    _, expected = family
    tokens = [token for answer in expected for token in answer]
    assert len(set(tokens)) > 20
