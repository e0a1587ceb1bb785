# SPDX-License-Identifier: Apache-2.0
"""The scenarios: people who chat, call tools, search, go away, read slowly, and get things wrong.

    nereid serve &
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000            # with its web page
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000 --headless -u 11 -r 11 -t 2m
    locust -f loadtest/locustfile.py SteadyChat Bursts --host ...            # only these

Each class is one scenario: `asks` says what it sends, all at the same moment, and `arrivals` when.
Every user of a class brings the class's rate with it, so `-u` twice the number of classes is twice
the load. `--arrivals poisson --rate 2` replaces all arrivals: 2 requests a second from each user,
whatever the answers take; `--arrivals closed` sends one after the other.

Beside each scenario's own lines locust's tables have `TTFT`, the time to the first piece that says
something, and `ITL`, the mean time between two pieces of a stream. All is greedy, so each request
has one right answer: the first one that it got. load/check_reply.py tells in which ways an answer
can be wrong. `make loadtest` runs all of this on a server of its own: loadtest/load/load.py.
"""

import sys
from pathlib import Path

from locust import events  # noqa: F401 - locust comes first: it replaces sockets and threads by gevent's

# `locust -f` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Pinemark", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_PET = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class SteadyChat(LoadUser):
    """Short questions at random times; a third wants the answer in one piece."""

    arrivals = Poisson(2.0)

    def asks(self) -> list[Ask]:
        """One chat."""
        if self.rng.random() < 1 / 3:
            return [chat_at_once(self.question(), self.options.max_tokens)]
        return [chat(self.question(), self.options.max_tokens, ignore_eos=True)]


class Bursts(LoadUser):
    """Nothing for five seconds, then a dozen at once."""

    arrivals = Constant(0.2)

    def asks(self) -> list[Ask]:
        """A dozen answers of different lengths."""
        lengths = [self.rng.choice((8, 32, 64)) for _ in range(12)]
        return [chat(self.question(), length, ignore_eos=True) for length in lengths]


class LongPrompts(LoadUser):
    """A prompt of a thousand tokens and a short answer."""

    arrivals = Closed(1.0, 3.0)

    def asks(self) -> list[Ask]:
        """One that no other has asked before it: the number in front leaves no prefix to share."""
        system = f"{self.rng.randrange(10)}. {_LONG}"
        return [chat(self.question(), 16, system=system, ignore_eos=True)]


class SharedPrefixes(LoadUser):
    """Questions behind a prompt that all have in common."""

    arrivals = Poisson(1.5)

    def asks(self) -> list[Ask]:
        """One chat."""
        return [chat(self.question(), 24, system=_GUIDE, ignore_eos=True)]


class Writers(LoadUser):
    """Texts continued, at the OpenAI API and at both doors of the Triton server."""

    arrivals = Poisson(1.5)

    def asks(self) -> list[Ask]:
        """One text."""
        send = self.rng.choice((completion, generate_stream, grpc_text))
        return [send(self.question(), self.options.max_tokens, ignore_eos=True)]


class GrpcChat(LoadUser):
    """Chats on the ensemble itself."""

    arrivals = Poisson(2.0)

    def asks(self) -> list[Ask]:
        """One chat."""
        return [grpc_chat(self.question(), self.options.max_tokens, ignore_eos=True)]


class Agents(LoadUser):
    """Calls that must be made and JSON that must fit its schema; needs a model."""

    arrivals = Poisson(1.0)

    def asks(self) -> list[Ask]:
        """A tool call and a pet, as one agent's two steps."""
        wrapped = {"name": "pet", "schema": _PET, "strict": True}
        form = {"type": "json_schema", "json_schema": wrapped}
        weather = Question("What is the weather in Paris?")
        return [
            chat(weather, 96, tools=[_WEATHER], tool_choice="required"),
            chat(Question("Describe a pet."), 96, response_format=form),
        ]


class Searchers(LoadUser):
    """Embeds and reranks at the same time; needs both models."""

    arrivals = Constant(1.0)

    def asks(self) -> list[Ask]:
        """Vectors and scores, of one query."""
        query = self.question().text
        return [
            embedding(self.options.embedding_model, [query, *_TEXTS]),
            rerank(self.options.rerank_model, query, _TEXTS),
        ]


class Fickle(LoadUser):
    """Long answers; three clients in ten go away at a random time."""

    arrivals = Poisson(2.0)
    cancel_share = 0.3

    def asks(self) -> list[Ask]:
        """One chat, over HTTP or gRPC."""
        send = self.rng.choice((chat, grpc_chat))
        return [send(self.question(), 120, ignore_eos=True)]


class SlowReaders(LoadUser):
    """Read what has come only now and then, from small buffers."""

    arrivals = Closed(0.5, 1.5)

    def asks(self) -> list[Ask]:
        """One over each protocol."""
        asks = [
            chat(self.question(), 80, ignore_eos=True),
            grpc_chat(self.question(), 60, ignore_eos=True),
        ]
        return [ask.read_slowly(self.rng.uniform(0.02, 0.1)) for ask in asks]


class Mistaken(LoadUser):
    """Requests that must be refused by what is wrong with them, between others that must not."""

    arrivals = Constant(2.0)

    def asks(self) -> list[Ask]:
        """One bad request and a good one."""
        question = self.question()
        good = chat(question, 8, ignore_eos=True)
        everywhere = [good, chat_at_once(question, 8), completion(question, 8)]
        wrong = [
            bad(self.rng.choice(everywhere), temperature=-1),
            bad(self.rng.choice(everywhere), max_tokens=0),
            bad(self.rng.choice(everywhere), stop=5),
            bad(good, messages=[]),
            bad(good, tool_choice="required"),
            bad(good, response_format={"type": "json_schema", "json_schema": {"schema": 3}}),
            bad(good, messages=[{"role": "user", "content": "much too long " * 4000}]),
            bad(good, status=404, model="no such model"),
            bad(generate_stream(question, 8), sampling_parameters="{not JSON"),
            bad(grpc_text(question, 8), sampling_parameters='{"temperature": -1}'),
            Ask("openai", "/v1/chat/completions", "{not JSON", refused_with=400),
        ]
        return [self.rng.choice(wrong), good]
