# SPDX-License-Identifier: Apache-2.0
"""The spans of one request in the executor: grammar compilation, queue, prefill and decode."""

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.tracing import Tracing


def record_spans(tracing: Tracing, stream: Stream, now: float) -> None:
    """Record the spans of a request that has just ended. `now` is the current time.

    There is one span for each phase of the request: grammar compilation, queue, prefill and decode.
    A phase that did not start has no span, and the span of a phase that has not ended ends now.
    """
    if not tracing.is_on:
        return
    timing = stream.timing
    parent = timing.traceparent
    if timing.compilation is not None:
        compilation_start, compilation_end = timing.compilation
        tracing.record("nereid.grammar", parent, compilation_start, compilation_end)
    # All sequences of a request share the prompt. Adding up their cached prompt tokens would count
    # the prompt several times, so use the largest number.
    num_cached_tokens = max(sequence.num_cached_tokens for sequence in stream.sequences)
    prefill_attributes = {
        "gen_ai.usage.input_tokens": timing.num_prompt_tokens,
        "nereid.cached_tokens": num_cached_tokens,
    }
    num_output_tokens = sum(sequence.num_tokens for sequence in stream.sequences)
    decode_attributes = {"gen_ai.usage.output_tokens": num_output_tokens}
    # The name, the start, the end and the attributes of each phase. A phase that has not started
    # has the start None, and a phase that has not ended has the end None.
    phases: list[tuple[str, float | None, float | None, dict[str, int]]] = [
        ("nereid.queue", timing.arrived, timing.started, {}),
        ("nereid.prefill", timing.started, timing.first_token, prefill_attributes),
        ("nereid.decode", timing.first_token, None, decode_attributes),
    ]
    for name, start, end, attributes in phases:
        if start is not None:
            tracing.record(name, parent, start, now if end is None else end, attributes)
