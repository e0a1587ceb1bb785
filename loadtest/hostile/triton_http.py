"""Attacks at the HTTP endpoint of the Triton server."""

import gzip
import json
from collections.abc import Iterator

from loadtest.hostile.attack import Attack, Send, make_attacks
from loadtest.hostile.requests import call, raw
from loadtest.hostile.tensors import MODELS

# If the Triton server cannot read a request, the server answers with status 500. If a model does
# not support an endpoint, the server answers with status 501. Only these answers are allowed. A 500
# with another text comes from a model and is a fault.
OWN_ANSWERS = (
    (501, "HTTP end point doesn't support models with decoupled transaction policy"),
    (500, "failed to parse the request JSON buffer"),
    (500, "Unable to parse '"),
    (500, "attempt to "),
    (500, "Unable to open shared memory region"),
    (503, "explicit model load / unload is not allowed"),
    (501, "log file location can not be updated through network protocol"),
    (501, "trace file location can not be updated through network protocol"),
    (501, "string correlation ID cannot be longer than 128 characters"),
)


def attacks() -> Iterator[Attack]:
    """Yield all attacks at the HTTP endpoint of the Triton server."""
    sends = {
        f"{model}: {name}": _post(f"/v2/models/{model}/infer", body)
        for model in MODELS
        for name, body in _infer_bodies().items()
    }
    for name, body in _generate_bodies().items():
        sends[f"generate: {name}"] = _post("/v2/models/llm/generate", body)
        if "MB" not in name:
            sends[f"stream: {name}"] = _post("/v2/models/llm/generate_stream", body)
    sends |= _model_control() | _shared_memory()
    for name, data in _damaged_requests().items():
        # The Triton server waits for the rest of some of these requests. It closes the connection
        # only when the client closes it.
        sends[f"damaged: {name}"] = raw(data, is_triton=True, leave_after_s=3)
    yield from make_attacks("Triton HTTP", sends, limit_s=10, own_answers=OWN_ANSWERS)


def _post(path: str, body: object = b"") -> Send:
    return call("POST", path, is_triton=True, body=body)


def _get(path: str) -> Send:
    return call("GET", path, is_triton=True)


def _tensor(**fields: object) -> dict[str, object]:
    """Return the body of a request with one text. `fields` replace fields of the text's tensor."""
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    return {"inputs": [{**tensor, **fields}]}


