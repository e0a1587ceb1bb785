"""Calls of a Triton server over gRPC that can be given up without leaving memory behind.

grpc.aio frees what an operation took, the response included, only when the task that awaits the
operation sees its end (its issue 43360). So none of its tasks may be cancelled: not by a cancelled
task of ours, hence the shields, and not by a call's own method `cancel`, which cancels them too.
Here the call alone is cancelled, and what awaits it then comes to its end by itself. An operation
that fails is not freed either: a stream that is given up before its first response still leaves
one of 100 bytes.
"""

import asyncio
import collections
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
from grpc.aio._call import Call  # nothing public cancels a call and not its tasks
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nereid_client.errors import BackendError

_RECONNECT_MS = 1000  # at most so long after one attempt comes the next
_HEALTH_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 5.0
_DTYPES: dict[str, Any] = {"BOOL": np.bool_, "INT32": np.int32}


class TritonCalls:
    """A channel to a Triton server that finds it soon after it has come back.

    gRPC's own wait between two attempts grows to two minutes.
    """

    def __init__(self, url: str) -> None:
        """Nothing is connected yet; must be called in a running event loop.

        Args:
            url: host:port of the server's gRPC door.
        """
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        ]
        self._channel = grpc.aio.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ending: set[asyncio.Task[None]] = set()

    async def infer(self, request: Any) -> Any:  # noqa: ANN401 - protobuf messages
        """The ModelInferResponse to a ModelInferRequest; cancelling the task cancels the call.

        Raises: grpc.RpcError; BackendError when the call alone was cancelled.
        """
        return await self._answer(self._stub.ModelInfer(request))

    def stream(self, request: Any) -> "Stream":  # noqa: ANN401 - a protobuf message
        """The call that answers one ModelInferRequest with responses."""

        async def once() -> Any:  # noqa: ANN401
            yield request

        return Stream(self._stub.ModelStreamInfer(once()), self._outlive)

    async def is_live(self) -> bool:
        """Whether the server answers at all."""
        call = self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=_HEALTH_TIMEOUT_S)
        try:
            return bool((await self._answer(call)).live)
        except grpc.RpcError:
            return False

    async def is_model_ready(self, model: str) -> bool:
        """Whether a model can take requests."""
        request = service_pb2.ModelReadyRequest(name=model)
        call = self._stub.ModelReady(request, timeout=_HEALTH_TIMEOUT_S)
        try:
            return bool((await self._answer(call)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Give up the connection."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._channel.close()

    async def _answer(self, call: Any) -> Any:  # noqa: ANN401 - untyped library
        reading = asyncio.ensure_future(_answer_of(call))
        try:
            return await _shielded(reading)
        except asyncio.CancelledError:
            Call.cancel(call)
            self._outlive(_end_of(reading))
            raise

    def _outlive(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class Stream:
    """One request and its responses. Ends with `leave` or `give_up`, whatever happened before.

    One task reads all of it and is never cancelled; who waits for a response waits for what that
    task has read.

    Args:
        call: of grpc.aio.
        outlive: takes what must still run when nobody waits for it any more.
    """

    def __init__(self, call: Any, outlive: Callable[[Coroutine[Any, Any, None]], None]) -> None:  # noqa: ANN401 - untyped library
        self._call = call
        self._outlive = outlive
        self._responses: collections.deque[Any] = collections.deque()
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read_all())

    async def read(self) -> Any:  # noqa: ANN401 - a protobuf message
        """The next ModelStreamInferResponse; None at the end.

        Raises: grpc.RpcError; BackendError when the call alone was cancelled.
        """
        while not self._responses:
            if self._reading.done():
                return await self._reading
            self._news.clear()
            await self._news.wait()
        return self._responses.popleft()

    def leave(self) -> None:
        """Read no more; the server is at its end, or near."""
        self._outlive(self._end())

    def give_up(self) -> None:
        """Cancel the call."""
        Call.cancel(self._call)  # one that has ended takes no notice
        self._outlive(self._end())

    async def _end(self) -> None:
        await asyncio.wait([self._reading], timeout=_END_TIMEOUT_S)
        Call.cancel(self._call)
        await _end_of(self._reading)

    async def _read_all(self) -> None:
        try:
            # A read that waits for this, too, is one more operation that can fail.
            await self._call.initial_metadata()
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._responses.append(response)
                self._news.set()
        except asyncio.CancelledError:
            raise _cancelled() from None
        finally:
            self._news.set()


def infer_request(
    model: str,
    request_id: str,
    inputs: Iterable[tuple[str, str, Sequence[Any] | np.ndarray[Any, Any]]],
    outputs: Iterable[str] = (),
) -> Any:  # noqa: ANN401 - a protobuf message
    """A ModelInferRequest.

    Args:
        model: its name in the repository.
        request_id: shows up in the server's logs.
        inputs: name, datatype (BOOL, INT32 or BYTES) and values of each; shape [num_values].
        outputs: what to answer with; nothing means everything.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, datatype, values in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if datatype == "BYTES":
            raw = encode_strings(values)
        else:
            raw = np.asarray(values, dtype=_DTYPES[datatype]).tobytes()
        request.raw_input_contents.append(raw)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def encode_strings(strings: Iterable[bytes]) -> bytes:
    """The content of a BYTES tensor: of each a little-endian uint32 length and so many bytes."""
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def decode_strings(raw: bytes) -> list[bytes]:
    """The strings of a BYTES tensor; the other way of `encode_strings`."""
    strings = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4 + length
        strings.append(raw[position - length : position])
    return strings


async def _shielded(reading: asyncio.Future[Any]) -> Any:  # noqa: ANN401 - untyped library
    """Its result; it goes on when our task is cancelled."""
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        raise _cancelled() from None


def _cancelled() -> BaseException:
    """What a CancelledError means: grpc raises it of a call that was cancelled, too."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return BackendError("CANCELLED", "the call was cancelled")
    return asyncio.CancelledError()


async def _answer_of(call: Awaitable[Any]) -> Any:  # noqa: ANN401 - untyped library
    return await call


async def _end_of(reading: asyncio.Future[Any]) -> None:
    """Wait for it; nobody needs to know how it ended."""
    with suppress(grpc.RpcError, BackendError, asyncio.CancelledError):
        await reading
