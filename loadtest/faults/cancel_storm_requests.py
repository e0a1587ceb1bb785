"""The requests of cancel_storm.py, for every endpoint.

Each state of a request lasts so long that the request can be cancelled in this state. Requests of
one group have the same prompt and must have the same answer through every endpoint.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client.ask import Ask, Json, generate_stream, grpc_stream
from loadtest.client.traffic import CHATS, COMPLETIONS, structured

MODEL = "storm"
LONG = "long prompt"
_PLACES = ("Pinemark", "Korvale", "the harbour", "the old mill", "a garden", "the northern road")
_DEEDS = ("waits for", "counts", "remembers", "asks about", "paints", "looks for")
_THINGS = ("a turtle", "the lanterns", "seven stones", "the rain", "a blue house", "its name")


@dataclass(frozen=True)
class Load:
    """The server settings and requests for one engine.

    Attributes:
        environment: the settings of the server.
        num_users: the number of requests that are sent at the same time. It is several times the
            number of sequences that can run.
        groups: lists of requests that have the same answer.
        known: the expected answers that are known in advance, by the key of the request.
    """

    environment: Mapping[str, str]
    num_users: int
    groups: list[list[Ask]]
    known: Mapping[str, str] = field(default_factory=dict)


def demo(rng: random.Random, variety: int, lengths: Sequence[int] = (40, 80, 160)) -> Load:
    """Return the load for the demo model: few sequences, a small token budget, a small cache.

    With these settings, requests wait in the queue, need many steps for their prefill, and are
    preempted, and their cached prefixes are evicted.
    """
    environment = {
        "NEREID_MAX_NUM_SEQS": "8",
        "NEREID_MAX_NUM_BATCHED_TOKENS": "64",
        "NEREID_KV_CACHE_MEMORY": "12MiB",
    }
    groups = list(_demo_groups(rng, variety, lengths))
    return Load(environment, num_users=24, groups=groups)


def _demo_groups(rng: random.Random, variety: int, lengths: Sequence[int]) -> Iterator[list[Ask]]:
    """Yield groups of requests, with `variety` prompts of each kind."""
    shared = _sentences(rng, 12)
    for _ in range(variety):
        yield _through_all(LONG, _sentences(rng, 40), {"max_tokens": 24})
        yield _through_all("shared prefix", shared + _sentences(rng, 12), {"max_tokens": 24})
        long = {"max_tokens": rng.choice(lengths), "ignore_eos": True}
        yield _through_all("decoding", _sentences(rng, 1), long)
        regex = {"regex": f"[a-z ]{{{rng.randint(20, 60)}}}", "max_tokens": 80}
        yield _through_all("grammar", _sentences(rng, 1), regex)
        yield _chats("chat", _sentences(rng, 1), long)
        yield _chats("schema", _sentences(rng, 1), structured() | {"max_tokens": 80})
        yield _completions("two answers", _sentences(rng, 2), {"n": 2, "max_tokens": 40})


def scripted(rng: random.Random, variety: int, folder: Path) -> Load:
    """Return the load for the scripted engine, whose answers are known in advance.

    The script of the engine, which contains the answers, is written to `folder`.
    """
    # `nereid serve` sends a test request with this prompt before it reports that it is ready.
    script: list[Json] = [{"when": "Once upon a time", "text": "there was"}]
    groups: list[list[Ask]] = []
    known: dict[str, str] = {}
    for number in range(variety):
        prompt = f"rule {number};"
        answer = _sentences(rng, rng.choice((1, 2, 5)))
        speed = {"tokens_per_step": rng.choice((1, 1, 3)), "delay_ms": rng.choice((0, 2, 8))}
        script.append({"when": prompt, "text": answer, **speed})
        pair = (_through_all("scripted", prompt, {}), _chats("chat", prompt, {}))
        groups += pair
        known |= {ask.key: json.dumps({"content": answer}) for group in pair for ask in group}
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    environment = {
        "NEREID_ENGINE": "scripted",
        "NEREID_SCRIPT": str(path),
        "NEREID_MAX_NUM_SEQS": "16",
    }
    return Load(environment, num_users=48, groups=groups, known=known)


def _sentences(rng: random.Random, num_sentences: int) -> str:
    """Return random sentences, such as "Korvale counts the rain 12 times."."""
    choose = rng.choice
    sentences = (
        f"{choose(_PLACES)} {choose(_DEEDS)} {choose(_THINGS)} {rng.randint(0, 999)} times."
        for _ in range(num_sentences)
    )
    return " ".join(sentences)


def _through_all(kind: str, prompt: str, fields: Json) -> list[Ask]:
    """Return requests with one prompt for all endpoints that accept a text, except `generate`."""
    exact = {"temperature": 0, "max_tokens": 200, **fields}
    direct = [grpc_stream(prompt, exact, kind), generate_stream(prompt, exact, kind)]
    return [*_completions(kind, prompt, fields), *direct]


def _completions(kind: str, prompt: str, fields: Json) -> list[Ask]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 200, **fields}
    return _whole_and_stream(kind, COMPLETIONS, body)


def _chats(kind: str, prompt: str, fields: Json) -> list[Ask]:
    messages = [{"role": "user", "content": prompt}]
    return _whole_and_stream(
        kind, CHATS, {"model": MODEL, "messages": messages, "temperature": 0, **fields}
    )


def _whole_and_stream(kind: str, path: str, body: Json) -> list[Ask]:
    return [Ask("openai", path, body | {"stream": flag}, kind=kind) for flag in (True, False)]


def with_new_prefix(ask: Ask, rng: random.Random) -> Ask:
    """Return a copy of a request with a random cache salt, so that its prefix is not cached."""
    assert isinstance(ask.body, dict)
    salt = {"cache_salt": f"{rng.getrandbits(64):x}"}
    if ask.endpoint == "openai":
        return ask.with_fields(salt)
    fields = json.loads(ask.body["sampling_parameters"]) | salt
    return ask.with_fields({"sampling_parameters": json.dumps(fields)})


def endpoint_of(ask: Ask) -> str:
    """Return the name of a request's endpoint for the report."""
    if ask.endpoint == "grpc":
        return "Triton gRPC stream"
    if ask.endpoint == "triton":
        return "Triton generate_stream"
    api = "chat" if ask.path == CHATS else "completion"
    return f"OpenAI {api}, {'stream' if ask.is_stream else 'whole'}"
