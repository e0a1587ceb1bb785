import pytest
from e2e.gauges_page import gauge_of


@pytest.fixture(scope="session")
def gauge(served):
    """A function that takes the name of one of the engine's metrics, and returns its value."""
    return gauge_of(served.metrics_port)
