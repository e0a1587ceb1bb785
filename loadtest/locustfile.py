# SPDX-License-Identifier: Apache-2.0
"""Load on a served stack, with locust: people who chat, call tools, embed, rerank, and go away.

    nereid serve &
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000            # with its web page
    locust -f loadtest/locustfile.py --host http://127.0.0.1:9000 --headless -u 8 -r 4 -t 2m

Beside each request's own line the tables have two more kinds: `TTFT`, the time to the first event
that says something, and `ITL`, the mean time between two events of a stream. Everything runs at
temperature 0, so an answer that differs from the first one to the same request is a failure; so is
a stream without an end. A 429 or 503 counts as a failure by that name, and is waited out.

Users arrive in a closed loop. `--rate R` makes it an open one: each user sends R requests a second,
whatever the answers take (as long as there are users left to send them).
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from locust import HttpUser, between, constant_throughput, events, task
from locust.argument_parser import LocustArgumentParser
from locust.clients import ResponseContextManager

Json = dict[str, Any]

_QUESTIONS = (
    "Hello! Who are you?",
    "Where does Hugo live?",
    "Tell me a story about a turtle.",
    "What is 3 + 4?",
)
_SHARED = "You are a guide to the town of Pinemark and know all of its streets. " * 12
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Pinemark"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_first_answers: dict[str, str] = {}


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests/s of each user; 0: closed"
    )
    parser.add_argument("--embedding-model", default="embed", help="its name in the API")
    parser.add_argument("--rerank-model", default="rerank", help="its name in the API")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")


class Person(HttpUser):
    """What all users have in common."""

    abstract = True
    _patience = between(0.0, 0.5)

    def wait_time(self) -> float:
        """Seconds until the next request."""
        rate = self.environment.parsed_options.rate
        chosen = constant_throughput(rate) if rate else type(self)._patience
        return float(chosen(self))

    def stream(self, name: str, path: str, body: Json, stop_after: int | None = None) -> None:
        """One streamed answer, read to its end, or given up after so many events."""
        started = time.perf_counter()
        times: list[float] = []
        pieces: list[str] = []
        with self._post(name, path, {**body, "stream": True}, stream=True) as response:
            if self._is_refused(response):
                return
            has_ended = False
            for event in _events(response):
                if "error" in event:
                    response.failure(f"error event: {event['error']['message'][:100]}")
                    return
                for choice in event["choices"]:
                    delta = choice.get("delta", choice)
                    pieces.append(_said(delta))
                    if pieces[-1]:
                        times.append(time.perf_counter())
                    has_ended |= bool(choice.get("finish_reason"))
                if stop_after is not None and len(times) >= stop_after:
                    response.success()
                    response.close()
                    return
            self._judge(response, path, body, "".join(pieces), has_ended)
        self._report(name, started, times)

    def whole(self, name: str, path: str, body: Json, read: Callable[[Json], str]) -> None:
        """One answer in one piece."""
        with self._post(name, path, body) as response:
            if not self._is_refused(response):
                self._judge(response, path, body, read(response.json()), has_ended=True)

    def _post(self, name: str, path: str, body: Json, **options: bool) -> ResponseContextManager:
        return self.client.post(path, json=body, name=name, catch_response=True, **options)

    def _is_refused(self, response: ResponseContextManager) -> bool:
        if response.status_code == 200:
            return False
        response.failure(f"{response.status_code} {response.text[:100]}")
        if response.status_code in (429, 503):
            time.sleep(float(response.headers.get("Retry-After", "1")))
        return True

    def _judge(
        self, response: ResponseContextManager, path: str, body: Json, text: str, has_ended: bool
    ) -> None:
        expected = _first_answers.setdefault(f"{path} {json.dumps(body, sort_keys=True)}", text)
        if not has_ended:
            response.failure("the stream ended without a finish reason")
        elif text != expected:
            response.failure("the answer differs from the first one to this request")
        else:
            response.success()

    def _report(self, name: str, started: float, times: list[float]) -> None:
        fire = self.environment.events.request.fire
        common = {"name": name, "response_length": 0, "exception": None, "context": {}}
        if times:
            fire(request_type="TTFT", response_time=(times[0] - started) * 1000, **common)
        if len(times) > 1:
            mean = (times[-1] - times[0]) / (len(times) - 1)
            fire(request_type="ITL", response_time=mean * 1000, **common)

    def _chat(self, question: str, system: str = "", **fields: object) -> Json:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        limit = self.environment.parsed_options.max_tokens
        return {"messages": messages, "temperature": 0, "max_tokens": limit, **fields}


class Chatter(Person):
    """Chats, sometimes behind a long prompt that others share."""

    weight = 5

    @task(3)
    def short(self) -> None:
        """A short question."""
        body = self._chat(random.choice(_QUESTIONS), ignore_eos=True)
        self.stream("chat", "/v1/chat/completions", body)

    @task
    def with_a_shared_prefix(self) -> None:
        """A question behind a prompt that is the same for all."""
        body = self._chat(random.choice(_QUESTIONS), _SHARED)
        self.stream("chat, shared prefix", "/v1/chat/completions", body)

    @task
    def at_once(self) -> None:
        """The same without a stream."""
        body = self._chat(random.choice(_QUESTIONS))
        self.whole("chat, whole", "/v1/chat/completions", body, _content)


class Writer(Person):
    """Has texts continued."""

    weight = 2

    @task
    def complete(self) -> None:
        """One completion."""
        limit = self.environment.parsed_options.max_tokens
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": limit}
        self.stream("completion", "/v1/completions", body)


class Agent(Person):
    """Calls tools and wants JSON."""

    weight = 2

    @task
    def tool(self) -> None:
        """A call that must be made."""
        body = self._chat("Weather in Paris?", tools=[_TOOL], tool_choice="required")
        self.stream("tools", "/v1/chat/completions", body)

    @task
    def structured(self) -> None:
        """An answer that fits a schema."""
        wrapped = {"name": "pet", "schema": _SCHEMA, "strict": True}
        form = {"type": "json_schema", "json_schema": wrapped}
        body = self._chat("Describe a pet.", response_format=form)
        self.stream("structured", "/v1/chat/completions", body)


class Searcher(Person):
    """Embeds and reranks."""

    weight = 2

    @task
    def embed(self) -> None:
        """Two vectors."""
        name = self.environment.parsed_options.embedding_model
        body = {"model": name, "input": list(_QUESTIONS[:2])}
        self.whole("embedding", "/v1/embeddings", body, lambda answer: f"{len(answer['data'])}")

    @task
    def rerank(self) -> None:
        """Four documents in order."""
        name = self.environment.parsed_options.rerank_model
        body = {"model": name, "query": "Hugo?", "documents": list(_QUESTIONS)}
        self.whole("rerank", "/v1/rerank", body, _order)


class Fickle(Person):
    """Goes away in the middle of an answer."""

    weight = 3
    _patience = between(0.0, 0.2)
    _fields: ClassVar[Json] = {"max_tokens": 2000, "ignore_eos": True}

    @task
    def leave(self) -> None:
        """A long answer, of which only the beginning is read."""
        body = self._chat(random.choice(_QUESTIONS), **self._fields)
        self.stream("chat, given up", "/v1/chat/completions", body, random.randrange(1, 30))


def _events(response: ResponseContextManager) -> Iterator[Json]:
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _said(delta: Json) -> str:
    calls = [call["function"] for call in delta.get("tool_calls") or ()]
    texts = [delta.get(name) or "" for name in ("reasoning", "content", "text")]
    return "".join([*texts, *(c.get("name", "") + c.get("arguments", "") for c in calls)])


def _content(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _order(answer: Json) -> str:
    return json.dumps([row["index"] for row in answer["results"]])
