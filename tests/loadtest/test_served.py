"""Tests of the ports on which tests and benchmarks start their servers."""

import socket

from loadtest.server import served
from loadtest.server.served import free_ports


def test_a_port_is_not_given_again_before_its_server_listens():
    ports = [port for _ in range(2000) for port in free_ports(2)]
    assert len(set(ports)) == len(ports)


def test_a_port_on_which_a_server_listens_is_left_out(monkeypatch):
    [free] = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(served, "_PORTS", iter([server.getsockname()[1], free]))
        assert free_ports(1) == [free]
