"""OpenTelemetry traces: each request has a span, and the models receive the trace context.

Spans are recorded if the environment variable OTEL_EXPORTER_OTLP_ENDPOINT is set and the SDK of
OpenTelemetry (the optional extra `tracing`) is installed. Otherwise, the models receive the
client's header `traceparent` unchanged.
"""

import logging
import os
import re
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.middleware.request_metrics import is_from_supervisor

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_log = logging.getLogger(__name__)

current_traceparent: ContextVar[str] = ContextVar("current_traceparent", default="")
"""The W3C header `traceparent` of the current request, or "". Calls to the models contain it."""


class Traces:
    """Middleware that records a span for each POST request and sets `current_traceparent`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tracer = _make_tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and end the span when the response ends."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_from_supervisor(scope):
            await self._app(scope, receive, send)
        elif self._tracer is None:
            given = Headers(scope=scope).get("traceparent", "")
            _store_traceparent(scope, given if _TRACEPARENT.fullmatch(given) else "")
            await self._app(scope, receive, send)
        else:
            await self._call_in_span(scope, receive, send)

    async def _call_in_span(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a POST request in a span. If the client has sent a trace, continue this trace.

        The span has the status code of the response. The calls to the models contain the
        `traceparent` of the span, so that their spans belong to the same trace. Without the
        optional package OpenTelemetry, there is no tracer, and this method is not called. The
        imports are therefore here.
        """
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        with self._tracer.start_as_current_span(
            f"POST {scope['path']}",
            propagator.extract(dict(Headers(scope=scope))),
            SpanKind.SERVER,
            # The message of an exception can contain the text of a prompt, so the exception is not
            # recorded in the span.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            headers_of_span: dict[str, str] = {}
            propagator.inject(headers_of_span)
            _store_traceparent(scope, headers_of_span["traceparent"])

            async def send_observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_observed)
            finally:
                # The application determines the route and the client, so they are known only after
                # the call.
                _add_route_and_client(span, scope)


def _store_traceparent(scope: Scope, traceparent: str) -> None:
    """Store the trace context of the current request for gRPC calls and log records."""
    current_traceparent.set(traceparent)
    if traceparent:
        scope["state"]["trace_id"] = traceparent.split("-")[1]


def _add_route_and_client(span: Any, scope: Scope) -> None:  # noqa: ANN401 - an optional package
    """Add the route, the request id and the client to the span of a request that has ended.

    For an unknown route, the span gets the name "unknown" instead of the path, because a client can
    send any path.
    """
    route = getattr(scope.get("route"), "path_format", "unknown")
    span.update_name(f"POST {route}")
    span.set_attribute("http.route", route)
    span.set_attribute("nereid.request_id", scope["state"]["request_id"])
    span.set_attribute("nereid.client", scope["state"].get("client", ""))


def _make_tracer() -> Any:  # noqa: ANN401 - the type of an optional package
    """Return an OpenTelemetry tracer, or None if spans are not recorded."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning(
            "No spans are recorded, because OpenTelemetry cannot be imported (%s). Install "
            "nereid-client[tracing].",
            error,
        )
        return None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "nereid"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("nereid")  # the provider sends the last spans when the process exits
