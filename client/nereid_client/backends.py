"""The way to the language model: the `Backend` protocol and its Triton gRPC implementation."""

import asyncio
import json
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
import numpy as np
import tritonclient.grpc.aio as triton_grpc
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from nereid_client.deltas import Delta
from nereid_client.errors import BackendError

# The ensemble's first step, by its name in the repository, and what it makes of a request.
_TOKENIZER = "tokenizer"
_PROMPT_TOKEN_IDS = "prompt_token_ids"
_UNREACHABLE = "the Triton server at {} can't be reached; is it running?"
_LOST = "the connection to the Triton server was lost ({}); try again"
_SICK = "is not healthy"  # of a stub that died; only a new server helps
_STOPPING = "Server is stopping"
_RECONNECT_MS = 1000  # at most so long after one attempt comes the next
_READY_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 5.0
# Put in front by the Triton server, and by the ensemble's steps.
_PLACE = re.compile(r"^(\[request id: [^\]]*\] )?(in ensemble '[^']*', )?")
_TAG = re.compile(r"^\[([A-Z_]+)\] ")


@dataclass(frozen=True)
class Generation:
    """One call of the ensemble: a request id, exactly one kind of prompt, and how to sample.

    Attributes:
        request_id: shows up in the server's logs; unique among requests that run.
        text_input: a prompt as text.
        input_ids: a prompt as token ids.
        chat_request: the JSON body of a chat completion.
        sampling_parameters: a JSON object, for the first two kinds.
        with_text: whether deltas carry `text`, the raw text.
        num_choices: how many answers were asked for; the last one's end is the stream's.
    """

    request_id: str
    text_input: str | None = None
    input_ids: tuple[int, ...] | None = None
    chat_request: str | None = None
    sampling_parameters: str | None = None
    with_text: bool = False
    num_choices: int = 1


class Backend(Protocol):
    """Something that generates."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The deltas of all choices as they come; closing the generator aborts the request.

        Raises: BackendError.
        """
        ...

    async def tokenize(self, generation: Generation) -> list[int]:
        """The token ids of its prompt; nothing is generated.

        Raises: BackendError.
        """
        ...

    async def is_live(self) -> bool:
        """Whether the server answers at all."""
        ...

    async def is_ready(self) -> bool:
        """Whether the model can take requests."""
        ...

    async def close(self) -> None:
        """Give up the connection."""
        ...


