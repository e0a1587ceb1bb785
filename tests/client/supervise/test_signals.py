"""Tests of the signals that stop `nereid serve`."""

import os
import signal
from types import SimpleNamespace

import pytest
from nereid_client.supervise.supervisor import Supervisor


@pytest.fixture
def hang_up():
    """A function that sets the handler of SIGHUP in the test's process until the test ends."""
    previous = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("handler", "stops"),
    [(signal.SIG_DFL, True), (signal.SIG_IGN, False)],
    ids=["without nohup", "with nohup"],
)
def test_a_closed_terminal_stops_the_server_only_without_nohup(hang_up, handler, stops):
    hang_up(handler)
    supervisor = Supervisor(SimpleNamespace(max_process_memory=0))
    with supervisor._handle_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert supervisor._stop.is_set() == stops
    assert signal.getsignal(signal.SIGHUP) == handler
