"""Tests that an error of rank 0 is reported together with the failure of another rank."""

import threading

import pytest
from nereid_backend.errors import EngineError
from nereid_backend.parallel.ranks import Ranks


def failed_ranks(failure):
    """Return the ranks of an engine in which one rank has already failed."""
    ranks = Ranks.__new__(Ranks)
    ranks._failure = failure
    ranks._has_failed = threading.Event()
    ranks._has_failed.set()
    return ranks


def test_an_error_without_a_message_does_not_hide_the_failure_of_another_rank():
    ranks = failed_ranks("rank 1 of the model failed: MemoryError: no memory is left")
    with pytest.raises(EngineError, match="no memory is left"), ranks.loading():
        raise RuntimeError


@pytest.mark.parametrize("message", ["the file is damaged", ""])
def test_an_error_that_all_ranks_have_is_raised_unchanged(message):
    ranks = failed_ranks(f"rank 1 of the model failed: ValueError: {message}")
    with pytest.raises(ValueError, match=f"^{message}$"), ranks.loading():
        raise ValueError(message)