class TritonBackend:
    """The ensemble on a Triton server: one gRPC stream per request, one channel for all."""

    def __init__(self, url: str, ensemble: str) -> None:
        """Nothing is connected yet; must be called in a running event loop.

        Args:
            url: host:port of the server's gRPC door.
            ensemble: the model's name in the repository.
        """
        self._url = url
        self._ensemble = ensemble
        self._client = connect(url)
        self._ending: set[asyncio.Task[None]] = set()

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """See `Backend.generate`.

        Closing it before the last response cancels the gRPC stream; after that, or after an error,
        the stream is left to end by itself. Server 2.51 can crash when a cancel meets the end of a
        stream (its issues 7368 and 8034), and many clients hang up at the sight of a finish reason.
        """
        # Not with the header `triton_grpc_error`, which turns an error's code into the stream's
        # status: server 2.51 then takes each error for a cancel, and sooner or later crashes.
        stream = self._client.stream_infer(_once(self._request(generation)))
        reading: asyncio.Future[Any] | None = None
        is_over = False
        running = generation.num_choices
        try:
            # Our task may be cancelled while it waits, a read may not: one that is leaves memory
            # behind in gRPC, with the response that it waited for (its issue 43360).
            while (
                message := await asyncio.shield(reading := asyncio.ensure_future(_next(stream)))
            ) is not None:
                result, error = message
                if error is not None:
                    is_over = True
                    raise read_error(str(error))
                deltas = _decode_response(result.get_response(), generation.with_text)
                running -= sum("finish_reason" in delta for delta in deltas)
                is_over = running <= 0
                for delta in deltas:
                    yield delta
                if is_over:
                    return
        except grpc.RpcError as error:
            raise self._backend_error(error) from None
        except asyncio.CancelledError:
            # grpc raises this both when our task is cancelled and when the call alone was.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise BackendError("CANCELLED", "the gRPC stream was cancelled") from None
            raise
        finally:
            if not is_over:
                stream.cancel()  # a stream that has ended takes no notice
            self._let_end(stream, reading)

    async def tokenize(self, generation: Generation) -> list[int]:
        """See `Backend.tokenize`: a call of the ensemble's first step alone."""
        try:
            result = await self._client.infer(
                _TOKENIZER,
                _inputs(generation),
                request_id=generation.request_id,
                outputs=[InferRequestedOutput(_PROMPT_TOKEN_IDS)],
            )
        except InferenceServerException as error:
            raise self._call_error(error) from None
        return [int(token_id) for token_id in result.as_numpy(_PROMPT_TOKEN_IDS)]

    async def is_live(self) -> bool:
        """See `Backend.is_live`."""
        try:
            return bool(await self._client.is_server_live(client_timeout=_READY_TIMEOUT_S))
        except InferenceServerException:
            return False

    async def is_ready(self) -> bool:
        """See `Backend.is_ready`."""
        try:
            return bool(
                await self._client.is_model_ready(self._ensemble, client_timeout=_READY_TIMEOUT_S)
            )
        except InferenceServerException:
            return False

    async def close(self) -> None:
        """See `Backend.close`."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._client.close()

    def _let_end(self, stream: Any, reading: asyncio.Future[Any] | None) -> None:  # noqa: ANN401
        task = asyncio.create_task(_drain(stream, reading))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _request(self, generation: Generation) -> dict[str, Any]:
        outputs = ["delta", "text_output"] if generation.with_text else ["delta"]
        return {
            "model_name": self._ensemble,
            "request_id": generation.request_id,
            "inputs": _inputs(generation),
            "outputs": [InferRequestedOutput(name) for name in outputs],
        }

    def _call_error(self, error: InferenceServerException) -> BackendError:
        code = str(error.status() or "INTERNAL").removeprefix("StatusCode.")
        told = read_error(str(error.message()))
        if code == "UNAVAILABLE":
            return BackendError(code, self._outage(told.message))
        return BackendError(told.code if code == "INTERNAL" else code, told.message)

    def _backend_error(self, error: grpc.RpcError) -> BackendError:
        code: str = error.code().name
        details: str = error.details() or code
        return BackendError(code, self._outage(details) if code == "UNAVAILABLE" else details)

    def _outage(self, details: str) -> str:
        if "failed to connect" in details:
            return _UNREACHABLE.format(self._url)
        return _LOST.format(details)


def connect(url: str) -> Any:  # noqa: ANN401 - untyped library
    """A client of the server at host:port that finds it soon after it has come back.

    gRPC's own wait between two attempts grows to two minutes.
    """
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
    ]
    return triton_grpc.InferenceServerClient(url, channel_args=options)


def read_error(text: str) -> BackendError:
    """The error that a message in the stream stands for; see docs/contract.md for its form."""
    text = _PLACE.sub("", text)
    tagged = _TAG.match(text)
    if tagged is not None:
        return BackendError(tagged[1], text[tagged.end() :])
    if text.startswith("Request for unknown model") or is_outage(text):
        return BackendError("UNAVAILABLE", text)
    return BackendError("INTERNAL", text)


def is_outage(text: str) -> bool:
    """Whether a message of the server's own says that it must be started again, or is stopping."""
    return _SICK in text or _STOPPING in text


async def _next(stream: Any) -> Any:  # noqa: ANN401 - untyped library
    """The next response and error, None at the stream's end."""
    return await anext(stream, None)


async def _drain(stream: Any, reading: asyncio.Future[Any] | None) -> None:  # noqa: ANN401
    """Read what follows: the end of the stream, of which nobody needs to know."""
    # A call that was cancelled says so to its reader with asyncio's own exception.
    with suppress(grpc.RpcError, TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            if reading is not None:
                await reading
            async for _ in stream:
                pass


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _inputs(generation: Generation) -> list[Any]:
    inputs = [_tensor("stream", "BOOL", [True])]
    for name in ("text_input", "chat_request", "sampling_parameters"):
        text = getattr(generation, name)
        if text is not None:
            inputs.append(_tensor(name, "BYTES", [text.encode()]))
    if generation.input_ids is not None:
        inputs.append(_tensor("input_ids", "INT32", list(generation.input_ids)))
    return inputs


_DTYPES: dict[str, Any] = {"BOOL": np.bool_, "BYTES": np.object_, "INT32": np.int32}


def _tensor(name: str, datatype: str, values: list[Any]) -> Any:  # noqa: ANN401 - untyped library
    tensor = InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(np.array(values, dtype=_DTYPES[datatype]))
    return tensor


def _decode_response(response: Any, with_text: bool) -> list[Delta]:  # noqa: ANN401 - a protobuf message
    """The deltas of one ModelInferResponse, one a choice; the last response may have none."""
    deltas: list[Delta] = []
    texts: list[bytes] = []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == "delta":
            deltas = [cast("Delta", json.loads(string)) for string in decode_strings(raw)]
        elif output.name == "text_output" and with_text:
            texts = decode_strings(raw)
    for delta, text in zip(deltas, texts, strict=False):
        if text:
            delta["text"] = text.decode()
    return [delta for delta in deltas if delta]


def decode_strings(raw: bytes) -> list[bytes]:
    """The strings of a BYTES tensor: each is a little-endian uint32 length and so many bytes."""
    strings = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4 + length
        strings.append(raw[position - length : position])
    return strings
