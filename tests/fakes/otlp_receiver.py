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
        """Wait until a span of each name has arrived, and return all spans by name.

        Ignore the spans of other traces, unless `trace` (a trace id) is None.
        """
        deadline = time.monotonic() + limit_s
        while True:
            # The copy of the list prevents errors while the collector's thread appends spans.
            arrived = {span.name: span for span in list(self.spans) if trace in (None, span.trace)}
            if set(names) <= set(arrived):
                return arrived
            assert time.monotonic() < deadline, f"only these spans have arrived: {arrived}"
            time.sleep(0.02)

    def add(self, body):
        """Store the spans of a request to the collector."""
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_span(message) for message in scope.spans]


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


def _span(message):
    """Return the `Span` of a protobuf message."""
    # The value of an attribute is a union of several types, such as `string_value`.
    values = {attribute.key: attribute.value for attribute in message.attributes}
    return Span(
        name=message.name,
        trace=message.trace_id.hex(),
        id=message.span_id.hex(),
        parent=message.parent_span_id.hex(),
        start_ns=message.start_time_unix_nano,
        end_ns=message.end_time_unix_nano,
        attributes={key: getattr(v, v.WhichOneof("value")) for key, v in values.items()},
    )
