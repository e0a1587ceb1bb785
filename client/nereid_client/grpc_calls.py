"""gRPC calls to a Triton server. A cancelled call leaks no memory.

grpc.aio frees the memory of an operation, including the response, only if the task that awaits the
operation runs to its end (issue 43360 of gRPC). This module therefore never cancels a task that
awaits an operation:

- If the task of a request is cancelled, `asyncio.shield` protects the tasks of gRPC.
- The method `cancel` of a call would cancel the tasks of gRPC. This module cancels only the
  underlying call, and the tasks that await the call then end by themselves.

gRPC also leaks the memory of a failed operation. A stream that is cancelled before its first
response therefore still leaks about 100 bytes.
"""

import asyncio
import collections
import os
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np
from grpc.aio._call import Call  # no public method cancels a call without cancelling its tasks
from tritonclient.grpc import service_pb2

from nereid_client.errors import BackendError
from nereid_client.grpc_connections import Connections
from nereid_client.management_key import GRPC_HEADER, KEY_VARIABLE
from nereid_client.middleware.client_keys import current_client
from nereid_client.middleware.tracing import current_traceparent

_HEALTH_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 5.0
# The client name for calls that no client requested, such as the frontend's health checks.
_FRONTEND_ITSELF = "frontend itself"
_CANCELLED_BY_SERVER = "The Triton server cancelled the request"
_MEMORY_STATES = ("READY", "LOADING", "UNLOADING")
"""The states of models that use memory, as the Triton server names them."""
_DTYPES: dict[str, Any] = {"BOOL": np.bool_, "INT32": np.int32, "UINT8": np.uint8}


