"""Tests of the frontend's HTTP protocol class: limits on headers and unread responses."""

import asyncio
import socket
from contextlib import suppress

import pytest
import uvicorn
from nereid_client.middleware.http_protocol import protocol_class

pytestmark = pytest.mark.anyio

LARGE_BYTES = 30_000_000  # more than fits into the socket's buffers


@pytest.fixture
def state():
    """The state object of the server, which contains the open connections."""
    return uvicorn.server.ServerState()


@pytest.fixture
def disconnects():
    """A queue with one message for each request to `/wait` whose client has disconnected."""
    return asyncio.Queue()


async def read_body(receive):
    """Receive all messages of a request, and return its complete body."""
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    return body


async def answer(send, body):
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_without_length(send, body):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port(state, disconnects):
    """The port of a server that answers each request with the number of the request's headers.

    The server answers `/large` with a large response, and `/echo` with the body of the request and
    without a Content-Length. The server never answers `/wait`.
    """

    async def app(scope, receive, send):
        request_body = await read_body(receive)
        if scope["path"] == "/wait":
            disconnects.put_nowait(await receive())
        elif scope["path"] == "/echo":
            await answer_without_length(send, request_body)
        elif scope["path"] == "/large":
            await answer(send, b"a" * LARGE_BYTES)
        else:
            await answer(send, str(len(scope["headers"])).encode())

    http = protocol_class(timeout_s=0.3, unread_s=1.0)
    config = uvicorn.Config(app, http=http, lifespan="off", log_level="error")
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: config.http_protocol_class(config, state, {}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def exchange(port, *parts, pause_s=0.0):
    """Send parts on one connection, and return all bytes until the server closes the connection.

    Raises: TimeoutError if the server does not close the connection within 5 s.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


GET = b"GET / HTTP/1.1\r\nhost: a\r\n"


async def test_a_connection_without_a_request_is_closed(port):
    assert await exchange(port) == b""


async def test_headers_that_take_too_long_close_the_connection(port):
    assert await exchange(port, GET, b"a: b\r\n") == b""


async def test_headers_without_an_end_are_a_431(port):
    answer = await exchange(port, GET + b"a: " + b"b" * 70_000)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_second_request_on_a_connection_has_a_limit_of_its_own(port):
    answer = await exchange(port, GET + b"\r\n", GET + b"\r\n", b"GET / HT", pause_s=0.2)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_the_time_between_two_requests_is_not_limited(port):
    close = GET + b"connection: close\r\n\r\n"
    answer = await exchange(port, GET + b"\r\n", close, pause_s=0.7)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_a_large_body_does_not_count_as_headers(port):
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 300000\r\n\r\n"
    answer = await exchange(port, head + b" " * 150_000, b" " * 150_000)
    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_too_many_headers_are_a_400(port):
    answer = await exchange(port, GET + b"a: b\r\n" * 300 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_trailer_after_the_body_does_not_become_a_header(port):
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"2\r\n{}\r\n0\r\nauthorization: Bearer key\r\nx-client-id: other\r\n\r\n"
    answer = await exchange(port, head + body)
    assert answer.endswith(b"\r\n\r\n3")  # the number of headers


@pytest.mark.parametrize("start", [b"0\r\na: ", b"5;a="], ids=["trailers", "chunk extension"])
async def test_headers_without_an_end_inside_a_body_close_the_connection(port, start):
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await exchange(port, head + start, b"b" * 70_000, pause_s=0.1)
    assert answer == b""


async def open_large_response(port, connection=b"keep-alive"):
    """Request a large response, and return the socket on which the response arrives."""
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: " + connection + b"\r\n\r\n")
    client.setblocking(False)
    return client


async def wait_for_connections(state, number):
    """Wait until the server has exactly `number` open connections."""
    async with asyncio.timeout(10):
        while len(state.connections) != number:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_a_whole_response_that_nobody_reads_closes_the_connection(port, state, connection):
    with await open_large_response(port, connection):
        await wait_for_connections(state, 1)
        await wait_for_connections(state, 0)


async def test_a_client_that_reads_slowly_gets_the_whole_response(port):
    loop = asyncio.get_running_loop()
    with await open_large_response(port) as client:
        num_received = 0
        while num_received < LARGE_BYTES:
            received = len(await loop.sock_recv(client, 2_000_000))
            assert received > 0
            num_received += received
            await asyncio.sleep(0.1)


async def test_a_second_request_after_an_unread_response_does_not_keep_the_connection(port, state):
    with await open_large_response(port) as client:
        await wait_for_connections(state, 1)
        client.send(GET + b"\r\n")
        await wait_for_connections(state, 0)


async def test_the_end_of_a_connection_ends_the_running_request_before_a_waiting_one(
    port, disconnects
):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n" + GET + b"\r\n")
    await asyncio.sleep(0.1)
    writer.close()
    message = await asyncio.wait_for(disconnects.get(), 5)
    assert message == {"type": "http.disconnect"}


async def test_requests_that_are_sent_at_once_are_answered_in_order(port):
    answer = await exchange(port, (GET + b"\r\n") * 99 + GET + b"connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 100


async def test_too_many_requests_at_once_close_the_connection(port):
    with suppress(ConnectionResetError):
        answer = await exchange(port, (GET + b"\r\n") * 10_000)
        assert answer.count(b"HTTP/1.1 200 OK") <= 101


@pytest.mark.parametrize(
    "damaged", [b"garbage", b"GET http:// HTTP/1.1\r\nhost: a", b"CONNECT a:1 HTTP/1.1\r\nhost: a"]
)
async def test_a_damaged_request_adds_nothing_to_the_response_of_the_running_one(port, damaged):
    running = b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n"
    assert await exchange(port, running, damaged + b"\r\n\r\n") == b""


async def test_a_damaged_body_is_a_400(port):
    head = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await exchange(port, head, b"no number\r\n", pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_a_request_that_asks_for_another_protocol_keeps_its_body(port, protocol):
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: " + protocol
    head = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n" + upgrade + b"\r\n\r\n"
    close = GET + b"connection: close\r\n\r\n"
    answer = await exchange(port, head + b"bo", b"dy" + head + b"body" + close, pause_s=0.1)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"\r\n\r\n4\r\nbody\r\n0\r\n\r\n") == 2


@pytest.mark.parametrize("target", [b"/echo", b"*", b"a:443"])
async def test_a_request_for_a_tunnel_is_a_400(port, target):
    answer = await exchange(port, b"CONNECT " + target + b" HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_many_requests_that_ask_for_another_protocol_close_the_connection(port, state):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n") * 3_000)
    await wait_for_connections(state, 1)
    await wait_for_connections(state, 0)
    writer.close()


async def test_a_response_with_http_1_0_has_no_chunks(port):
    head = b"POST /echo HTTP/1.0\r\ncontent-length: 4\r\nconnection: keep-alive\r\n\r\n"
    answer = await exchange(port, head + b"body")
    assert answer.endswith(b"\r\n\r\nbody")
    assert b"transfer-encoding" not in answer
