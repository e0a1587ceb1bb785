"""Tests that the engine stops a request and frees its cache blocks when the client disconnects."""

import asyncio
import json
import socket

import openai
import pytest
from e2e.gauges_page import is_busy, is_idle, num_given_up, wait_until_given_up
from e2e.triton_client import ask, tensor
from fakes.live_frontend import wait_for

pytestmark = pytest.mark.triton

ENDLESS = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}


def endless(stream=True, **fields):
    """Return the tensors of a request that generates 3000 tokens, unless it is cancelled."""
    return [
        tensor("text_input", "For ever and"),
        tensor("stream", stream, "BOOL"),
        tensor("sampling_parameters", json.dumps(ENDLESS | fields)),
    ]


@pytest.fixture
def num_before(gauge):
    """The number of requests whose clients disconnected during earlier tests."""
    wait_for(lambda: is_idle(gauge))
    return num_given_up(gauge)


def test_a_cancelled_grpc_stream_stops_the_sequence(served, gauge, num_before):
    reply = asyncio.run(ask(served.grpc_url, endless(), cancel_when=lambda _: is_busy(gauge)))
    assert 0 < len(reply.deltas) < 1000
    assert not reply.finish_reasons
    wait_until_given_up(gauge, num_before)


def test_cancelling_ends_all_of_a_requests_answers(served, gauge, num_before):
    inputs = endless(n=4, temperature=1)
    reply = asyncio.run(ask(served.grpc_url, inputs, cancel_when=lambda _: is_busy(gauge)))
    assert not reply.finish_reasons
    wait_until_given_up(gauge, num_before)


def test_a_cancelled_request_that_does_not_stream_stops_too(served, gauge, num_before):
    async def give_up():
        task = asyncio.create_task(ask(served.grpc_url, endless(stream=False)))
        while not await asyncio.to_thread(is_busy, gauge):
            assert not task.done()
        task.cancel()

    asyncio.run(give_up())
    wait_until_given_up(gauge, num_before)


def post(connection, endpoint, sampling_parameters, **fields):
    """Send a prompt to an endpoint of Triton, but do not wait for the answer."""
    fields["sampling_parameters"] = json.dumps(sampling_parameters)
    body = json.dumps({"text_input": "For ever", **fields})
    head = f"POST /v2/models/llm/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())


def test_a_dropped_http_stream_stops_the_sequence(served, gauge, num_before):
    with socket.create_connection(("127.0.0.1", served.http_port), timeout=60) as connection:
        post(connection, "generate_stream", ENDLESS, stream=True)
        assert b"200 OK" in connection.recv(4096)
        while not is_busy(gauge):
            assert connection.recv(4096)
    wait_until_given_up(gauge, num_before)


def test_a_dropped_http_answer_in_one_piece_is_bounded_by_its_timeout(served, gauge):
    """The engine stops such a request at its `timeout`.

    Triton's HTTP endpoint `generate` does not notice that the client has disconnected.
    """
    num_timed_out = gauge("requests_timed_out_total")
    with socket.create_connection(("127.0.0.1", served.http_port), timeout=60) as connection:
        post(connection, "generate", ENDLESS | {"timeout": 1.0})
        # The request may time out before the metrics page has shown a running request.
        wait_for(lambda: is_busy(gauge) or gauge("requests_timed_out_total") > num_timed_out)
    wait_for(lambda: is_idle(gauge) and gauge("requests_timed_out_total") == num_timed_out + 1)


def test_a_dropped_openai_stream_stops_the_sequence(served, gauge, num_before):
    with openai.OpenAI(base_url=served.openai_url, api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "For ever"}],
            stream=True,
            max_tokens=3000,
            extra_body={"ignore_eos": True},
        )

        for _ in stream:
            if is_busy(gauge):
                break
        stream.close()
    wait_until_given_up(gauge, num_before)


def test_many_requests_that_are_cancelled_at_once_all_stop(served, gauge, num_before):
    async def ask_and_cancel(num_deltas):
        await ask(
            served.grpc_url, endless(), cancel_when=lambda reply: len(reply.deltas) > num_deltas
        )

    async def ask_16_times():
        await asyncio.gather(*(ask_and_cancel(num_deltas) for num_deltas in range(16)))

    asyncio.run(ask_16_times())
    wait_until_given_up(gauge, num_before, number=16)
