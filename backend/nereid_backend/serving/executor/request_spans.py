# SPDX-License-Identifier: Apache-2.0
"""The spans of one request in the executor: grammar compilation, queue, prefill and decode."""

from typing import NamedTuple

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.tracing import Tracing


class _Phase(NamedTuple):
    """A phase of a request.

    Attributes:
        span_name: the name of the span of the phase.
        start: the time at which the phase began; None if the phase did not begin.
        end: the time at which the phase ended; None if the phase has not ended.
        attributes: the attributes of the span.
    """

    span_name: str
    start: float | None
    end: float | None
    attributes: dict[str, int]


def record_spans(tracing: Tracing, stream: Stream, now: float) -> None:
    """Record the spans of a request that has just ended. `now` is the current time.

    There is one span for each phase of the request: grammar compilation, queue, prefill and decode.
    A phase that did not begin has no span, and the span of a phase that has not ended ends now.
    """
    if not tracing.is_on:
        return
    for phase in _phases(stream):
        if phase.start is not None:
            end = now if phase.end is None else phase.end
            parent = stream.timing.traceparent
            tracing.record(phase.span_name, parent, phase.start, end, phase.attributes)


def _phases(stream: Stream) -> list[_Phase]:
    """Return the phases of a request.

    The phase `nereid.decode` has no end time, because it ends together with the request.
    """
    timing = stream.timing
    compilation_start, compilation_end = timing.compilation or (None, None)
    # All sequences of a request share the prompt. Adding up their cached prompt tokens would count
    # the prompt several times, so use the largest number.
    num_cached_tokens = max(sequence.num_cached_tokens for sequence in stream.sequences)
    prefill_attributes = {
        "gen_ai.usage.input_tokens": timing.num_prompt_tokens,
        "nereid.cached_tokens": num_cached_tokens,
    }
    num_output_tokens = sum(sequence.num_tokens for sequence in stream.sequences)
    decode_attributes = {"gen_ai.usage.output_tokens": num_output_tokens}
    return [
        _Phase("nereid.grammar", compilation_start, compilation_end, {}),
        _Phase("nereid.queue", timing.arrived, timing.started, {}),
        _Phase("nereid.prefill", timing.started, timing.first_token, prefill_attributes),
        _Phase("nereid.decode", timing.first_token, None, decode_attributes),
    ]
