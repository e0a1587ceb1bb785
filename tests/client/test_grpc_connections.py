"""Tests of how the frontend divides its gRPC connections among clients."""

import pytest
from nereid_client.grpc_connections import Connections

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connections():
    opened = Connections("127.0.0.1:1")
    yield opened
    await opened.close()


async def test_calls_of_one_client_share_a_connection_that_no_other_client_uses(connections):
    flood = {id(connections.start_call("a")) for _ in range(200)}
    assert len(flood) == 1
    others = {id(connections.start_call(client)) for client in ("b", "c", "d")}
    assert len(others) == 3
    assert not flood & others


async def test_a_client_that_comes_later_avoids_the_connection_with_many_calls(connections):
    flood = {id(connections.start_call("a")) for _ in range(200)}
    later = {id(connections.start_call(str(number))) for number in range(50)}
    assert not flood & later


async def test_a_client_without_calls_frees_its_connection(connections):
    first = connections.start_call("a")
    for client in ("b", "c", "d"):
        connections.start_call(client)
    connections.end_call("a")
    assert connections.start_call("e") is first
