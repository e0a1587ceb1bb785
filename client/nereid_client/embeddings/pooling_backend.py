"""The `PoolingBackend` protocol, its implementation over gRPC, and the list of served models."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from nereid_client.errors import BackendError, FrontendError
from nereid_client.grpc_calls import InputTensor, TritonCalls, decode_strings, infer_request
from nereid_client.language_model.server_errors import means_outage, unreachable_message

EMBEDDING = "embedding"
RERANK = "rerank"
KINDS = (EMBEDDING, RERANK)
"""The names of the pooling models in the model repository."""

_INFO_TIMEOUT_S = 5.0
_MANY_VALUES = 20_000
"""The message for a call with more values is built in a thread. Building such a message takes over
5 ms, during which the event loop could not handle other requests."""


@dataclass(frozen=True)
class ServedModel:
    """A pooling model that the Triton server serves.

    Attributes:
        kind: "embedding" or "rerank".
        name: the name of the model in requests and responses.
        info: the model's properties, as described in docs/reference/tensors.md: task, kinds,
            dimension, max_model_len, labels and others. Empty for a model that is not loaded.
        model: the name of the model in the model repository.
    """

    kind: str
    name: str
    info: Mapping[str, Any]
    model: str


@dataclass(frozen=True)
class PoolingTarget:
    """A pooling model in the model repository. The checkpoint of the model may be missing.

    Attributes:
        kind: "embedding" or "rerank".
        model: the name of the model in the model repository.
        names: the names of the model in requests. If there are no names, the name is read from the
            properties of the model.
    """

    kind: str
    model: str
    names: tuple[str, ...] = ()


_DEFAULT_TARGETS = (PoolingTarget(EMBEDDING, EMBEDDING), PoolingTarget(RERANK, RERANK))


class Residence(Protocol):
    """Loads models of the model repository, and reports which models are loaded."""

    async def is_loaded(self, model: str) -> bool:
        """Return whether a model of the repository is loaded."""
        ...

    async def prepare(self, model: str) -> None:
        """Load a model of the repository, unless the model is already loaded.

        Raises: ApiError.
        """
        ...


@dataclass(frozen=True)
class PoolingCall:
    """The inputs for one call of a pooling model.

    Attributes:
        model: the name of the model in the model repository.
        request_id: the id of the request in the logs of the server.
        tensors: maps the name of an input tensor to its values (strings, numbers or booleans).
        options: the JSON object for the input `options`. Values that are None are left out.
    """

    model: str
    request_id: str
    tensors: Mapping[str, Sequence[Any] | npt.NDArray[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolingOutputs:
    """The outputs from one call of a pooling model.

    Attributes:
        arrays: maps the name of a numeric output tensor to an array.
        strings: maps the name of a string output tensor to its values.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    strings: Mapping[str, Sequence[str]]


class PoolingBackend(Protocol):
    """A backend that computes embeddings and scores."""

    async def infer(self, call: PoolingCall) -> PoolingOutputs:
        """Call a model and return its outputs. If the task is cancelled, cancel the call.

        Raises: BackendError.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class TritonPooling:
    """Calls the pooling models on a Triton server. The first call opens the connection.

    Args:
        url: host:port of the server's gRPC endpoint.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._calls: TritonCalls | None = None

    async def infer(self, call: PoolingCall) -> PoolingOutputs:
        """Call a model, as described by `PoolingBackend.infer`."""
        if self._calls is None:  # `TritonCalls` can be created only while an event loop runs
            self._calls = TritonCalls(self._url)
        request = await _build_request(call)
        try:
            return _decode(await self._calls.infer(request))
        except grpc.RpcError as error:
            raise _backend_error(error, call.model, self._url) from None

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._calls is not None:
            await self._calls.close()


