"""Opens several gRPC connections to a Triton server, and assigns one to each client."""

from collections import Counter
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

_NUM_CONNECTIONS = 4
_RECONNECT_MS = 1000  # the longest time between two attempts to connect

_STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
    # Without this option, all channels to the same address share one connection.
    ("grpc.use_local_subchannel_pool", 1),
]


class Connection:
    """A connection to a Triton server. The first call opens the connection.

    Attributes:
        stub: starts calls with one request and one response.
        start_stream: starts a call of ModelStreamInfer with one request and several responses.
        num_calls: the number of running calls.
    """

    def __init__(self, url: str) -> None:
        """Create a connection to the gRPC server `url` (HOST:PORT). The first call connects."""
        self._channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # A ModelStreamInfer call can contain many requests, but the frontend sends only one.
        # `unary_stream` sends the metadata, the request and the end of the request stream in one
        # operation. The stub's own method for ModelStreamInfer would need three operations and an
        # additional task. The server receives the same bytes in both cases.
        self.start_stream = self._channel.unary_stream(
            _STREAM_METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        # `Connections` assigns a client to the connection with the fewest running calls.
        self.num_calls = 0

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


class Connections:
    """Several connections to a Triton server, so that one client does not delay other clients.

    A connection sends the requests of its calls one after the other. If a client starts 200 calls
    with long prompts on a connection, the next call on this connection waits for more than a
    second.

    All running calls of a client use the same connection. A client without running calls gets the
    connection with the fewest running calls.

    Example: client A has 200 calls on the first connection. The first call of client B uses the
    second connection.

    By default, gRPC would wait up to two minutes between two attempts to connect. The options of
    these connections limit this time to one second.

    Args:
        url: host:port of the server's gRPC endpoint.
    """

    def __init__(self, url: str) -> None:
        self._connections = [Connection(url) for _ in range(_NUM_CONNECTIONS)]
        self._of_client: dict[str, Connection] = {}
        self._num_calls: Counter[str] = Counter()

    def start_call(self, client: str) -> Connection:
        """Return the connection for a new call of a client.

        All running calls of a client share one connection. For the first of these calls, the
        connection with the fewest calls is selected.

        Mutates: the connection of the client, and the numbers of calls.

        The caller must call `end_call` when the call has ended.
        """
        connection = self._of_client.get(client)
        if connection is None:
            connection = min(self._connections, key=lambda connection: connection.num_calls)
            self._of_client[client] = connection
        connection.num_calls += 1
        self._num_calls[client] += 1
        return connection

    def end_call(self, client: str) -> None:
        """Record that a gRPC call for the client has ended."""
        self._of_client[client].num_calls -= 1
        self._num_calls[client] -= 1
        if not self._num_calls[client]:
            del self._num_calls[client], self._of_client[client]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            await connection.close()
