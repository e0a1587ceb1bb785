"""The way to the pooling models: the `PoolingBackend` protocol, and Triton gRPC behind it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from nereid_client.errors import BackendError
from nereid_client.grpc_calls import TritonCalls, decode_strings, infer_request
from nereid_client.triton_backend import is_outage

EMBEDDING = "embedding"
RERANK = "rerank"
KINDS = (EMBEDDING, RERANK)

_INFO_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Served:
    """What a pooling model says of itself.

    Attributes:
        kind: "embedding" or "rerank".
        name: `model` of requests and replies.
        info: the facts of docs/embeddings.md: task, kinds, dimension, max_model_len, labels ...
    """

    kind: str
    name: str
    info: Mapping[str, Any]


@dataclass(frozen=True)
class PoolingCall:
    """One call of a pooling model.

    Attributes:
        model: "embedding" or "rerank".
        request_id: shows up in the server's logs.
        tensors: name -> values; the inputs of docs/embeddings.md. Text, numbers or booleans.
        options: the JSON object of the input `options`; None values are left out.
    """

    model: str
    request_id: str
    tensors: Mapping[str, Sequence[Any] | npt.NDArray[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolingReply:
    """The outputs of a call that were sent, by name; STRING outputs as text."""

    arrays: Mapping[str, npt.NDArray[Any]]
    strings: Mapping[str, Sequence[str]]


class PoolingBackend(Protocol):
    """Something that embeds and scores."""

    async def infer(self, call: PoolingCall) -> PoolingReply:
        """The outputs; cancelling the task cancels the call.

        Raises: BackendError.
        """
        ...

    async def close(self) -> None:
        """Give up the connection."""
        ...


class TritonPooling:
    """The two models on a Triton server, by unary calls over one channel, opened when needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._calls: TritonCalls | None = None

    async def infer(self, call: PoolingCall) -> PoolingReply:
        """See `PoolingBackend.infer`."""
        if self._calls is None:
            self._calls = TritonCalls(self._url)
        request = infer_request(call.model, call.request_id, _inputs(call))
        try:
            return _decode(await self._calls.infer(request))
        except grpc.RpcError as error:
            raise _backend_error(error, call.model, self._url) from None

    async def close(self) -> None:
        """See `PoolingBackend.close`."""
        if self._calls is not None:
            await self._calls.close()


class Directory:
    """Which pooling models are served, asked once each and remembered while they answer."""

    def __init__(self, backend: PoolingBackend) -> None:
        self._backend = backend
        self._known: dict[str, Served] = {}

    async def find(self, kind: str) -> Served:
        """The model of that kind.

        Raises: BackendError: it is not served (NOT_FOUND), or does not answer.
        """
        if kind not in self._known:
            call = PoolingCall(kind, f"info-{kind}", {"return_info": [True]})
            async with asyncio.timeout(_INFO_TIMEOUT_S):
                reply = await self._backend.infer(call)
            info = json.loads(reply.strings["info"][0])
            if info["task"] == "none":
                raise BackendError("NOT_FOUND", info["reason"])
            self._known[kind] = Served(kind, info["name"], info)
        return self._known[kind]

    async def all(self) -> list[Served]:
        """Every pooling model that answers."""
        found = []
        for kind in KINDS:
            try:
                found.append(await self.find(kind))
            except (BackendError, TimeoutError):
                continue
        return found


_OUTPUTS: Mapping[str, Any] = {"FP32": np.float32, "INT32": np.int32}
_INPUT_TYPES = {"return_info": "BOOL", "input_ids": "INT32", "input_lengths": "INT32"}


def _inputs(call: PoolingCall) -> list[tuple[str, str, Sequence[Any] | npt.NDArray[Any]]]:
    tensors = dict(call.tensors)
    options = {name: value for name, value in call.options.items() if value is not None}
    if options:
        tensors["options"] = [json.dumps(options)]
    inputs = []
    for name, values in tensors.items():
        datatype = _INPUT_TYPES.get(name, "BYTES")
        strings = [value.encode() for value in values] if datatype == "BYTES" else None
        inputs.append((name, datatype, values if strings is None else strings))
    return inputs


def _decode(response: Any) -> PoolingReply:  # noqa: ANN401 - a protobuf message
    arrays: dict[str, npt.NDArray[Any]] = {}
    strings: dict[str, Sequence[str]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            strings[output.name] = [string.decode() for string in decode_strings(raw)]
        else:
            array = np.frombuffer(raw, dtype=_OUTPUTS[output.datatype])
            arrays[output.name] = array.reshape(list(output.shape))
    return PoolingReply(arrays, strings)


def _backend_error(error: grpc.RpcError, model: str, url: str) -> BackendError:
    code: str = error.code().name
    message = error.details() or code
    if code == "NOT_FOUND" or message.startswith("Request for unknown model"):
        return BackendError("NOT_FOUND", f"the Triton server has no model {model!r}")
    if code == "UNAVAILABLE" and "failed to connect" in message:
        return BackendError(code, f"the Triton server at {url} can't be reached; is it running?")
    return BackendError(
        "UNAVAILABLE" if is_outage(message) else code, message.removeprefix(f"[{code}] ")
    )
