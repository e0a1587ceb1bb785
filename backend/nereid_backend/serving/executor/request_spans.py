# SPDX-License-Identifier: Apache-2.0
"""The spans of one request in the executor: grammar compilation, queue, prefill and decode."""

from nereid_backend.serving.executor.streams import Stream
from nereid_backend.serving.tracing import Tracing


def record_spans(tracing: Tracing, stream: Stream, now: float) -> None:
    """Record the spans of a request that has just ended. `now` is the current time.

    There is one span for each phase of the request. A phase that did not begin has no span.
    """
    if not tracing.is_on:
        return
    timing = stream.timing
    parent = timing.traceparent
    if timing.compilation is not None:
        tracing.record("nereid.grammar", parent, *timing.compilation)
    # If a phase has not ended, its span ends now.
    end_of_queue = now if timing.started is None else timing.started
    tracing.record("nereid.queue", parent, timing.arrived, end_of_queue)
    if timing.started is None:
        return
    end_of_prefill = now if timing.first_token is None else timing.first_token
    tracing.record(
        "nereid.prefill",
        parent,
        timing.started,
        end_of_prefill,
        gen_ai__usage__input_tokens=timing.num_prompt_tokens,
        nereid__cached_tokens=max(sequence.num_cached_tokens for sequence in stream.sequences),
    )
    if timing.first_token is None:
        return
    tracing.record(
        "nereid.decode",
        parent,
        timing.first_token,
        now,
        gen_ai__usage__output_tokens=sum(sequence.num_tokens for sequence in stream.sequences),
    )
