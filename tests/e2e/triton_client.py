"""Functions that send a request to the ensemble over gRPC with tritonclient."""

import asyncio
import json
from dataclasses import dataclass, field

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient

DTYPES = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}


@dataclass
class Reply:
    """All responses to one request, and the error if there was one."""

    deltas: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    error: str | None = None

    @property
    def text(self):
        return "".join(self.texts)

    @property
    def finish_reasons(self):
        return [d["finish_reason"] for d in self.deltas if "finish_reason" in d]


def tensor(name, value, datatype="BYTES"):
    """Return an input tensor with one dimension, from one value or from a list of values."""
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    input_tensor = grpcclient.InferInput(name, [len(values)], datatype)
    input_tensor.set_data_from_numpy(np.array(values, dtype=DTYPES[datatype]))
    return input_tensor


def chat(content, *, stream=True, **fields):
    """Return the tensors of a chat with one user message and the given fields."""
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return [tensor("chat_request", json.dumps(body)), tensor("stream", stream, "BOOL")]


async def ask(url, inputs, *, cancel_when=None):
    """Send one request on its own stream, and return the `Reply`.

    Cancel the request when `cancel_when(reply)` returns true after a response.
    """
    reply = Reply()

    async def requests():
        yield {"model_name": "llm", "inputs": inputs}

    async with grpcclient.InferenceServerClient(url) as client:
        responses = client.stream_infer(requests())
        try:
            async for result, error in responses:
                if error is not None:
                    reply.error = str(error)
                    continue
                reply.deltas.append(json.loads(result.as_numpy("delta")[0]))
                reply.texts.append(result.as_numpy("text_output")[0].decode())
                reply.outputs.append(result)
                if cancel_when is not None and cancel_when(reply):
                    responses.cancel()
        except asyncio.CancelledError:
            # A cancelled call raises this exception when all of its responses have been read.
            if cancel_when is None:
                raise
        except grpc.aio.AioRpcError as error:
            reply.error = f"{error.code()}: {error.details()}"
    return reply
