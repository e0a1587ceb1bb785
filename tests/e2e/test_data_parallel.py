"""Tests of `nereid serve` with two engine processes, one of which is killed."""

import contextlib
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
from backend.serving.fake_server import DEMO
from fakes.live_frontend import wait_for
from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.server.served import ALONE, Served

pytestmark = [pytest.mark.triton, pytest.mark.long]

RESTART_LIMIT_S = 300.0
SHORT_PROMPTS = [[10 + number, 20, 30 + number, 40] for number in range(0, 8, 2)]
LONG_PROMPTS = [[10 + number, 20, 30 + number, 40] * 31 for number in range(1, 8, 2)]
PROMPTS = [prompt for pair in zip(SHORT_PROMPTS, LONG_PROMPTS, strict=True) for prompt in pair]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server():
    flags = ["--data-parallel-size=2", "--served-model-name=chat", "--log-level=warning", *ALONE]
    with Served(arguments=flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected():
    """The texts that a single engine in the test's process generates greedily for `PROMPTS`."""
    engine = Engine(EngineConfig(model=str(DEMO / "chat")))
    params = SamplingParams(**GREEDY, ignore_eos=True)
    texts = [output.outputs[0].text for output in engine.generate(PROMPTS, params)]
    engine.close()
    return texts


def complete(client, prompt):
    fields = {**GREEDY, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model="chat", prompt=prompt, **fields).choices[0].text


def texts(client):
    """Send a request for each of `PROMPTS` at the same time, and return the texts in order."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))


def engines(server, number):
    """Return a list with the engine process of this number. It is empty during a restart."""
    processes = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if "engine_process" in line and f"engine {number}" in line:
                processes.append(child)
    return processes


def is_up(server, number):
    """Return whether the metrics page shows that this engine process accepts requests."""
    page = urllib.request.urlopen(f"{server.openai_url.removesuffix('/v1')}/metrics").read()
    return f'nereid:engine_up{{engine="{number}",model_name="llm"}} 1' in page.decode()


def read_to_the_end(stream):
    """Read a stream to its end. Return the text of its error, or None if it had no error."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return str(error)


def test_both_engines_give_the_tokens_of_one_engine(client, expected):
    assert texts(client) == expected


def test_only_the_streams_of_a_killed_engine_fail_and_its_capacity_comes_back(
    server, client, expected
):
    fields = {"stream": True, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    streams = [
        client.completions.create(model="chat", prompt=[50 + number] * 5, **fields)
        for number in range(8)
    ]
    for stream in streams:
        next(stream)  # each stream has begun

    (killed,) = engines(server, number=1)
    killed.kill()

    with ThreadPoolExecutor(len(streams)) as pool:
        errors = list(pool.map(read_to_the_end, streams))
    assert errors.count(None) == len(streams) // 2  # the streams of the engine 0
    assert all("the engine process ended (signal 9)" in error for error in errors if error)
    assert texts(client) == expected
    wait_for(lambda: "restarting the engine 1 (attempt 1 of 3)" in server.output)
    wait_for(lambda: engines(server, number=1) not in ([], [killed]), RESTART_LIMIT_S)
    wait_for(lambda: is_up(server, 1), RESTART_LIMIT_S)
    assert texts(client) == expected
