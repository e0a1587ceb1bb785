# SPDX-License-Identifier: Apache-2.0
"""Records spans of requests, and sends the spans to an OpenTelemetry collector.

Spans are recorded if the environment variable OTEL_EXPORTER_OTLP_ENDPOINT is set. The SDK of
OpenTelemetry reads this variable and the other variables of OpenTelemetry. The optional extra
`tracing` installs the SDK. A span contains times and numbers. A span never contains the text of a
prompt or of an answer.

The context of a trace is a text in the format of the W3C header `traceparent`. It is a parameter of
the Triton request, and a field of the messages between the models of the ensemble.
"""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from nereid_backend.serving import triton_api

TRACEPARENT = "traceparent"
"""The name of the request parameter that contains the context of the trace."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_NS_PER_S = 1e9

log = logging.getLogger("nereid")


class Tracing:
    """Records the spans of one Triton model.

    If there is no collector, or the SDK of OpenTelemetry is not installed, nothing is recorded.

    Args:
        model_name: the name of the Triton model. Each span has this name as an attribute.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._provider = _make_provider()
        self._tracer = self._provider and self._provider.get_tracer("nereid")

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded."""
        return self._tracer is not None

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Mapping[str, str | float] | None = None,
    ) -> str:
        """Record a span that has ended.

        Args:
            name: the name of the span, such as "nereid.prefill".
            parent: the traceparent of the parent span. If `parent` is empty or not valid, the span
                is the first span of a new trace.
            start: the time at which the span began, by time.monotonic().
            end: the time at which the span ended.
            attributes: the attributes of the span, such as {"gen_ai.usage.input_tokens": 12}.

        Returns:
            The traceparent for the children of the span. If no spans are recorded, for example
            because OTEL_SDK_DISABLED is set, `parent` is returned.
        """
        if self._tracer is None:
            return parent
        # The package is optional, so it is imported only if spans are recorded.
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        start_ns, end_ns = _unix_times_ns(start, end)
        span = self._tracer.start_span(
            name,
            propagator.extract({TRACEPARENT: parent}),
            start_time=start_ns,
            attributes={**(attributes or {}), "nereid.model": self._model_name},
        )
        span.end(end_ns)
        headers: dict[str, str] = {}
        # If OTEL_SDK_DISABLED is set, the span has no valid id, and `inject` adds no header.
        propagator.inject(headers, set_span_in_context(span))
        return headers.get(TRACEPARENT, parent)

    def close(self) -> None:
        """Send the recorded spans to the collector."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent_of(request: Any) -> str:  # noqa: ANN401 - the server's own type
    """Return the parameter `traceparent` of a Triton request; "" if the parameter is missing.

    Raises:
        RequestError: a parameter is not UTF-8.
    """
    return str(triton_api.parameters(request).get(TRACEPARENT, ""))


def _unix_times_ns(start: float, end: float) -> tuple[int, int]:
    """Convert two times of time.monotonic() to nanoseconds since 1970, as OpenTelemetry needs.

    Both times are converted with the same offset, so that the duration is exact. If two processes
    have measured the times, `end` can be earlier than `start`. The duration is then 0.
    """
    unix_offset_s = time.time() - time.monotonic()
    start_ns = int((unix_offset_s + start) * _NS_PER_S)
    end_ns = int((unix_offset_s + max(end, start)) * _NS_PER_S)
    return start_ns, end_ns


def _make_provider() -> Any:  # noqa: ANN401 - the type of an optional package
    """Return OpenTelemetry's tracer provider, or None if no spans are recorded."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "no spans are recorded, because OpenTelemetry cannot be imported (%s). Install "
            "nereid-backend[tracing].",
            error,
        )
        return None
    # OTEL_SERVICE_NAME takes precedence over this name.
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "nereid"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
