"""A fake of Triton server's Python API, the module `triton_python_backend_utils`.

The real module exists only in the stub processes of a Triton server. Import this module before the
modules of nereid_backend.serving that import the API.
"""

import sys
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

DEMO = Path(__file__).resolve().parents[3] / "demo"
TESTS = Path(__file__).resolve().parents[2]
"""The folder from which a child process imports the modules of tests."""


@dataclass
class Tensor:
    name: str
    values: object

    def as_numpy(self):
        return self.values


@dataclass
class TritonError:
    text: str
    code: int = 0

    INVALID_ARG, UNAVAILABLE, INTERNAL = 1, 2, 3


@dataclass
class InferenceResponse:
    tensors: list = field(default_factory=list)
    error: TritonError | None = None


class MetricFamily:
    GAUGE, COUNTER, HISTOGRAM = range(3)

    values: ClassVar = {}

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels, buckets=None):
        return Metric(self.name, {**labels})


@dataclass
class Metric:
    name: str
    labels: dict

    @property
    def key(self):
        extra = [value for label, value in self.labels.items() if label != "model_name"]
        return "/".join([self.name.removeprefix("nereid:"), *extra])

    def set(self, value):
        MetricFamily.values[self.key] = value

    def increment(self, value):
        assert value > 0
        MetricFamily.values[self.key] = MetricFamily.values.get(self.key, 0) + value

    def observe(self, value):
        MetricFamily.values.setdefault(self.key, []).append(value)


class Request:
    """A fake request to a model, which is also its own response sender.

    Attributes:
        request_parameters: the parameters of the request as JSON text.
        replies: the responses. Each response is a dict of output tensors by name.
        error: the text of the error response, or None if there was no error response.
        ended: an event that is set when the final response has arrived.
        elapsed_s: the time from the creation of the request to the final response.
    """

    def __init__(self, **inputs):
        self.inputs = {name: Tensor(name, values) for name, values in inputs.items()}
        self.request_parameters = ""
        self.replies, self.error, self.is_gone = [], None, False
        self.ended, self.elapsed_s = threading.Event(), 0.0
        self._created = time.monotonic()

    def parameters(self):
        return self.request_parameters

    def request_id(self):
        return "a-request"

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return self.is_gone

    def send(self, reply=None, flags=0):
        assert not self.ended.is_set(), "the request has two final responses"
        if reply is not None and reply.error is not None:
            self.error = reply.error.text
        elif reply is not None:
            self.receive({tensor.name: tensor.as_numpy() for tensor in reply.tensors})
        if flags:
            self.elapsed_s = time.monotonic() - self._created
            self.ended.set()

    def receive(self, outputs):
        """Record the output tensors of one response."""
        self.replies.append(outputs)

    def wait(self, limit_s=120.0):
        """Wait for the final response, and return this request."""
        assert self.ended.wait(limit_s), "the request has no final response"
        return self


def _install():
    """Make `import triton_python_backend_utils` import the fake."""
    api = types.ModuleType("triton_python_backend_utils")
    api.Tensor, api.InferenceResponse, api.TritonError = Tensor, InferenceResponse, TritonError
    api.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # the flag that `Request.send` reads
    api.TritonModelException = RuntimeError
    api.MetricFamily = MetricFamily
    api.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    sys.modules.setdefault("triton_python_backend_utils", api)


_install()
