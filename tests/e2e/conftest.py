import pytest
from e2e.gauges_page import gauge_of


@pytest.fixture(scope="session")
def gauge(served):
    """Reads one of the engine's gauges from the server's metrics page."""
    return gauge_of(served.metrics_port)
