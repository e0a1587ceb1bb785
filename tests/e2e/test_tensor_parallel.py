"""Tests of `nereid serve --tensor-parallel-size=2`. The tests kill the process of one rank."""

import contextlib

import openai
import psutil
import pytest
from fakes.live_frontend import wait_for

from loadtest.server.served import ALONE, Served

pytestmark = [pytest.mark.triton, pytest.mark.long]

QUESTION = [{"role": "user", "content": "Hello! Who are you?"}]
RESTART_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def server():
    flags = ["--tensor-parallel-size=2", "--served-model-name=chat", "--log-level=warning", *ALONE]
    with Served(arguments=flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0)


def ask(client, **fields):
    return client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, **fields)


def answer(client):
    return ask(client).choices[0].message.content


def ranks(server):
    """Return the processes of all ranks except rank 0."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "nereid_backend.parallel.rank_process" in _line(child)]


def _line(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def answers(client):
    """Return whether the server answers. While the engine restarts, requests fail."""
    with contextlib.suppress(openai.APIStatusError):
        return bool(answer(client))
    return False


def test_a_stream_fails_when_a_rank_dies_and_the_engine_is_restarted(server, client):
    expected = answer(client)
    stream = ask(client, stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(stream)
    (rank,) = ranks(server)
    rank.kill()
    with pytest.raises(openai.APIError, match=r"rank 1 of the model ended \(signal 9\)"):
        list(stream)
    wait_for(lambda: answers(client), RESTART_LIMIT_S)
    assert answer(client) == expected


def test_a_rank_that_dies_without_requests_is_replaced_before_the_next_request(server, client):
    (killed_rank,) = ranks(server)
    killed_rank.kill()
    wait_for(lambda: "rank 1 of the model ended" in server.output)
    wait_for(lambda: any(rank.pid != killed_rank.pid for rank in ranks(server)), RESTART_LIMIT_S)
    wait_for(lambda: answers(client), RESTART_LIMIT_S)


def test_the_end_of_the_server_ends_all_ranks(server):
    (rank,) = ranks(server)
    assert server.stop() == 0
    assert not rank.is_running()
