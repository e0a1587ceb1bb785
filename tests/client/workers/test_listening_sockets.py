"""Tests of the sockets on which the frontend waits for connections."""

import asyncio
import socket

import pytest
import uvloop
from nereid_client.frontend_process import run_frontend
from nereid_client.settings import Settings, SettingsError
from nereid_client.workers.listening_sockets import listening_sockets

_NUM_CONNECTIONS = 64


async def _iterations_until_accepted(sockets):
    """Connect 64 clients at once, and return how many event-loop iterations accept all of them."""
    for listening_socket in sockets:
        listening_socket.listen(2048)
        listening_socket.setblocking(False)
    accepted = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.append(transport)

    address = sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(_NUM_CONNECTIONS)]
    create_server = asyncio.get_running_loop().create_server
    servers = [await create_server(Protocol, sock=bound_socket) for bound_socket in sockets]

    num_iterations = 0
    while len(accepted) < _NUM_CONNECTIONS:
        await asyncio.sleep(0)
        num_iterations += 1

    for closable in [*servers, *accepted, *clients]:
        closable.close()
    return num_iterations


def test_a_burst_of_connections_is_accepted_in_a_few_iterations_of_the_event_loop():
    one, *duplicates = listening_sockets("127.0.0.1", 0)
    assert uvloop.run(_iterations_until_accepted([one, *duplicates])) < 16


def test_an_address_that_is_in_use_is_reported_with_the_setting():
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(port=other.getsockname()[1])
        with pytest.raises(SettingsError, match="NEREID_OPENAI_PORT"):
            run_frontend(settings)


def test_a_host_name_gives_sockets_for_each_of_its_addresses():
    sockets = listening_sockets("localhost", 0)
    hosts = {each_socket.getsockname()[0] for each_socket in sockets}
    expected = {info[4][0] for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    assert hosts == expected
    for each_socket in sockets:
        each_socket.close()