class TritonCalls:
    """Makes the frontend's gRPC calls to a Triton server.

    The object must be created in a running event loop. The first call opens a connection.

    Args:
        url: host:port of the server's gRPC endpoint.
    """

    def __init__(self, url: str) -> None:
        self._connections = Connections(url)
        self._background_tasks: set[asyncio.Task[None]] = set()

    async def infer(self, request: Any) -> Any:  # noqa: ANN401 - protobuf messages
        """Send a ModelInferRequest and return the ModelInferResponse.

        If the calling task is cancelled, the gRPC call is cancelled, too.

        Raises:
            grpc.RpcError: the call failed.
            BackendError: the server cancelled the call.
        """
        return await self._call_method("ModelInfer", request, current_client.get().share)

    def stream(self, request: Any) -> "Stream":  # noqa: ANN401 - a protobuf message
        """Send a ModelInferRequest to a decoupled model, which can return several responses."""
        client = current_client.get().share
        connection = self._connections.start_call(client)
        stream = Stream(connection.start_stream(request), self._run_in_background)
        stream.add_end_callback(partial(self._connections.end_call, client))
        return stream

    async def is_live(self) -> bool:
        """Return whether the server answers."""
        request = service_pb2.ServerLiveRequest()
        try:
            response = await self._call_method("ServerLive", request, timeout=_HEALTH_TIMEOUT_S)
            return bool(response.live)
        except grpc.RpcError:
            return False

    async def is_model_ready(self, model: str) -> bool:
        """Return whether a model accepts requests."""
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            response = await self._call_method("ModelReady", request, timeout=_HEALTH_TIMEOUT_S)
            return bool(response.ready)
        except grpc.RpcError:
            return False

    async def load_model(self, name: str) -> None:
        """Load a model. For an ensemble, also load the models that the ensemble calls.

        Raises: BackendError with the reason why the model cannot be loaded.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        await self._control("RepositoryModelLoad", request)

    async def unload_model(self, name: str) -> None:
        """Unload a model. For an ensemble, also unload the models that the ensemble calls.

        Raises: BackendError.
        """
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = True
        await self._control("RepositoryModelUnload", request)

    async def uses_memory(self, names: Sequence[str]) -> bool:
        """Return whether at least one of the models in `names` is loaded, loading or unloading.

        Raises: BackendError.
        """
        index = await self._control("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        names_in_memory = {model.name for model in index.models if model.state in _MEMORY_STATES}
        return not names_in_memory.isdisjoint(names)

    async def _control(self, method: str, request: Any) -> Any:  # noqa: ANN401 - protobuf messages
        """Send a request about the model repository, and return the server's response."""
        key = os.environ.get(KEY_VARIABLE)
        metadata = ((GRPC_HEADER, key),) if key else None
        try:
            return await self._call_method(method, request, metadata=metadata)
        except grpc.RpcError as error:
            raise BackendError(error.code().name, error.details() or "no reason is known") from None

    async def close(self) -> None:
        """Wait for cancelled calls to end, then close the connections."""
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        await self._connections.close()

    async def _call_method(
        self,
        method: str,
        request: Any,  # noqa: ANN401 - a protobuf message
        client: str = _FRONTEND_ITSELF,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] | None = None,
    ) -> Any:  # noqa: ANN401 - a protobuf message
        """Call a method of the Triton server, and return the response.

        If the calling task is cancelled, this method cancels the gRPC call.

        Raises:
            grpc.RpcError: the call failed.
            BackendError: the server cancelled the call.
        """
        connection = self._connections.start_call(client)
        call = getattr(connection.stub, method)(request, timeout=timeout, metadata=metadata)
        reader = asyncio.ensure_future(_await(call))
        reader.add_done_callback(lambda _: self._connections.end_call(client))
        try:
            return await asyncio.shield(reader)
        except asyncio.CancelledError:
            was_cancelled_by_server = not _is_current_task_cancelled()
            if was_cancelled_by_server:
                raise BackendError("CANCELLED", _CANCELLED_BY_SERVER) from None
            self._cancel_call(call, reader)
            raise

    def _cancel_call(self, call: Any, reader: asyncio.Future[Any]) -> None:  # noqa: ANN401
        """Cancel a gRPC call, but not the task `reader`, which waits for the response.

        If `reader` were cancelled, gRPC would leak memory. Instead, `reader` ends in the background
        after the end of the call.
        """
        _cancel_only_call(call)
        self._run_in_background(_wait_for_end(reader))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a background task that runs a coroutine to its end.

        `close` waits for all background tasks.
        """
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


class Stream:
    """A gRPC call with one request and several responses. End the call with `let_end` or `cancel`.

    A separate task reads and stores all responses, because a task that reads from gRPC must never
    be cancelled. `read` returns the stored responses one by one.

    Args:
        call: the stream call of grpc.aio.
        run_in_background: runs a coroutine to its end in a separate task.
    """

    def __init__(
        self,
        call: Any,  # noqa: ANN401 - untyped library
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._call = call
        self._run_in_background = run_in_background
        self._responses: collections.deque[Any] = collections.deque()
        self._changed = asyncio.Event()  # set after each response and at the end of the stream
        self._reader = asyncio.create_task(self._read_all())

    async def read(self) -> Any:  # noqa: ANN401 - a protobuf message
        """Return the next ModelStreamInferResponse, or None at the end of the stream.

        Raises:
            grpc.RpcError: the call failed.
            BackendError: the server cancelled the call.
        """
        while not self._responses:
            if self._reader.done():
                return await self._reader  # returns None, or raises the error that ended the stream
            self._changed.clear()
            await self._changed.wait()  # until a response arrives or `_reader` ends
        return self._responses.popleft()

    def add_end_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback that is called without arguments when the gRPC call has ended."""
        self._reader.add_done_callback(lambda _: callback())

    def let_end(self) -> None:
        """Wait in the background until the server ends the stream. Ignore further responses."""
        self._run_in_background(self._wait_for_end())

    def cancel(self) -> None:
        """Cancel the call. A call that has ended is not affected."""
        _cancel_only_call(self._call)
        self._run_in_background(self._wait_for_end())

    async def _wait_for_end(self) -> None:
        """Wait for the end of the stream. Cancel the call if the stream does not end in time."""
        await asyncio.wait([self._reader], timeout=_END_TIMEOUT_S)
        _cancel_only_call(self._call)  # without effect if the stream has ended
        await _wait_for_end(self._reader)

    async def _read_all(self) -> None:
        """Read and store all responses of the stream. Wake `Stream.read` after each response."""
        try:
            # Wait for the initial metadata before the first `read`. Otherwise, `read` would start a
            # second gRPC operation that waits for the metadata. If the connection then failed, gRPC
            # would never free the memory of the two operations.
            await self._call.initial_metadata()
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._responses.append(response)
                self._changed.set()
        except asyncio.CancelledError:
            # A CancelledError has two possible causes: this task was cancelled, or the server
            # cancelled the call.
            was_cancelled_by_server = not _is_current_task_cancelled()
            if was_cancelled_by_server:
                raise BackendError("CANCELLED", _CANCELLED_BY_SERVER) from None
            raise
        finally:
            self._changed.set()  # wakes `Stream.read`, which then sees that this task has ended