class PoolingModels:
    """The pooling models that the Triton server serves.

    The properties of a model are requested once and then cached.

    Args:
        backend: calls a model.
        targets: the pooling models in the model repository.
        residence: loads models. None if all models are always loaded.

    Attributes:
        backend: the argument `backend`.
        targets: the argument `targets`.
    """

    def __init__(
        self,
        backend: PoolingBackend,
        targets: Sequence[PoolingTarget] = _DEFAULT_TARGETS,
        residence: Residence | None = None,
    ) -> None:
        self.backend = backend
        self.targets = targets
        self._residence = residence
        self._known: dict[str, ServedModel] = {}

    async def find(self, target: PoolingTarget) -> ServedModel:
        """Return the name and the properties of a model. Load the model if it is not loaded yet.

        Raises:
            ApiError: the model cannot be loaded.
            BackendError: the server does not serve such a model (NOT_FOUND), or the call failed.
            TimeoutError: the model did not answer in time.
        """
        if target.model not in self._known:
            if self._residence is not None:
                await self._residence.prepare(target.model)
            self._known[target.model] = await self._query(target)
        return self._known[target.model]

    async def _query(self, target: PoolingTarget) -> ServedModel:
        """Request the name and the properties of a loaded model.

        Raises:
            BackendError: the model has no checkpoint (NOT_FOUND), or the call failed.
            TimeoutError: the model did not answer within `_INFO_TIMEOUT_S` seconds.
        """
        call = PoolingCall(target.model, f"info-{target.model}", {"return_info": [True]})
        async with asyncio.timeout(_INFO_TIMEOUT_S):
            outputs = await self.backend.infer(call)
        info = json.loads(outputs.strings["info"][0])
        has_checkpoint = info["task"] != "none"
        if not has_checkpoint:
            raise BackendError("NOT_FOUND", info["reason"])
        name = target.names[0] if target.names else info["name"]
        return ServedModel(target.kind, name, info, target.model)

    async def all(self) -> list[ServedModel]:
        """Return all pooling models that are served. Skip a loaded model that does not answer.

        This method loads no models. A model that is not loaded is returned without properties.
        """
        models = [await self._find_without_loading(target) for target in self.targets]
        return [model for model in models if model is not None]

    async def _find_without_loading(self, target: PoolingTarget) -> ServedModel | None:
        """Return the description of a model, or None if the model is loaded but does not answer.

        If the model is not loaded, this method does not load the model, and the description
        contains no properties of the model.
        """
        if self._residence is not None and not await self._residence.is_loaded(target.model):
            return ServedModel(target.kind, target.names[0], info={}, model=target.model)
        try:
            return await self.find(target)
        except (FrontendError, TimeoutError):
            return None


_OUTPUT_TYPES: Mapping[str, Any] = {"FP32": np.float32, "INT32": np.int32}
_NUMBER_TYPES = {"return_info": "BOOL", "input_ids": "INT32", "input_lengths": "INT32"}
"""Maps each input tensor with numbers to its data type. All other input tensors contain texts."""


async def _build_request(call: PoolingCall) -> Any:  # noqa: ANN401 - a protobuf message
    """Return the gRPC message for a call. Build a large message in a thread."""
    num_values = sum(map(len, call.tensors.values()))
    if num_values > _MANY_VALUES:
        return await asyncio.to_thread(_infer_request, call)
    return _infer_request(call)


def _infer_request(call: PoolingCall) -> Any:  # noqa: ANN401 - a protobuf message
    """Return the gRPC message for a call."""
    return infer_request(call.model, call.request_id, _inputs(call))


def _inputs(call: PoolingCall) -> list[InputTensor]:
    """Return the input tensors of a call.

    The options of the call become the tensor `options`, which contains one JSON object.
    """
    tensors = dict(call.tensors)
    options = {name: value for name, value in call.options.items() if value is not None}
    if options:
        tensors["options"] = [json.dumps(options)]
    return [_input_tensor(name, values) for name, values in tensors.items()]


def _input_tensor(name: str, values: Sequence[Any] | npt.NDArray[Any]) -> InputTensor:
    """Return an input tensor. Texts are encoded as UTF-8.

    Example: "texts" and ["a"] return InputTensor("texts", "BYTES", [b"a"]).
    """
    if name in _NUMBER_TYPES:
        return InputTensor(name, _NUMBER_TYPES[name], values)
    return InputTensor(name, "BYTES", [text.encode() for text in values])


def _decode(response: Any) -> PoolingOutputs:  # noqa: ANN401 - a protobuf message
    """Decode the output tensors in a response of the Triton server."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    strings: dict[str, Sequence[str]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            strings[output.name] = [string.decode() for string in decode_strings(raw)]
        else:
            array = np.frombuffer(raw, dtype=_OUTPUT_TYPES[output.datatype])
            arrays[output.name] = array.reshape(list(output.shape))
    return PoolingOutputs(arrays, strings)


def _backend_error(error: grpc.RpcError, model: str, url: str) -> BackendError:
    """Return a BackendError for a failed call. The message names the cause.

    If the message means that the server is stopping or must be restarted, the code is UNAVAILABLE
    instead of gRPC's code, so that the client sends the request again.

    Example: a gRPC error with the code INVALID_ARGUMENT and the message "[INVALID_ARGUMENT] texts:
    must not be empty" returns BackendError("INVALID_ARGUMENT", "texts: must not be empty").
    """
    code: str = error.code().name
    message = error.details() or code
    is_model_unknown = code == "NOT_FOUND" or message.startswith("Request for unknown model")
    is_unreachable = code == "UNAVAILABLE" and "failed to connect" in message
    if is_model_unknown:
        return BackendError(
            "NOT_FOUND",
            f"The Triton server has no model {model!r} in its model repository, or has not loaded "
            "it yet",
        )
    if is_unreachable:
        return BackendError(code, unreachable_message(url))
    sentence = message.removeprefix(f"[{code}] ")
    return BackendError("UNAVAILABLE" if means_outage(message) else code, sentence)
