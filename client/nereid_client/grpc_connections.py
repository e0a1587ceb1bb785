"""The gRPC connections to a Triton server, which are divided among the clients of the frontend."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

_NUM_CONNECTIONS = 4
_RECONNECT_MS = 1000  # the longest time between two attempts to connect

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
    # Without this option, all channels to the same address share one connection.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(eq=False)
class _Connection:
    """A connection to a Triton server.

    Attributes:
        channel: the gRPC channel, which opens the connection with the first call.
        stub: starts calls on the channel.
        num_calls: the number of running calls.
    """

    channel: grpc.aio.Channel
    stub: Any
    num_calls: int = 0


class Connections:
    """Several connections to a Triton server, so that one client does not delay the others.

    A connection sends the requests of all its calls one after the other. While a client starts 200
    calls with long prompts on a connection, a further call on this connection waits for more than
    a second.

    All running calls of a client use the same connection. A client without running calls gets the
    connection with the fewest running calls.

    Example: client A has 200 calls on the first connection. The first call of client B uses the
    second connection.

    By default, gRPC would wait up to two minutes between two attempts to connect. These connections
    reconnect within a second after a restart of the server.

    Args:
        url: host:port of the server's gRPC endpoint.
    """

    def __init__(self, url: str) -> None:
        channels = [
            grpc.aio.insecure_channel(url, options=_OPTIONS) for _ in range(_NUM_CONNECTIONS)
        ]
        self._connections = [
            _Connection(channel, service_pb2_grpc.GRPCInferenceServiceStub(channel))
            for channel in channels
        ]
        self._of_client: dict[str, _Connection] = {}
        self._num_calls: Counter[str] = Counter()

    def start_call(self, client: str) -> Any:  # noqa: ANN401 - untyped library
        """Return the stub for a new call of a client.

        When the call has ended, `end_call` must be called.
        """
        connection = self._of_client.get(client)
        if connection is None:
            connection = min(self._connections, key=lambda one: one.num_calls)
            self._of_client[client] = connection
        connection.num_calls += 1
        self._num_calls[client] += 1
        return connection.stub

    def end_call(self, client: str) -> None:
        """Record that a call of a client has ended."""
        self._of_client[client].num_calls -= 1
        self._num_calls[client] -= 1
        if not self._num_calls[client]:
            del self._num_calls[client], self._of_client[client]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            await connection.channel.close()
