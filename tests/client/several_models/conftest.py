"""Makes the asynchronous tests of this folder run with asyncio."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
