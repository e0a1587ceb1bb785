"""Tests that requests which schemathesis derives from the OpenAPI description cause no status 5xx.

These tests use the echo model.
"""

import pytest
from fakes.described_requests import DescribedRequests
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import live_frontend
from nereid_client.errors import BackendError


class StrictBackend(FakeBackend):
    """The echo model, but messages that it cannot read cause an INVALID_ARGUMENT error.

    The real tokenizer refuses such messages in the same way.
    """

    async def generate(self, generation):
        try:
            async for delta in super().generate(generation):
                yield delta
        except UNREADABLE as error:
            raise unreadable(error) from None

    async def tokenize(self, generation):
        try:
            return await super().tokenize(generation)
        except UNREADABLE as error:
            raise unreadable(error) from None


def unreadable(error):
    return BackendError(
        "INVALID_ARGUMENT", f"messages: the echo model cannot read them ({error!r})"
    )


UNREADABLE = (KeyError, IndexError, TypeError, AttributeError, ValueError)
# The long tests divide the routes into this number of parts. Each part receives 1,000 requests.
NUM_PARTS = 20


@pytest.mark.parametrize(
    ("part", "num_requests"),
    [
        pytest.param(0, 40, id="quick"),
        *(pytest.param(part, 1000, marks=pytest.mark.long) for part in range(NUM_PARTS)),
    ],
)
def test_no_request_causes_an_internal_error(tmp_path, part, num_requests):
    folder = str(tmp_path / "batches")
    with live_frontend(StrictBackend(), FakePooling(), batch_folder=folder) as port:
        sender = DescribedRequests(f"http://127.0.0.1:{port}", ["echo"])
        sender.send(part, NUM_PARTS, num_requests)
    assert not sender.failures
    print(dict(sender.counts))  # noqa: T201 - `pytest -s` shows the statuses
