"""Tests of the frontend, run as the program `python -m nereid_client`."""

import http.client
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from fakes.live_frontend import wait_for
from fakes.otlp_receiver import receive_spans

from loadtest.server.served import free_ports


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def answers(connection):
    connection.request("GET", "/health")
    return connection.getresponse().read()


def test_an_idle_connection_stays_open_longer_than_clients_keep_it():
    port, unused_port = free_ports(2)
    flags = ["--port", str(port), "--grpc-url", f"127.0.0.1:{unused_port}"]
    with subprocess.Popen([sys.executable, "-m", "nereid_client", *flags]) as program:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            wait_for(lambda: listens(port), timeout_s=120)
            assert answers(connection)
            time.sleep(6)  # httpx closes a connection that has been idle for 5 seconds
            assert answers(connection)
        finally:
            connection.close()
            program.terminate()


def test_the_spans_of_the_last_requests_are_exported_after_sigterm():
    port, unused_port = free_ports(2)
    flags = ["--port", str(port), "--grpc-url", f"127.0.0.1:{unused_port}"]
    command = [sys.executable, "-m", "nereid_client", *flags]
    with receive_spans() as collector:
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with subprocess.Popen(command, env=environment) as program:
            wait_for(lambda: listens(port), timeout_s=120)
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/tokenize", "{}")
            assert connection.getresponse().status == 400
            connection.close()
            program.terminate()
            assert program.wait(60) == 0
        assert [span.name for span in collector.spans] == ["POST /tokenize"]
