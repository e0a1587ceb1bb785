"""Attacks with damaged tensors at the gRPC endpoint of the Triton server, for all six models."""

import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import msgpack
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.hostile.attack import Attack, Outcome, Send, Target, make_attacks

# The HTTP status for each gRPC code that means a defect of the server. Other codes count as 400.
_STATUS = {
    "OK": 200,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
MODELS = ("llm", "tokenizer", "executor", "postprocessor", "embedding", "rerank")
_DECOUPLED = ("llm", "executor", "postprocessor")
_LIMIT_S = 10.0
_ERROR_CODE = re.compile(r"\[(\w*)\]")  # such as "[INTERNAL] the request failed"


class Tensor(NamedTuple):
    """An input of a model."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes


def attacks() -> Iterator[Attack]:
    """Yield all attacks with tensors."""
    for model in MODELS:
        sends = {f"{model}: {name}": infer(model, *row) for name, row in _damaged(model).items()}
        yield from make_attacks("tensors", sends, limit_s=_LIMIT_S)
    internal = {
        f"executor: {name}": infer("executor", _array("envelope", envelope), _ids(5, 6, 7))
        for name, envelope in _envelopes().items()
    }
    internal |= {
        f"postprocessor: {name}": infer("postprocessor", _TOKEN, _array("state", state))
        for name, state in _states().items()
    }
    yield from make_attacks("envelope", internal, limit_s=_LIMIT_S)
    parameters = {
        f"llm: parameters: {name}": infer(
            "llm", string("text_input", b"hi"), string("sampling_parameters", text.encode())
        )
        for name, text in _parameters().items()
    }
    yield from make_attacks("tensors", parameters, limit_s=_LIMIT_S)
    yield from make_attacks("tensors", _large_inputs())


def _parameters() -> dict[str, str]:
    """Return texts for the input `sampling_parameters`."""
    properties = {f"p{i}": {"type": "string"} for i in range(5_000)}
    return {
        "damaged JSON": "{",
        "a list": "[]",
        "a deep list": "[" * 50_000,
        "an unknown name": json.dumps({"temprature": 1}),
        "n of -1": json.dumps({"n": -1}),
        "a schema of 5,000 properties": json.dumps({"guided_json": {"properties": properties}}),
        "50,000 stop strings": json.dumps({"stop": [f"s{i}" for i in range(50_000)]}),
        "200,000 biases": json.dumps({"logit_bias": {str(i): 1 for i in range(200_000)}}),
    }


def _large_inputs() -> dict[str, Send]:
    """Return functions that send large inputs."""
    text_of_40_mb = b"word " * 8 * 10**6
    messages = b",".join([b'{"role":"user","content":"a"}'] * 300_000)
    inputs = {
        "a chat of 300,000 messages": string("chat_request", b'{"messages":[' + messages + b"]}"),
        "a text of 5 MB": string("text_input", b"word " * 10**6),
        "a text of 40 MB": string("text_input", text_of_40_mb),
    }
    ids = Tensor("input_ids", "INT32", [3_000_000], struct.pack("<i", 5) * 3_000_000)
    return {
        **{
            f"{model}: {name}": infer(model, tensor)
            for model in ("llm", "tokenizer")
            for name, tensor in inputs.items()
        },
        "llm: 3 million token ids": infer("llm", ids),
        "embedding: texts of 40 MB": infer("embedding", string("texts", text_of_40_mb)),
    }


def _damaged(model: str) -> dict[str, list[Tensor]]:
    """Return inputs for a model: variants of its first input, with its other inputs."""
    good, *others = _small_inputs(model)
    is_text = good.datatype == "BYTES"
    bad_text = b"\xff\xfe\0\x80"

    def changed(**fields: Any) -> list[Tensor]:  # noqa: ANN401 - the fields of Tensor
        return [good._replace(**fields), *others]

    return {
        "no inputs": [],
        "a wrong data type": changed(datatype="FP32", data=bytes(4)),
        "an unknown data type": changed(datatype="COMPLEX"),
        "an unknown input": changed(name="unknown", datatype="INT32", data=bytes(4)),
        "the same input twice": [good, good, *others],
        "a negative shape": changed(shape=[-1]),
        "a shape of 2**62": changed(shape=[2**62]),
        "a shape of 100 dimensions": changed(shape=[1] * 100),
        "no elements": changed(shape=[0], data=b""),
        "too few bytes": changed(shape=[1000]),
        "too many bytes": changed(data=good.data + b"\xff" * 1000),
        "a string longer than the tensor": changed(data=b"\xff\xff\xff\x7fab"),
        "invalid UTF-8": (
            [string(good.name, bad_text), *others] if is_text else changed(shape=[4], data=bad_text)
        ),
    }


def _small_inputs(model: str) -> list[Tensor]:
    """Return the necessary inputs of a model, each with one element."""
    if model == "executor":
        return [_array("envelope", b"\0"), _ids(5)]
    if model == "postprocessor":
        return [_array("state", b"\0"), _TOKEN]
    texts = {"embedding": "texts", "rerank": "query"}
    return [string(texts.get(model, "text_input"), b"hi")]


def _envelopes() -> dict[str, bytes]:
    """Return envelopes: the parameters of a request as the tokenizer sends them to the executor."""
    params = msgpack.packb({"temperature": 1.0})
    wrong_types = msgpack.packb({"temperature": "hot", "grammar": 3, "thinking": None})
    good_types = msgpack.packb({"grammar": None, "thinking": None, "max_tokens": 2})

    def envelope(params: bytes, n: object = 1, context: bytes = b"") -> bytes:
        """Pack the first fields of a RequestEnvelope."""
        return bytes(msgpack.packb([params, n, context]))

    return {
        "random bytes": os.urandom(300),
        "empty": b"",
        "a number": msgpack.packb(7),
        "a row that is too short": msgpack.packb([params]),
        "a row that is too long": msgpack.packb([params, 1, b""] + [0] * 40),
        "n of 10**9": envelope(params, n=10**9),
        "n of -1": envelope(params, n=-1),
        "n is a text": envelope(params, n="many"),
        "damaged parameters": envelope(b"\xc1\xc1"),
        "an unknown parameter": envelope(msgpack.packb({"evil": 1})),
        "incomplete parameters": envelope(params),
        "parameters of wrong types": envelope(wrong_types),
        "a damaged context": envelope(good_types, context=b"\xc1"),
        "a list of 10**9 elements": b"\xdd\x3b\x9a\xca\x00",
        "500 nested lists": b"\x91" * 500 + b"\xc0",
        "100,000 nested lists": b"\x91" * 100_000 + b"\xc0",
    }


def _states() -> dict[str, bytes]:
    """Return states that the executor has not signed. Most of them are otherwise valid."""

    def state(slot: int = 0, deltas: object = (), slots: tuple[int, ...] = (0,)) -> bytes:
        """Pack the fields of a StepState."""
        context = msgpack.packb({"stream": True, "num_prompt_tokens": 1})
        opening = (context, slots)
        serial, step, is_last = 1, 1, False
        return bytes(msgpack.packb((slot, serial, step, deltas, is_last, opening)))

    def delta(token_ids: int) -> tuple[object, ...]:
        """Return the fields of a SequenceDelta. The token ids should be a tuple."""
        index, logprobs, num_cached_tokens, ending = 0, ((), None, None), 0, None
        return (index, token_ids, *logprobs, num_cached_tokens, ending)

    return {
        "random bytes": os.urandom(300),
        "empty": b"",
        "a row that is too short": msgpack.packb([1]),
        "no opening": msgpack.packb((0, 99_999, 7, [], False, None)),
        "a state without a signature": state(deltas=[delta(1)]),
        "a state with a signature of zeros": bytes(32) + state(deltas=[delta(1)]),
        "a state with a signature at the end": state(deltas=[delta(1)]) + bytes(32),
        "a slot of 2**40": state(slots=(2**40,)),
        "a negative slot": state(slot=-1),
        "100,000 slots": state(slots=tuple(range(100_000))),
        "deltas of wrong types": state(deltas=[1, "a"]),
        "a delta with 2**60 tokens": state(deltas=[delta(2**60)]),
        "100,000 nested lists": b"\x91" * 100_000 + b"\xc0",
    }


def _array(name: str, data: bytes) -> Tensor:
    return Tensor(name, "UINT8", [len(data)], data)


def _ids(*ids: int) -> Tensor:
    return Tensor("prompt_token_ids", "INT32", [len(ids)], struct.pack(f"<{len(ids)}i", *ids))


def string(name: str, text: bytes) -> Tensor:
    """Return an input with one string."""
    return Tensor(name, "BYTES", [1], struct.pack("<I", len(text)) + text)


_TOKEN = _ids(5)._replace(name="token_ids")


def infer(model: str, *tensors: Tensor) -> Send:
    """Return a function that sends tensors to a model."""

    def send(target: Target, limit_s: float) -> Outcome:
        request = service_pb2.ModelInferRequest(model_name=model)
        add_inputs(request, *tensors)
        return send_request(target, request, limit_s)

    return send


def add_inputs(request: Any, *tensors: Tensor) -> None:  # noqa: ANN401 - untyped library
    """Add inputs to a request."""
    for name, datatype, shape, data in tensors:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)


def send_request(target: Target, request: Any, limit_s: float) -> Outcome:  # noqa: ANN401 - untyped library
    """Send a request to its model, on a stream if the model is decoupled."""
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(target.grpc, options=unlimited) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if request.model_name in _DECOUPLED:
                return _streamed(stub, request, limit_s)
            stub.ModelInfer(request, timeout=limit_s)
        except grpc.RpcError as error:
            return _outcome(error)
    return Outcome(200)


def _streamed(stub: Any, request: Any, limit_s: float) -> Outcome:  # noqa: ANN401 - untyped library
    """Send a request on a stream, and return after its first response."""
    has_ended = threading.Event()

    def requests() -> Iterator[Any]:
        yield request
        has_ended.wait(limit_s)  # the stream stays open until the response

    responses = stub.ModelStreamInfer(requests(), timeout=limit_s)
    try:
        first = next(responses, None)
        if first is None or not first.error_message:
            return Outcome(200)
        code = _ERROR_CODE.search(first.error_message)
        return Outcome(_STATUS.get(code[1], 400) if code else 400, first.error_message)
    finally:
        has_ended.set()
        responses.cancel()


def _outcome(error: grpc.RpcError) -> Outcome:
    """Return the outcome of a request that failed with a gRPC error."""
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
