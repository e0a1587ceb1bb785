"""Attacks at the gRPC endpoint with all inputs and request options of each model.

The inputs are read from the server, so that an input that is added to a model is attacked, too.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.hostile.attack import Attack, Outcome, Send, Target, make_attacks, worst
from loadtest.hostile.tensors import MODELS, Tensor, add_inputs, send_request, string
from loadtest.hostile.triton_http import OWN_ANSWERS

_ELEMENT_BYTES = {"BOOL": 1, "UINT8": 1, "INT32": 4, "FP32": 4, "INT64": 8, "FP64": 8}
_STRING_BYTES = 30
_LIMIT_S = 20.0
Change = Callable[[Any], object]
"""A function that makes a gRPC request hostile."""


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this module."""
    contents = {  # name -> number of elements of each input, seed of the elements
        "one element": (1, 0),
        "no elements": (0, 0),
        "1,000 elements": (1000, 0),
        "random bytes": (1, 1),
        "1,000 random elements": (1000, 2),
    }
    for model in MODELS:
        sends = {}
        for name, (count, seed) in contents.items():
            sends[f"{model}: each input alone, {name}"] = _each_input(model, count, seed)
            sends[f"{model}: all inputs, {name}"] = _all_inputs(model, count, seed)
        yield from make_attacks("inputs", sends, limit_s=_LIMIT_S)
        changed = {
            f"{model}: {name}": _changed(model, change) for name, change in _changes().items()
        }
        yield from make_attacks("inputs", changed, limit_s=_LIMIT_S, own_answers=OWN_ANSWERS)


def _each_input(model: str, count: int, seed: int) -> Send:
    """Return a function that sends one request for each input, and returns the worst outcome."""

    def send(target: Target, limit_s: float) -> Outcome:
        requests = []
        for tensor in _random_inputs(target, model, count, seed):
            request = _small_request(model)
            _add_new(request, tensor)
            requests.append(request)
        return worst(send_request(target, request, limit_s) for request in requests)

    return send


def _all_inputs(model: str, count: int, seed: int) -> Send:
    """Return a function that sends one request with all inputs."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = service_pb2.ModelInferRequest(model_name=model)
        add_inputs(request, *_random_inputs(target, model, count, seed))
        return send_request(target, request, limit_s)

    return send


def _changed(model: str, change: Change) -> Send:
    """Return a function that sends a request with one text. `change` first changes the request."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = _small_request(model)
        _add_new(request, _random_inputs(target, model, count=1, seed=0)[0])
        change(request)
        return send_request(target, request, limit_s)

    return send


def _random_inputs(target: Target, model: str, count: int, seed: int) -> list[Tensor]:
    """Return all inputs of a model, each with `count` equal random elements."""
    with grpc.insecure_channel(target.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model))
    tensors = []
    for one in metadata.inputs:
        rng = random.Random(seed)
        if one.datatype == "BYTES":
            element = string(one.name, rng.randbytes(_STRING_BYTES)).data
        else:
            element = rng.randbytes(_ELEMENT_BYTES.get(one.datatype, 4))
        tensors.append(Tensor(one.name, one.datatype, [count], element * count))
    return tensors


def _add_new(request: Any, tensor: Tensor) -> None:  # noqa: ANN401 - untyped library
    """Add an input to a request. Do nothing if the request has the input."""
    if all(other.name != tensor.name for other in request.inputs):
        add_inputs(request, tensor)


def _small_request(model: str) -> Any:  # noqa: ANN401 - untyped library
    """Return a request. Requests for "llm" and "tokenizer" contain a limit of two tokens."""
    request = service_pb2.ModelInferRequest(model_name=model)
    if model in ("llm", "tokenizer"):
        add_inputs(request, string("sampling_parameters", b'{"max_tokens": 2}'))
    return request


def _changes() -> dict[str, Change]:
    """Return functions that make a request hostile."""
    return {
        "an id of 1 MB": lambda request: setattr(request, "id", "i" * 2**20),
        "an id with control characters": lambda request: setattr(request, "id", "a\r\n\x1b[2J"),
        "a version of 2**63": lambda request: setattr(request, "model_version", str(2**63)),
        "a version that is a path": lambda request: setattr(request, "model_version", "../1"),
        "a sequence": _parameter("sequence_id", "int64", -1),
        "a sequence named by text": _parameter("sequence_id", "string", "s" * 100_000),
        "the start of a sequence": _parameter("sequence_start", "bool", value=True),
        "a priority of 2**63": _parameter("priority", "uint64", 2**63),
        "a negative timeout": _parameter("timeout", "int64", -5),
        "an unknown parameter": _parameter("x" * 10_000, "string", "y" * 100_000),
        "a shared memory region": _use_shared_memory,
        "a wrong data type": lambda request: setattr(request.inputs[0], "datatype", "FP16"),
        "1,000 unknown outputs": lambda request: [
            request.outputs.add(name=f"output_{number}") for number in range(1000)
        ],
        "no contents": lambda request: request.ClearField("raw_input_contents"),
        "too many contents": lambda request: request.raw_input_contents.extend([b"x"] * 1000),
        "typed and raw contents": lambda request: request.inputs[0].contents.bytes_contents.append(
            b"x"
        ),
    }


def _parameter(name: str, kind: str, value: object) -> Change:
    """Return a function that sets a parameter of a request to a value of a kind such as "int64"."""
    return lambda request: setattr(request.parameters[name], f"{kind}_param", value)


def _use_shared_memory(request: Any) -> None:  # noqa: ANN401 - untyped library
    """Refer to a region of shared memory for all inputs instead of sending their contents."""
    for one in request.inputs:
        one.parameters["shared_memory_region"].string_param = "nereid"
        one.parameters["shared_memory_byte_size"].int64_param = 2**40
    request.ClearField("raw_input_contents")
