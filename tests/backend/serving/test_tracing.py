"""Tests of the OpenTelemetry spans that the Triton models record."""

import time

import pytest
from backend.serving.fake_server import Request
from fakes.otlp_receiver import receive_spans
from nereid_backend.serving.executor.request_spans import record_spans
from nereid_backend.serving.executor.request_timing import RequestTiming
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.tracing import Tracing, traceparent_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def receiver(monkeypatch):
    with receive_spans() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        yield receiver


@pytest.fixture
def tracing(receiver):
    opened = Tracing("executor")
    yield opened
    opened.close()


def test_a_span_has_its_parent_its_times_and_its_attributes(tracing, receiver):
    now_s = time.monotonic()
    start_s, end_s = now_s - 2.0, now_s - 0.5
    # The returned value is the traceparent of child spans.
    own = tracing.record("nereid.queue", TRACEPARENT, start_s, end_s, {"nereid.inputs": 3})
    tracing.close()
    (span,) = receiver.spans
    assert (span.name, span.trace, span.parent) == ("nereid.queue", TRACE, PARENT)
    assert span.end_ns - span.start_ns == pytest.approx(1.5e9)
    # The span has the time of day. The tolerance is wide, because the clock may be adjusted.
    assert time.time() - span.end_ns / 1e9 == pytest.approx(0.5, abs=60)
    assert span.attributes == {"nereid.inputs": 3, "nereid.model": "executor"}
    assert own == f"00-{TRACE}-{span.id}-01"


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-00"])
def test_without_a_valid_parent_a_span_begins_a_new_trace(tracing, receiver, parent):
    tracing.record("nereid.tokenize", parent, 0.0, 1.0)
    tracing.close()
    (span,) = receiver.spans
    assert span.parent == ""
    assert span.trace != TRACE


def test_a_request_that_its_client_does_not_sample_has_no_spans(tracing, receiver):
    tracing.record("nereid.queue", f"00-{TRACE}-{PARENT}-00", 0.0, 1.0)
    tracing.close()
    assert receiver.spans == []


@pytest.mark.parametrize("parent", ["", TRACEPARENT])
def test_a_disabled_sdk_records_nothing_and_keeps_the_parent(receiver, monkeypatch, parent):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing = Tracing("executor")
    assert tracing.record("nereid.queue", parent, 0.0, 1.0) == parent
    tracing.close()
    assert receiver.spans == []


def test_without_a_collector_nothing_is_recorded(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = Tracing("executor")
    assert not tracing.is_on
    assert tracing.record("nereid.queue", TRACEPARENT, 0.0, 1.0) == TRACEPARENT


def test_the_parameters_of_a_request_contain_its_trace():
    request = Request()
    assert traceparent_of(request) == ""
    request.request_parameters = f'{{"traceparent": "{TRACEPARENT}"}}'
    assert traceparent_of(request) == TRACEPARENT


def spans_of(tracing, receiver, **times):
    """Return the spans of a request that arrives at 1.0 s and ends at 10.0 s, by their names.

    The request has 5 prompt tokens, of which 2 are cached, and two answers of 3 and 4 tokens.
    """
    timing = RequestTiming(arrived=1.0, num_prompt_tokens=5, traceparent=TRACEPARENT, **times)
    sequences = [Sequence(0, 0, num_tokens=3, num_cached_tokens=2), Sequence(1, 1, num_tokens=4)]
    record_spans(tracing, Stream("1", None, 1, sequences, None, 0.0, timing=timing), now=10.0)
    tracing.close()
    return {span.name: span for span in receiver.spans}


def test_a_request_has_a_span_for_each_phase(tracing, receiver):
    spans = spans_of(tracing, receiver, started=2.0, first_token=4.0, compilation=(1.0, 1.5))
    durations = {name: (span.end_ns - span.start_ns) / 1e9 for name, span in spans.items()}
    assert durations == pytest.approx(
        {"nereid.grammar": 0.5, "nereid.queue": 1, "nereid.prefill": 2, "nereid.decode": 6}
    )
    assert spans["nereid.prefill"].attributes["gen_ai.usage.input_tokens"] == 5
    assert spans["nereid.prefill"].attributes["nereid.cached_tokens"] == 2
    assert spans["nereid.decode"].attributes["gen_ai.usage.output_tokens"] == 3 + 4


def test_a_request_that_ends_in_the_queue_has_no_further_phases(tracing, receiver):
    assert list(spans_of(tracing, receiver)) == ["nereid.queue"]
