"""Requests that schemathesis derives from the OpenAPI description never cause a 5xx."""

import collections

import hypothesis
import pytest
import requests
import schemathesis
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import live_frontend
from hypothesis import HealthCheck, Phase
from nereid_client.errors import BackendError
from schemathesis import GenerationMode


class StrictBackend(FakeBackend):
    """The echo model, which refuses messages that it cannot read, as the real tokenizer does."""

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
# The long tests divide the routes into this number of parts. Together, they send 20,000 requests.
NUM_PARTS = 20
# The kinds of requests: valid ones, and ones that violate the description.
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize(
    ("part", "num_requests"),
    [
        pytest.param(0, 40, id="quick"),
        *(pytest.param(part, 1700, marks=pytest.mark.long) for part in range(NUM_PARTS)),
    ],
)
def test_no_request_causes_an_internal_error(tmp_path, part, num_requests):
    counts, failures = collections.Counter(), {}
    folder = str(tmp_path / "batches")
    with (
        live_frontend(StrictBackend(), FakePooling(), batch_folder=folder) as port,
        requests.Session() as session,
    ):
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()][part::NUM_PARTS]
        num_examples = num_requests // (len(MODES) * len(operations)) + 1
        for operation in operations:
            for mode in MODES:
                send_requests(session, operation, mode, num_examples, counts, failures)
    assert not failures
    print(dict(counts))  # noqa: T201 - `pytest -s` shows the statuses


def send_requests(session, operation, mode, num_examples, counts, failures):
    """Send requests to one operation, and count them by their status."""

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        response = case.call(session=session)
        counts[response.status_code] += 1
        if response.status_code >= 500:
            failures.setdefault(operation.label, (case.as_curl_command(), response.text))

    try:
        send()
    except hypothesis.errors.Unsatisfiable:
        counts["unsatisfiable"] += 1
