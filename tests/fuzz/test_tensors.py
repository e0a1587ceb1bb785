"""Tests that random tensors over gRPC are answered or refused, and that the server continues."""

import json
import struct

import grpc
import pytest
from fuzz.values import mutated, odd
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.triton

_TYPES = ("BYTES", "BOOL", "INT32", "INT64", "UINT8", "FP32", "FP16", "BF16", "JSON", "")
_SHAPES = ([], [0], [2], [1, 1], [-1], [1 << 20], [1] * 9, [2**62], [1, 0, 1])
_BUGS = ("[INTERNAL]", "Traceback", "not healthy", "DEADLINE_EXCEEDED", "UNAVAILABLE")
_CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
_SAMPLING = {"max_tokens": 3, "temperature": 0.5, "n": 1}
_OPTIONS = {"kind": "dense", "dimensions": 8, "normalize": True}


def strings(*texts):
    """Return the bytes of a BYTES tensor with these strings."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def odd_strings(rng):
    """Return the bytes of a BYTES tensor with odd strings. Some of the results are invalid."""
    texts = (b"", b"\xff\xfe", b"a" * 100_000, b"\0", "é".encode()[:1], b"{", b"[1,2")
    data = strings(*(rng.choice(texts) for _ in range(rng.randrange(4))))
    return rng.choice((data, data[:-1], data + b"\1", struct.pack("<I", 2**32 - 1) + b"abc"))


def usual(rng, model):
    """Return inputs of a model: name -> (type, shape, bytes). Some JSON texts have wrong fields."""
    if model in ("llm", "tokenizer"):
        prompts = {
            "text_input": ("BYTES", [1], strings(b"Hello there")),
            "chat_request": ("BYTES", [1], strings(_json(rng, _CHAT))),
            "input_ids": ("INT32", [3], struct.pack("<3i", 5, 6, 7)),
        }
        name, prompt = rng.choice(list(prompts.items()))
        return {
            name: prompt,
            "stream": ("BOOL", [1], rng.choice((b"\0", b"\1"))),
            "sampling_parameters": ("BYTES", [1], strings(_json(rng, _SAMPLING))),
            "return_logprobs": ("BOOL", [1], b"\1"),
        }
    options = ("BYTES", [1], strings(_json(rng, _OPTIONS)))
    if model == "embedding":
        return {"texts": ("BYTES", [2], strings(b"one", b"two three")), "options": options}
    documents = ("BYTES", [2], strings(b"one", b"two"))
    return {"query": ("BYTES", [1], strings(b"Hugo?")), "documents": documents}


def _json(rng, body):
    if rng.random() < 0.5:
        return json.dumps(body).encode()
    names = ("stop", "logprobs", "seed", "top_k", "min_p", "guided_json", "x", "logit_bias")
    return json.dumps(mutated(rng, body, names)).encode()


def changed(rng, tensor):
    """Return a random change of a valid tensor, or None if the tensor is to be omitted."""
    datatype, shape, data = tensor
    change = rng.choice(("omit", "datatype", "shape", "bytes", "odd values", "odd JSON"))
    if change == "omit":
        return None
    if change == "datatype":
        return rng.choice(_TYPES), shape, data
    if change == "shape":
        return datatype, rng.choice(_SHAPES), data
    if change == "bytes":
        return datatype, shape, rng.choice((b"", data[:-1], data * 3, rng.randbytes(9)))
    if datatype == "BYTES" and change == "odd values":
        return datatype, shape, odd_strings(rng)
    if datatype == "BYTES":
        return datatype, shape, strings(json.dumps(odd(rng)).encode())
    ids = [rng.choice((-1, 0, 2**31 - 1, -(2**31), 7)) for _ in range(rng.randrange(600))]
    return "INT32", [len(ids)], struct.pack(f"<{len(ids)}i", *ids)


def request(rng, model):
    """Return a request with up to three random errors."""
    inputs = usual(rng, model)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(list(inputs) or ["x"])
        tensor = changed(rng, inputs.pop(name, ("BYTES", [1], b"")))
        if tensor is not None:
            is_misplaced = rng.random() < 0.1
            other = rng.choice(("image", "unknown", "input_lengths", "parts"))
            inputs[other if is_misplaced else name] = tensor
    message = service_pb2.ModelInferRequest(model_name=model, id=rng.choice(("", "x", "é" * 50)))
    for name, (datatype, shape, data) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    if rng.random() < 0.05:
        message.raw_input_contents.append(b"one too many")
    if rng.random() < 0.05:
        message.outputs.add(name=rng.choice(("delta", "no such output")))
    return message


def errors_of(stub, message):
    """Send a request, and return the error messages of its answers."""
    try:
        if message.model_name == "llm":
            replies = stub.ModelStreamInfer(iter([message]), timeout=120)
            return [reply.error_message for reply in replies if reply.error_message]
        stub.ModelInfer(message, timeout=120)
    except grpc.RpcError as error:
        return [f"{error.code().name} {error.details()}"]
    return []


@pytest.mark.parametrize(
    ("model", "num_cases"), [("llm", 150), ("tokenizer", 60), ("embedding", 60), ("rerank", 60)]
)
def test_any_tensors_are_answered_or_refused(server, random_cases, check_server, model, num_cases):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc_url, options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number, rng in random_cases(model, default_number=num_cases):
            message = request(rng, model)
            for error in errors_of(stub, message):
                case = f"case {number}: {error} after {str(message)[:2000]}"
                assert not any(word in error for word in _BUGS), case
    check_server()