def _infer_bodies() -> dict[str, object]:
    """Return bodies for /infer. All models must survive all bodies."""
    region = {"shared_memory_region": "x", "shared_memory_byte_size": 2**40}
    return {
        "an empty body": b"",
        "damaged JSON": b'{"inputs": [',
        "inputs is a number": {"inputs": 7},
        "no data": {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES"}]},
        "a negative shape": _tensor(shape=[-1]),
        "a huge shape": _tensor(shape=[2**62]),
        "a shape of fractions": _tensor(shape=[1.5]),
        "data of wrong types": _tensor(data=[{"a": 1}]),
        "nested data": _tensor(data=[[[["a"]]]]),
        "surrogates": _tensor(data=["\ud800"]),
        "an unknown data type": _tensor(datatype="FP1024"),
        "an unknown output": {**_tensor(), "outputs": [{"name": "nothing"}]},
        "an output in shared memory": {
            **_tensor(),
            "outputs": [{"name": "delta", "parameters": region}],
        },
        "an input in shared memory": _tensor(
            parameters={"shared_memory_region": "nothing", "shared_memory_byte_size": 8}
        ),
        "a binary size beyond the body": _tensor(parameters={"binary_data_size": 2**40}),
        "sequence flags": {
            **_tensor(),
            "parameters": {"sequence_id": 2**63, "sequence_start": True, "sequence_end": True},
        },
        "a priority and a timeout": {**_tensor(), "parameters": {"priority": -1, "timeout": -1}},
        "an id of 100,000 characters": {**_tensor(), "id": "i" * 100_000},
        "100,000 brackets": b"[" * 100_000,
    }


def _generate_bodies() -> dict[str, object]:
    """Return bodies for /generate of the language model."""
    small = {"max_tokens": 2}
    messages = ",".join(['{"role":"user","content":"a"}'] * 500_000)

    def sampling(**fields: object) -> dict[str, object]:
        return {"text_input": "a", "sampling_parameters": json.dumps({**small, **fields})}

    return {
        "a list": b"[]",
        "20,000 keys": {"text_input": "a", **small, **{f"k{i}": 1 for i in range(20_000)}},
        "a text of 5 MB": {"text_input": "word " * 10**6},
        "a damaged chat": {"chat_request": "[" * 50_000},
        "a chat that is a list": {"chat_request": "[]"},
        "a chat of 500,000 messages": {"chat_request": f'{{"messages":[{messages}]}}'},
        "damaged parameters": {"text_input": "a", "sampling_parameters": "{"},
        "parameters that are numbers": {"text_input": "a", "sampling_parameters": "7"},
        "n of 10**9": sampling(n=10**9),
        "a seed of 2**70": sampling(seed=2**70),
        "NaN": {"text_input": "a", "sampling_parameters": '{"temperature": NaN}'},
        "infinite": {"text_input": "a", "sampling_parameters": '{"temperature": 1e999}'},
        "another client's id": sampling(client_id="neighbour", client_weight=1000),
        "a client id of 1 MB": sampling(client_id="c" * 10**6),
        "stop strings": sampling(stop=[f"s{i}" for i in range(10_000)]),
        "biases": sampling(logit_bias={str(i): 1 for i in range(100_000)}),
        "a schema": sampling(json_schema={"pattern": "((a{1,1000}){1,1000}){1,1000}"}),
        "no input": {},
        "an image of 1 MB": {"text_input": "a", "image": "A" * 10**6},
        "stream is a text": {"text_input": "a", "stream": "x", **small},
        "nested input": {"text_input": [[["a"]]], **small},
        "surrogates": {"text_input": "\ud800\0", **small},
    }


def _model_control() -> dict[str, Send]:
    """Return requests that would change the server or read its files."""
    parameters = {"parameters": {"file:1/model.py": "aW1wb3J0IG9z", "config": "{}"}}
    level = {"log_file": "/tmp/nereid-hostile-log", "log_verbose_level": 2**31}
    trace = {"trace_file": "/tmp/nereid-hostile-trace", "trace_rate": "1"}
    return {
        "GET a file": _get("/v2/../../etc/passwd"),
        "an unknown model": _post("/v2/models/nothing/infer", b"{}"),
        "an unknown version": _post("/v2/models/llm/versions/99999999999999/infer", b"{}"),
        "a version with a path": _get("/v2/models/llm/versions/..%2f..%2f1/config"),
        "load a model with a file": _post("/v2/repository/models/llm/load", parameters),
        "load a new model": _post("/v2/repository/models/..%2fevil/load", parameters),
        "unload a model": _post("/v2/repository/models/executor/unload", b"{}"),
        "the index of the repository": _post("/v2/repository/index", b'{"ready": 7}'),
        "trace settings": _post("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        "trace settings of a model": _post("/v2/models/llm/trace/setting", trace),
        "log settings": _post("/v2/logging", level),
        "damaged log settings": _post("/v2/logging", {"log_verbose_level": "x"}),
        "an unknown method": call("BREW", "/v2/models/llm", is_triton=True),
        "DELETE": call("DELETE", "/v2/models/llm", is_triton=True),
        "statistics of a path": _get("/v2/models/..%2f..%2fetc/stats"),
    }


def _shared_memory() -> dict[str, Send]:
    """Return requests that register memory which does not belong to the client."""

    def register(name: str, **fields: object) -> Send:
        return _post(f"/v2/systemsharedmemory/region/{name}/register", fields)

    cuda = {"raw_handle": {"b64": "AAAA"}, "device_id": 99, "byte_size": 2**40}
    return {
        "shared memory of a file": register(
            "a", key="/../../etc/passwd", offset=0, byte_size=2**40
        ),
        "shared memory of the server": register(
            "b", key="/nereid_feedback", offset=0, byte_size=64
        ),
        "shared memory at a negative offset": register("c", key="/x", offset=-1, byte_size=-1),
        "shared memory of 2**63 bytes": register("d", key="/x", offset=2**63, byte_size=2**63),
        "unregister all shared memory": _post("/v2/systemsharedmemory/unregister"),
        "CUDA shared memory": _post("/v2/cudasharedmemory/region/a/register", cuda),
    }


def _damaged_requests() -> dict[str, bytes]:
    """Return damaged HTTP requests."""
    bomb = gzip.compress(b" " * 50_000_000)
    gzip_length = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    header_length = b"Inference-Header-Content-Length: %d\r\nContent-Length: 2\r\n\r\n{}"
    after_head = {
        "a header of 1 MB": b"X: " + b"y" * 2**20 + b"\r\n\r\n",
        "10,000 headers": b"".join(b"X-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        "two lengths": b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n{}   {}  ",
        "a length of 10**30": b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
        "a negative length": b"Content-Length: -5\r\n\r\n{}",
        "a header length beyond the body": header_length % 999_999_999,
        "a negative header length": header_length % -1,
        "a gzip bomb": gzip_length % len(bomb) + bomb,
        "damaged gzip": gzip_length % 4 + b"abcd",
    }
    head = b"POST /v2/models/llm/generate HTTP/1.1\r\nHost: a\r\n"
    requests = {name: head + rest for name, rest in after_head.items()}
    return {"random bytes": bytes(range(256)) * 40, **requests}
