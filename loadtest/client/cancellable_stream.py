# SPDX-License-Identifier: Apache-2.0
"""Streams through the Triton server's gRPC endpoint that can be cancelled safely."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton_grpc
from tritonclient.grpc import InferInput

Json = dict[str, Any]

_END_TIMEOUT_S = 5.0
_DTYPES: dict[type, tuple[str, Any]] = {bool: ("BOOL", np.bool_), str: ("BYTES", np.object_)}


class GrpcEndpoint:
    """One gRPC channel; each request on it is a separate stream.

    A stream that is closed before its finish reason has arrived is cancelled. A stream whose
    finish reason has arrived ends by itself, because Triton server 2.51 can crash if a client
    cancels a stream that ends at the same moment.

    Args:
        url: host:port.
        is_rude: whether streams are cancelled even if their finish reason has arrived.
    """

    def __init__(self, url: str, is_rude: bool = False) -> None:
        self._is_rude = is_rude
        # gRPC would otherwise share one connection between all channels of a process.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._client = triton_grpc.InferenceServerClient(url, channel_args=options)
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until every stream has ended, and close the channel."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._client.close()

    async def events(self, body: Json) -> AsyncGenerator[Json]:
        """Send a request, and yield the events that `generate_stream` would send for this body.

        Closing the generator cancels the stream.

        Raises:
            ConnectionError: the connection broke.
        """
        inputs = [_tensor(name, value) for name, value in body.items()]
        stream = self._client.stream_infer(_once({"model_name": "llm", "inputs": inputs}))
        is_over = False
        try:
            async for result, error in stream:
                if error is not None:
                    is_over = True
                    yield {"error": str(error)}
                    return
                text, delta = (result.as_numpy(name) for name in ("text_output", "delta"))
                has_finished = "finish_reason" in json.loads(delta[0])
                is_over = has_finished and not self._is_rude
                yield {"text_output": text[0].decode()}
                if has_finished:
                    return
        except grpc.RpcError as error:
            is_over = True
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        finally:
            if not is_over:
                stream.cancel()
            task = asyncio.create_task(_drain(stream))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


async def _drain(stream: Any) -> None:  # noqa: ANN401 - untyped library
    with suppress(grpc.RpcError, TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in stream:
                pass


async def _once(request: Json) -> AsyncIterator[Json]:
    yield request


def _tensor(name: str, value: str | bool) -> Any:  # noqa: ANN401 - untyped library
    datatype, dtype = _DTYPES[type(value)]
    made = InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype))
    return made
