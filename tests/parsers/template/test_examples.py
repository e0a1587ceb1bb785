"""Tests of the examples in the docstrings of the template analysis."""

import doctest
import importlib
import pkgutil

import pytest
from nereid_parsers import template

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(template.__path__, prefix=f"{template.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_correct(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
