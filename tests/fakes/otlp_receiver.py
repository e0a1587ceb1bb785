"""An OpenTelemetry collector that stores the spans that it receives."""

import contextlib
import http.server
import threading
import time
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span that the collector received. All ids are hexadecimal.

    The attribute `parent` is the id of the parent span. It is "" if the span has no parent.
    """

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict


@dataclass
class Receiver:
    """The endpoint of the collector, and the spans that the collector has received.

    Attributes:
        endpoint: the value for the environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`.
        spans: the spans in the order in which they arrived.
        raw: the concatenated bodies of all requests.
    """

    endpoint: str = ""
    spans: list = field(default_factory=list)
    raw: bytes = b""

    def wait_for(self, names, trace=None, limit_s=30.0):
        """Wait until a span of each name has arrived, and return the spans by name.

        Args:
            names: the names of the spans.
            trace: the trace id of the spans; None for any trace.
            limit_s: the time in seconds after which the test fails.
        """
        deadline = time.monotonic() + limit_s
        while True:
            found = {span.name: span for span in list(self.spans) if trace in (None, span.trace)}
            if set(names) <= set(found):
                return found
            assert time.monotonic() < deadline, f"only these spans have arrived: {found}"
            time.sleep(0.02)

    def add(self, body):
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_span(sent) for sent in scope.spans]


@contextlib.contextmanager
def receive_spans():
    """Run a collector on a free port, and yield a `Receiver` with the received spans."""
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            receiver.add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield receiver
        server.shutdown()
        thread.join()


def _span(sent):
    values = {one.key: one.value for one in sent.attributes}
    return Span(
        sent.name,
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()},
    )
