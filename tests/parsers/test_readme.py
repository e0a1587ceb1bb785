"""Tests of the examples in parsers/README.md."""

import doctest

from parsers.support import REPOSITORY


def test_the_examples_of_the_readme_are_correct():
    readme = REPOSITORY / "parsers" / "README.md"
    result = doctest.testfile(str(readme), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
