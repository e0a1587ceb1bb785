"""Attacks with damaged tensors at the gRPC endpoint of the Triton server, for all six models."""

import json
import os
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import msgpack
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.hostile.attack import Attack, Outcome, Send, Target

# The HTTP status for each gRPC code that means a defect of the server. Other codes count as 400.
_STATUS = {
    "OK": 200,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
# The first input of each model, with its data type.
_INPUTS = {
    "llm": ("text_input", "BYTES"),
    "tokenizer": ("text_input", "BYTES"),
    "executor": ("envelope", "UINT8"),
    "postprocessor": ("state", "UINT8"),
    "embedding": ("texts", "BYTES"),
    "rerank": ("query", "BYTES"),
}
MODELS = tuple(_INPUTS)
DECOUPLED = ("llm", "executor", "postprocessor")
Tensor = tuple[str, str, Sequence[int], bytes]


def attacks() -> Iterator[Attack]:
    """Yield all attacks with tensors."""
    for model, (name, datatype) in _INPUTS.items():
        for title, tensors in _tensors(model, name, datatype).items():
            yield Attack("tensors", f"{model}: {title}", infer(model, tensors), limit_s=10)
    for title, envelope in _envelopes().items():
        tensors = [_array("envelope", envelope), _ids(5, 6, 7)]
        yield Attack("envelope", f"executor: {title}", infer("executor", tensors), limit_s=10)
    for title, state in _states().items():
        tensors = [("token_ids", "INT32", [1], struct.pack("<i", 5)), _array("state", state)]
        send = infer("postprocessor", tensors)
        yield Attack("envelope", f"postprocessor: {title}", send, limit_s=10)
    parameters: dict[str, object] = {
        "damaged JSON": "{",
        "a list": "[]",
        "a deep list": "[" * 50_000,
        "an unknown name": {"temprature": 1},
        "n of -1": {"n": -1},
        "a schema of 5,000 properties": {
            "guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(5_000)}}
        },
        "50,000 stop strings": {"stop": [f"s{i}" for i in range(50_000)]},
        "200,000 biases": {"logit_bias": {str(i): 1 for i in range(200_000)}},
    }
    for title, value in parameters.items():
        text = value if isinstance(value, str) else json.dumps(value)
        tensors = [_string("text_input", b"hi"), _string("sampling_parameters", text.encode())]
        yield Attack("tensors", f"llm: parameters: {title}", infer("llm", tensors), limit_s=10)
    texts = {
        "a chat of 300,000 messages": (
            "chat_request",
            b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 300_000) + b"]}",
        ),
        "a text of 5 MB": ("text_input", b"word " * 10**6),
        "a text of 40 MB": ("text_input", b"word " * 8 * 10**6),
    }
    for title, (name, text) in texts.items():
        for model in ("llm", "tokenizer"):
            send = infer(model, [_string(name, text)])
            yield Attack("tensors", f"{model}: {title}", send)
    ids = ("input_ids", "INT32", [3_000_000], struct.pack("<i", 5) * 3_000_000)
    yield Attack("tensors", "llm: 3 million token ids", infer("llm", [ids]))
    yield Attack(
        "tensors",
        "embedding: texts of 40 MB",
        infer("embedding", [_string("texts", b"word " * 8 * 10**6)]),
    )


def _tensors(model: str, name: str, datatype: str) -> dict[str, list[Tensor]]:
    size = {"BYTES": 1, "UINT8": 1, "INT32": 4}[datatype]
    good = _string(name, b"hi")[3] if datatype == "BYTES" else b"\0" * size
    others = [_ids(5)] if model == "executor" else []
    if model == "postprocessor":
        others = [("token_ids", "INT32", [1], struct.pack("<i", 5))]
    other_type = "FP32"
    return {
        "no inputs": [],
        "a wrong data type": [(name, other_type, [1], b"\0" * 4), *others],
        "an unknown data type": [(name, "COMPLEX", [1], good), *others],
        "an unknown input": [("unknown", "INT32", [1], b"\0" * 4), *others],
        "the same input twice": [(name, datatype, [1], good)] * 2 + others,
        "a negative shape": [(name, datatype, [-1], good), *others],
        "a shape of 2**62": [(name, datatype, [2**62], good), *others],
        "a shape of 100 dimensions": [(name, datatype, [1] * 100, good), *others],
        "no elements": [(name, datatype, [0], b""), *others],
        "too few bytes": [(name, datatype, [1000], good), *others],
        "too many bytes": [(name, datatype, [1], good + b"\xff" * 1000), *others],
        "a string longer than the tensor": [(name, datatype, [1], b"\xff\xff\xff\x7fab"), *others],
        "invalid UTF-8": [
            _string(name, b"\xff\xfe\0\x80")
            if datatype == "BYTES"
            else (name, datatype, [4], b"\xff\xfe\0\x80"),
            *others,
        ],
    }


