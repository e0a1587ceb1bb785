"""A gRPC client of the ensemble that uses tritonclient's bidirectional stream.

tritonclient delivers responses in a separate thread. Under locust, this thread is a greenlet. The
gevent support of gRPC must then be enabled before the first gRPC call, as load/load_user.py does.
"""

import json
import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from loadtest.client.ask import Ask
from loadtest.client.reply import Reply

# A stream whose finish reason has arrived ends by itself within this time, in seconds.
_END_TIMEOUT_S = 5.0
# A restarted server should be reached within a second.
_CHANNEL_ARGS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_STATUS_OF = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "UNAVAILABLE": 503}


class GrpcEndpoint:
    """A client of one Triton server's gRPC endpoint.

    A connection serves one stream at a time and is reused afterwards. A stream whose finish reason
    has arrived is not cancelled, because Triton server 2.51 can crash if a client cancels a stream
    that ends at the same moment.

    Args:
        address: host and port, such as 127.0.0.1:8001.
        limit_s: the time limit of a request in seconds.
    """

    def __init__(self, address: str, limit_s: float = 60.0) -> None:
        self._address = address
        self._limit_s = limit_s
        self._idle: list[InferenceServerClient] = []

    def send(self, ask: Ask) -> Reply:
        """Send a request, and read the reply until its end or until the client cancels it."""
        reply = Reply()
        try:
            client = self._idle.pop()
        except IndexError:
            client = InferenceServerClient(self._address, channel_args=_CHANNEL_ARGS)
        try:
            self._read(client, ask, reply)
        except InferenceServerException as error:
            reply.end, reply.error = "broken", str(error)
        client.stop_stream(cancel_requests=reply.end != "whole")
        reply.ended = time.monotonic()
        if reply.end == "broken":
            client.close()
        else:
            self._idle.append(client)
        return reply

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    def _read(self, client: InferenceServerClient, ask: Ask, reply: Reply) -> None:
        """Send a request, and add its responses to `reply` until the reply has an end."""
        assert isinstance(ask.body, dict)
        responses: queue.Queue[_Response] = queue.Queue()
        client.start_stream(callback=_queue_responses(responses, ask.pause_s))
        client.async_stream_infer(
            ask.path,
            _inputs(ask.body),
            outputs=[InferRequestedOutput("delta")],
            enable_empty_final_response=True,  # so that a separate response marks the end
        )
        num_responses = 0
        while reply.end == "running":
            left_s = self._deadline(ask, reply) - time.monotonic()
            try:
                response = responses.get(timeout=max(0.0, left_s))
            except queue.Empty:
                reply.end = "hung" if ask.cancel_after_s is None else "cancelled"
                return
            _add_response(response, reply)
            num_responses += 1
            if num_responses == ask.cancel_after_events and not reply.finish_reasons:
                reply.end = "cancelled"

    def _deadline(self, ask: Ask, reply: Reply) -> float:
        """Return the time at which the client cancels the request, or stops waiting for its end."""
        deadline = reply.started + (ask.cancel_after_s or self._limit_s)
        must_not_cancel = ask.cancel_after_s is not None and reply.finish_reasons
        return deadline + _END_TIMEOUT_S if must_not_cancel else deadline


class _Response(NamedTuple):
    """A result or an error, as tritonclient passes them to its callback."""

    result: Any
    error: Any


def _queue_responses(responses: "queue.Queue[_Response]", pause_s: float) -> Callable[..., None]:
    """Return a callback that waits `pause_s` seconds and then puts a response into the queue."""

    def put(result: object, error: object) -> None:
        if pause_s:
            time.sleep(pause_s)  # nothing is read from the connection during the pause
        responses.put(_Response(result, error))

    return put


def _inputs(texts: dict[str, str]) -> list[InferInput]:
    """Return the input tensors of a streamed request: its text inputs, and the flag `stream`."""
    stream = InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    inputs = [stream]
    for name, text in texts.items():
        tensor = InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
        inputs.append(tensor)
    return inputs


def _add_response(response: _Response, reply: Reply) -> None:
    """Add a response of the ensemble to the reply."""
    result, error = response
    if error is not None:
        reply.error = str(error)[:300]
        reply.status = _status_of(reply.error)
        # An error with a gRPC status ends the whole call: the connection or the server has failed.
        # An error of the request arrives as a normal response without a gRPC status, so the stream
        # is complete.
        reply.end = "whole" if error.status() is None else "broken"
        return
    reply.status = 200
    deltas = result.as_numpy("delta")
    if deltas is not None:
        for delta in map(json.loads, deltas):
            reply.add_delta(delta)
            reply.add_ending(delta)
    if result.get_response().parameters["triton_final_response"].bool_param:
        reply.end = "whole"


def _status_of(message: str) -> int:
    """Return the HTTP status for an error message. Example: "[NOT_FOUND] no model" gives 404."""
    return next((status for code, status in _STATUS_OF.items() if f"[{code}]" in message), 500)
