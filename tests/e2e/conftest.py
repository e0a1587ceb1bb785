import re
import urllib.request

import pytest
from served import Served


@pytest.fixture(scope="session")
def served():
    """The demo model on a real Triton server with the OpenAI frontend."""
    with Served(arguments=["--log-level=warning"]) as running:
        yield running


@pytest.fixture(scope="session")
def gauge(served):
    """Reads one of the engine's gauges from the server's metrics page."""

    def read(name):
        url = f"http://127.0.0.1:{served.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
        return float(re.search(rf"^nereid:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])

    return read
