"""Attacks with all inputs and request options of each model, at the gRPC endpoint.

The inputs are read from the server, so that an input that is added to a model is attacked, too.
"""

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.hostile.attack import Attack, Outcome, Send, Target, worst
from loadtest.hostile.tensors import MODELS, send_request
from loadtest.hostile.triton_http import OWN_ANSWERS

_SIZES = {"BYTES": 0, "BOOL": 1, "UINT8": 1, "INT32": 4, "FP32": 4, "INT64": 8, "FP64": 8}
Change = Callable[[Any], None]


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this module."""
    for model in MODELS:
        for name, (count, seed) in {
            "one element": (1, 0),
            "no elements": (0, 0),
            "1,000 elements": (1000, 0),
            "random bytes": (1, 1),
            "1,000 random elements": (1000, 2),
        }.items():
            title = f"{model}: each input alone, {name}"
            yield Attack("inputs", title, _each_input(model, count, seed), limit_s=20)
            title = f"{model}: all inputs, {name}"
            yield Attack("inputs", title, _all_inputs(model, count, seed), limit_s=20)
        for name, change in _changes().items():
            send = _changed(model, change)
            yield Attack("inputs", f"{model}: {name}", send, limit_s=20, own_answers=OWN_ANSWERS)


def _each_input(model: str, count: int, seed: int) -> Send:
    """Return a function that sends one request with each input alone."""

    def send(target: Target, limit_s: float) -> Outcome:
        requests = []
        for one in _inputs(target, model):
            request = _small_request(model)
            _add(request, one, count, random.Random(seed))
            requests.append(request)
        return worst(send_request(target, request, limit_s) for request in requests)

    return send


def _all_inputs(model: str, count: int, seed: int) -> Send:
    """Return a function that sends one request with all inputs."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = service_pb2.ModelInferRequest(model_name=model)
        for one in _inputs(target, model):
            _add(request, one, count, random.Random(seed))
        return send_request(target, request, limit_s)

    return send


def _inputs(target: Target, model: str) -> list[Any]:
    with grpc.insecure_channel(target.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return list(stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model)).inputs)


def _add(request: Any, one: Any, count: int, chance: random.Random) -> None:  # noqa: ANN401 - untyped library
    """Add an input with `count` equal random elements. Do nothing if the request has the input."""
    for other in request.inputs:
        if other.name == one.name:
            return
    element = chance.randbytes(_SIZES.get(one.datatype, 4) or 30)
    if one.datatype == "BYTES":
        element = struct.pack("<I", len(element)) + element
    request.inputs.add(name=one.name, datatype=one.datatype, shape=[count])
    request.raw_input_contents.append(element * count)


def _small_request(model: str) -> Any:  # noqa: ANN401 - untyped library
    """Return a request. For the models "llm" and "tokenizer", it contains a limit of two tokens."""
    request = service_pb2.ModelInferRequest(model_name=model)
    if model in ("llm", "tokenizer"):
        text = b'{"max_tokens": 2}'
        request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    return request


def _changed(model: str, change: Change) -> Send:
    """Return a function that sends a request with one text. `change` first changes the request."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = _small_request(model)
        first = _inputs(target, model)[0]
        _add(request, first, 1, random.Random(0))
        change(request)
        return send_request(target, request, limit_s)

    return send


def _changes() -> dict[str, Change]:
    """Return functions that make a request hostile."""

    def parameter(name: str, **values: object) -> Change:
        def change(request: Any) -> None:  # noqa: ANN401 - untyped library
            for kind, value in values.items():
                setattr(request.parameters[name], f"{kind}_param", value)

        return change

    def region(request: Any) -> None:  # noqa: ANN401 - untyped library
        for one in request.inputs:
            one.parameters["shared_memory_region"].string_param = "nereid"
            one.parameters["shared_memory_byte_size"].int64_param = 2**40
        del request.raw_input_contents[:]

    def datatypes(request: Any) -> None:  # noqa: ANN401 - untyped library
        request.inputs[0].datatype = "FP16"

    def outputs(request: Any) -> None:  # noqa: ANN401 - untyped library
        for number in range(1000):
            request.outputs.add(name=f"output_{number}")

    return {
        "an id of 1 MB": lambda request: setattr(request, "id", "i" * 2**20),
        "an id with control characters": lambda request: setattr(request, "id", "a\r\n\x1b[2J"),
        "a version of 2**63": lambda request: setattr(request, "model_version", str(2**63)),
        "a version that is a path": lambda request: setattr(request, "model_version", "../1"),
        "a sequence": parameter("sequence_id", int64=-1),
        "a sequence named by text": parameter("sequence_id", string="s" * 100_000),
        "the start of a sequence": parameter("sequence_start", bool=True),
        "a priority of 2**63": parameter("priority", uint64=2**63),
        "a negative timeout": parameter("timeout", int64=-5),
        "an unknown parameter": parameter("x" * 10_000, string="y" * 100_000),
        "a shared memory region": region,
        "a wrong data type": datatypes,
        "1,000 unknown outputs": outputs,
        "no contents": lambda request: request.raw_input_contents.__delitem__(slice(None)),
        "too many contents": lambda request: request.raw_input_contents.extend([b"x"] * 1000),
        "typed and raw contents": lambda request: request.inputs[0].contents.bytes_contents.append(
            b"x"
        ),
    }