def _envelopes() -> dict[str, bytes]:
    params = msgpack.packb({"temperature": 1.0})
    return {
        "random bytes": os.urandom(300),
        "empty": b"",
        "a number": msgpack.packb(7),
        "a row that is too short": msgpack.packb([params]),
        "a row that is too long": msgpack.packb([params, 1, b""] + [0] * 40),
        "n of 10**9": msgpack.packb([params, 10**9, b""]),
        "n of -1": msgpack.packb([params, -1, b""]),
        "n is a text": msgpack.packb([params, "many", b""]),
        "damaged parameters": msgpack.packb([b"\xc1\xc1", 1, b""]),
        "an unknown parameter": msgpack.packb([msgpack.packb({"evil": 1}), 1, b""]),
        "incomplete parameters": msgpack.packb([params, 1, b""]),
        "parameters of wrong types": msgpack.packb(
            [msgpack.packb({"temperature": "hot", "grammar": 3, "thinking": None}), 1, b""]
        ),
        "a damaged context": msgpack.packb(
            [msgpack.packb({"grammar": None, "thinking": None, "max_tokens": 2}), 1, b"\xc1"]
        ),
        "a list of 10**9 elements": b"\xdd\x3b\x9a\xca\x00",
        "500 nested lists": b"\x91" * 500 + b"\xc0",
        "100,000 nested lists": b"\x91" * 100_000 + b"\xc0",
    }


def _states() -> dict[str, bytes]:
    """Return states that the executor has not signed. Most of them are otherwise valid."""

    def state(slot: int = 0, deltas: object = (), slots: tuple[int, ...] = (0,)) -> bytes:
        context = msgpack.packb({"stream": True, "num_prompt_tokens": 1})
        return bytes(msgpack.packb((slot, 1, 1, deltas, False, (context, slots))))

    delta = (0, 1, (), None, None, 0, None)
    return {
        "random bytes": os.urandom(300),
        "empty": b"",
        "a row that is too short": msgpack.packb([1]),
        "no opening": msgpack.packb((0, 99_999, 7, [], False, None)),
        "a state without a signature": state(deltas=[delta]),
        "a state with a signature of zeros": bytes(32) + state(deltas=[delta]),
        "a state with a signature at the end": state(deltas=[delta]) + bytes(32),
        "a slot of 2**40": state(slots=(2**40,)),
        "a negative slot": state(slot=-1),
        "100,000 slots": state(slots=tuple(range(100_000))),
        "deltas of wrong types": state(deltas=[1, "a"]),
        "a delta with 2**60 tokens": state(deltas=[(0, 2**60, (), None, None, 0, None)]),
        "100,000 nested lists": b"\x91" * 100_000 + b"\xc0",
    }


def _array(name: str, data: bytes) -> Tensor:
    return name, "UINT8", [len(data)], data


def _ids(*ids: int) -> Tensor:
    return "prompt_token_ids", "INT32", [len(ids)], struct.pack(f"<{len(ids)}i", *ids)


def _string(name: str, text: bytes) -> Tensor:
    return name, "BYTES", [1], struct.pack("<I", len(text)) + text


def infer(model: str, tensors: Sequence[Tensor]) -> Send:
    """Return a function that sends tensors to a model."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, datatype, shape, data in tensors:
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(data)
        return send_request(target, request, limit_s)

    return send


def send_request(target: Target, request: Any, limit_s: float) -> Outcome:  # noqa: ANN401 - untyped library
    """Send a request to its model, on a stream if the model is decoupled."""
    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    with grpc.insecure_channel(target.grpc, options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if request.model_name in DECOUPLED:
                return _streamed(stub, request, limit_s)
            stub.ModelInfer(request, timeout=limit_s)
        except grpc.RpcError as error:
            return _outcome(error)
    return Outcome(200)


def _streamed(stub: Any, request: Any, limit_s: float) -> Outcome:  # noqa: ANN401 - untyped library
    """Send a request on a stream, and return after its first response."""
    ended = threading.Event()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(request)

    def sent() -> Iterator[Any]:
        yield requests.get()
        ended.wait(limit_s)

    responses = stub.ModelStreamInfer(sent(), timeout=limit_s)
    try:
        first = next(responses, None)
        if first is None or not first.error_message:
            return Outcome(200)
        text = first.error_message
        code = text.partition("[")[2].partition("]")[0] if "[" in text else ""
        return Outcome(_STATUS.get(code, 400), text)
    finally:
        ended.set()
        responses.cancel()


def _outcome(error: grpc.RpcError) -> Outcome:
    code: str = error.code().name
    details: str = error.details() or ""
    if code == "DEADLINE_EXCEEDED":
        return Outcome("hung", details)
    # For every error of a Python model, the Triton server sends the code INTERNAL. The error
    # message begins with the model's own code.
    is_refusal = "[INVALID_ARGUMENT]" in details or "[RESOURCE_EXHAUSTED]" in details
    if code == "INTERNAL" and is_refusal:
        return Outcome(400, details)
    return Outcome(_STATUS.get(code, 400), details)
