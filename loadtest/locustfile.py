"""Scenarios: users who chat, call tools, search, cancel, read slowly, or send bad requests.

    nereid serve &
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000            # with a web page
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000 --headless -u 11 -r 11 -t 2m
    locust -f loadtest/locustfile.py SteadyChat Bursts --host ...            # only two scenarios

Each class is one scenario. The method `asks` returns requests that are all sent at the same moment.
The attribute `arrivals` defines the times at which `asks` is called. Each user of a class sends
requests at the rate of the class, so twice as many users (`-u`) mean twice the load. The option
`--arrivals poisson --rate 2` replaces all arrival processes: each user sends 2 requests per second,
independently of the answers. With `--arrivals closed`, each user sends the next request after the
answer to the previous request.

Locust's tables contain one line for each scenario, and the lines `TTFT` (time to the first chunk
with text) and `ITL` (mean time between two chunks of a stream). Sampling is greedy, so each
request has one correct answer: the first answer to the same request. The module load/check_reply.py
lists the possible faults of an answer. `make loadtest` starts servers and runs all scenarios.
"""

import sys
from pathlib import Path

from locust import events  # noqa: F401 - imported first, because locust replaces the sockets

# `locust -f` adds only this file's folder to `sys.path`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtest.client.traffic import WEATHER_TOOL, structured
from loadtest.load.arrivals import Closed, Constant, Poisson
from loadtest.load.load_requests import (
    Ask,
    bad,
    chat,
    chat_at_once,
    completion,
    embedding,
    generate_stream,
    grpc_chat,
    grpc_text,
    rerank,
)
from loadtest.load.load_user import LoadUser
from loadtest.load.prompts import Question

_GUIDE = "You are a guide to the town of Pinemark and know all of its streets. " * 12
_LONG = "The road from Pinemark to Korvale is long, and every mile of it has a story. " * 60
_TEXTS = ["Hugo lives in Pinemark.", "Paris is a city.", "Turtles are slow.", "Korvale is far."]


class SteadyChat(LoadUser):
    """Short questions at random times. A third of the requests are not streamed."""

    arrivals = Poisson(2.0)

    def asks(self) -> list[Ask]:
        """Return one chat request."""
        if self.rng.random() < 1 / 3:
            return [chat_at_once(self.question(), self.options.max_tokens)]
        return [chat(self.question(), self.options.max_tokens, ignore_eos=True)]


class Bursts(LoadUser):
    """Twelve requests at the same moment, every five seconds."""

    arrivals = Constant(0.2)

    def asks(self) -> list[Ask]:
        """Return twelve chat requests with random numbers of output tokens."""
        lengths = [self.rng.choice((8, 32, 64)) for _ in range(12)]
        return [chat(self.question(), length, ignore_eos=True) for length in lengths]


class LongPrompts(LoadUser):
    """Prompts of about a thousand tokens with short answers."""

    arrivals = Closed(1.0, 3.0)

    def asks(self) -> list[Ask]:
        """Return one chat request with a long prompt.

        The prompt starts with a random digit, so that few prompts share a prefix.
        """
        system = f"{self.rng.randrange(10)}. {_LONG}"
        return [chat(self.question(), 16, system=system, ignore_eos=True)]


class SharedPrefixes(LoadUser):
    """Questions after a long system prompt that is the same in all requests."""

    arrivals = Poisson(1.5)

    def asks(self) -> list[Ask]:
        """Return one chat request."""
        return [chat(self.question(), 24, system=_GUIDE, ignore_eos=True)]


class Writers(LoadUser):
    """Text completions through the OpenAI API and both endpoints of the Triton server."""

    arrivals = Poisson(1.5)

    def asks(self) -> list[Ask]:
        """Return one completion request for a random endpoint."""
        send = self.rng.choice((completion, generate_stream, grpc_text))
        return [send(self.question(), self.options.max_tokens, ignore_eos=True)]


class GrpcChat(LoadUser):
    """Chats through the gRPC endpoint of the ensemble."""

    arrivals = Poisson(2.0)

    def asks(self) -> list[Ask]:
        """Return one chat request."""
        return [grpc_chat(self.question(), self.options.max_tokens, ignore_eos=True)]


class Agents(LoadUser):
    """Required tool calls, and JSON that must match a schema.

    This scenario needs a real language model.
    """

    arrivals = Poisson(1.0)

    def asks(self) -> list[Ask]:
        """Return a request for a tool call and a request for JSON, like two steps of an agent."""
        weather = Question("What is the weather in Paris?")
        return [
            chat(weather, 96, tools=[WEATHER_TOOL], tool_choice="required"),
            chat(Question("Describe a pet."), 96, **structured()),
        ]


class Searchers(LoadUser):
    """Embeddings and reranking at the same time.

    This scenario needs an embedding model and a reranker.
    """

    arrivals = Constant(1.0)

    def asks(self) -> list[Ask]:
        """Return an embedding request and a rerank request with the same query."""
        query = self.question().text
        return [
            embedding(self.options.embedding_model, [query, *_TEXTS]),
            rerank(self.options.rerank_model, query, _TEXTS),
        ]


class Fickle(LoadUser):
    """Long answers. Three of ten clients cancel at a random time."""

    arrivals = Poisson(2.0)
    cancel_share = 0.3

    def asks(self) -> list[Ask]:
        """Return one chat request for a random protocol, HTTP or gRPC."""
        send = self.rng.choice((chat, grpc_chat))
        return [send(self.question(), 120, ignore_eos=True)]


class SlowReaders(LoadUser):
    """Clients that read slowly and have small buffers."""

    arrivals = Closed(0.5, 1.5)

    def asks(self) -> list[Ask]:
        """Return one chat request for HTTP and one for gRPC."""
        asks = [
            chat(self.question(), 80, ignore_eos=True),
            grpc_chat(self.question(), 60, ignore_eos=True),
        ]
        return [ask.read_slowly(self.rng.uniform(0.02, 0.1)) for ask in asks]


class Mistaken(LoadUser):
    """Invalid requests that must be rejected, mixed with valid requests."""

    arrivals = Constant(2.0)

    def asks(self) -> list[Ask]:
        """Return an invalid request and a valid request."""
        question = self.question()
        valid = chat(question, 8, ignore_eos=True)
        valid_requests = [valid, chat_at_once(question, 8), completion(question, 8)]
        invalid_requests = [
            bad(self.rng.choice(valid_requests), temperature=-1),
            bad(self.rng.choice(valid_requests), max_tokens=0),
            bad(self.rng.choice(valid_requests), stop=5),
            bad(valid, messages=[]),
            bad(valid, tool_choice="required"),
            bad(valid, response_format={"type": "json_schema", "json_schema": {"schema": 3}}),
            bad(valid, messages=[{"role": "user", "content": "much too long " * 4000}]),
            bad(valid, status=404, model="no such model"),
            bad(generate_stream(question, 8), sampling_parameters="{not JSON"),
            bad(grpc_text(question, 8), sampling_parameters='{"temperature": -1}'),
            Ask("openai", "/v1/chat/completions", "{not JSON", refused_with=400),
        ]
        return [self.rng.choice(invalid_requests), valid]