class InputTensor(NamedTuple):
    """An input tensor of a model. Its shape is [num_values].

    Attributes:
        name: the name of the tensor.
        datatype: the Triton data type: BOOL, INT32, UINT8 or BYTES.
        values: the values. The values of a BYTES tensor are byte strings.
    """

    name: str
    datatype: str
    values: Sequence[Any] | np.ndarray[Any, Any]


def infer_request(
    model: str,
    request_id: str,
    inputs: Iterable[InputTensor],
    outputs: Iterable[str] = (),
) -> Any:  # noqa: ANN401 - a protobuf message
    """Create a ModelInferRequest with the given inputs.

    The parameter `traceparent` of the request contains the trace context of the current HTTP
    request.

    Args:
        model: the name of the model in the model repository.
        request_id: the id of the request in the logs of the server.
        inputs: the input tensors.
        outputs: the names of the outputs to return. If there are no names, the server returns all
            outputs.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if traceparent := current_traceparent.get():
        request.parameters["traceparent"].string_param = traceparent
    for name, datatype, values in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if datatype == "BYTES":
            content = encode_strings(values)
        else:
            content = np.asarray(values, dtype=_DTYPES[datatype]).tobytes()
        request.raw_input_contents.append(content)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def encode_strings(strings: Iterable[bytes]) -> bytes:
    r"""Encode strings as the content of a BYTES tensor.

    Before each string, the content contains the string's length as a little-endian uint32.

    Example: [b"ab"] returns b"\x02\x00\x00\x00ab".
    """
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def decode_strings(raw: bytes) -> list[bytes]:
    """Return the strings in a BYTES tensor. This function is the inverse of `encode_strings`."""
    strings = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4 + length
        strings.append(raw[position - length : position])
    return strings


def _is_current_task_cancelled() -> bool:
    """Return True if the current task was cancelled, and False if only its gRPC call was cancelled.

    In both cases, the task that awaits the call receives a CancelledError.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancel_only_call(call: Any) -> None:  # noqa: ANN401 - untyped library
    """Cancel a gRPC call, but not the task that awaits the call. This task then ends by itself.

    `call.cancel()` would also cancel this task, and gRPC would then leak memory. The method of the
    base class `Call` does not.
    """
    Call.cancel(call)


async def _await(call: Awaitable[Any]) -> Any:  # noqa: ANN401 - untyped library
    """Wrap an awaitable gRPC call in a coroutine, because an asyncio task requires a coroutine."""
    return await call


async def _wait_for_end(task: asyncio.Future[Any]) -> None:
    """Wait until a task has ended. Raise no exception, even if the task failed or was cancelled."""
    with suppress(grpc.RpcError, BackendError, asyncio.CancelledError):
        await task
