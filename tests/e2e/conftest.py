import pytest
from e2e.gauges_page import gauge_of

from loadtest.server.served import Served


@pytest.fixture(scope="session")
def served():
    """The demo model on a real Triton server with the OpenAI frontend."""
    with Served(arguments=["--log-level=warning"]) as running:
        yield running


@pytest.fixture(scope="session")
def gauge(served):
    """Reads one of the engine's gauges from the server's metrics page."""
    return gauge_of(served.metrics_port)
