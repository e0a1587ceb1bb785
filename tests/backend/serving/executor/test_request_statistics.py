"""Tests that ended sequences are counted by their finish reasons."""

import backend.serving.fake_server  # noqa: F401 - provides triton_python_backend_utils
import pytest
from nereid_backend import RequestUpdate
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.executor.streams import Sequence, Stream


def finish_reasons(reason, *, at_stop_string, is_disconnected=False):
    """Return the number of sequences for each finish reason after the end of one sequence.

    The engine reports the finish reason `reason`.
    """
    statistics = RequestStatistics()
    # The executor asks the engine to abort a sequence when a stop string is found, and to abort a
    # whole stream when the client is gone.
    sequence = Sequence(index=0, slot=0, is_aborting=at_stop_string)
    stream = Stream("1", None, 1, [sequence], None, last_sent=100.0, is_aborting=is_disconnected)
    statistics.note_update(stream, RequestUpdate("1", [5], finish_reason=reason), 101.0)
    return statistics.finished


def test_a_stop_string_is_counted_as_stop_and_not_as_abort():
    assert finish_reasons("abort", at_stop_string=True) == {"stop": 1}


def test_a_disconnected_client_is_counted_as_abort():
    assert finish_reasons("abort", at_stop_string=False, is_disconnected=True) == {"abort": 1}


@pytest.mark.parametrize("reason", ["stop", "length", "error"])
def test_a_sequence_that_ends_while_it_is_aborted_keeps_its_reason(reason):
    assert finish_reasons(reason, at_stop_string=True) == {reason: 1}
