"""Requests that schemathesis derives from a server's OpenAPI description."""

import collections

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

# Requests that are valid according to the OpenAPI description, and requests that violate it.
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# A request that generates more tokens would only make the test slower.
_MAX_TOKENS = 16


class DescribedRequests:
    """Sends random requests to each operation of a server, and counts the HTTP statuses.

    Args:
        url: the base URL of the server.
        models: the names of the served models. Half of the valid requests get one of these names
            as their `model`, because the server answers a random name with status 404.

    Attributes:
        counts: the number of responses with each HTTP status.
        failures: for each operation that returned a status 5xx, the first such request (as a curl
            command) and the text of the response.
    """

    def __init__(self, url, models=()):
        self.counts = collections.Counter()
        self.failures = {}
        self._models = models
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self._operations = [result.ok() for result in schema.get_all_operations()]

    def send(self, part, num_parts, num_requests):
        """Send about `num_requests` requests to one part of the operations.

        The operations are numbered from 0. Part 1 of 3 contains the operations 1, 4, 7 and so on.
        Each operation gets the same number of valid and of invalid requests.
        """
        operations = self._operations[part::num_parts]
        num_examples = num_requests // (len(MODES) * len(operations)) + 1
        with requests.Session() as session:
            for operation in operations:
                for mode in MODES:
                    self._send_to(session, operation, mode, num_examples)

    def _send_to(self, session, operation, mode, num_examples):
        """Send the requests that hypothesis generates for one operation, and count the statuses."""

        @hypothesis.seed(0)
        @hypothesis.settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send_each_case(case):
            self._make_answerable(case, mode)
            response = case.call(session=session)
            self.counts[response.status_code] += 1
            if response.status_code >= 500:
                failure = (case.as_curl_command(), response.text)
                self.failures.setdefault(operation.label, failure)

        try:
            send_each_case()
        except hypothesis.errors.Unsatisfiable:
            self.counts["unsatisfiable"] += 1

    def _make_answerable(self, case, mode):
        """Make every second valid request name a served model and ask for few tokens."""
        if mode != GenerationMode.POSITIVE or not isinstance(case.body, dict):
            return
        num_sent = self.counts.total()
        if self._models and num_sent % 2:
            case.body["model"] = self._models[num_sent // 2 % len(self._models)]
            for name in _TOKEN_LIMITS:
                if isinstance(case.body.get(name), int) and case.body[name] > _MAX_TOKENS:
                    case.body[name] = _MAX_TOKENS
