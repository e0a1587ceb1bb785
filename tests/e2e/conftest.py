import pytest
from e2e.gauges_page import gauge_of


@pytest.fixture(scope="session")
def gauge(served):
    """A function that reads the value of one of the engine's metrics from the metrics page."""
    return gauge_of(served.metrics_port)
