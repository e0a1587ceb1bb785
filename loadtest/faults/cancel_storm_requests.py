# SPDX-License-Identifier: Apache-2.0
"""What the storm of cancels asks for: requests that stay in each state, through every door.

Requests of one group have the same prompt and must have the same answer, whichever door they took.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest.client.traffic import Ask, Json, generate_stream, grpc_stream

MODEL = "storm"
CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "long prompt"
_PLACES = ("Pinemark", "Korvale", "the harbour", "the old mill", "a garden", "the northern road")
_DEEDS = ("waits for", "counts", "remembers", "asks about", "paints", "looks for")
_THINGS = ("a turtle", "the lanterns", "seven stones", "the rain", "a blue door", "its name")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Load:
    """What one engine is asked for.

    Attributes:
        environment: the server's settings.
        num_users: requests under way at a time, several times as many as sequences can run.
        groups: lists of requests with the same answer.
        known: key of a request -> its answer, where it is known before it is asked for.
    """

    environment: Mapping[str, str]
    num_users: int
    groups: list[list[Ask]]
    known: Mapping[str, str] = field(default_factory=dict)


def demo(rng: random.Random, variety: int) -> Load:
    """The demo model: few sequences at once, small steps, and a KV cache that is too small.

    So requests are queued, prefilled over many steps, preempted, and their cached prefixes evicted.
    """
    environment = {
        "NEREID_MAX_NUM_SEQS": "8",
        "NEREID_MAX_NUM_BATCHED_TOKENS": "64",
        "NEREID_KV_CACHE_MEMORY": "12MiB",
    }
    return Load(environment, 24, list(_demo_groups(rng, variety)))


def _demo_groups(rng: random.Random, variety: int) -> Iterator[list[Ask]]:
    shared = _story(rng, 12)
    for _ in range(variety):
        yield _through_all(LONG, _story(rng, 40), {"max_tokens": 24})
        yield _through_all("shared prefix", shared + _story(rng, 12), {"max_tokens": 24})
        long = {"max_tokens": rng.choice((40, 80, 160)), "ignore_eos": True}
        yield _through_all("decoding", _story(rng, 1), long)
        regex = {"regex": f"[a-z ]{{{rng.randint(20, 60)}}}", "max_tokens": 80}
        yield _through_all("grammar", _story(rng, 1), regex)
        yield _chats("chat", _story(rng, 1), long)
        schema = {"name": "pet", "schema": _SCHEMA, "strict": True}
        wanted = {"type": "json_schema", "json_schema": schema}
        yield _chats("schema", _story(rng, 1), {"response_format": wanted, "max_tokens": 80})
        yield _completions("two answers", _story(rng, 2), {"n": 2, "max_tokens": 40})


def scripted(rng: random.Random, variety: int, folder: Path) -> Load:
    """An engine that writes what a script says: its answers are known, and the rest is real.

    Args:
        rng: all chance comes from it.
        variety: how many different answers there are.
        folder: where the script goes.
    """
    # `nereid serve` asks for a few tokens before it says that it is ready.
    script: list[Json] = [{"when": "Once upon a time", "text": "there was"}]
    groups, known = [], {}
    for number in range(variety):
        name = f"rule {number};"
        text = _story(rng, rng.choice((1, 2, 5)))
        speed = {"tokens_per_step": rng.choice((1, 1, 3)), "delay_ms": rng.choice((0, 2, 8))}
        script.append({"when": name, "text": text, **speed})
        for group in (_through_all("scripted", name, {}), _chats("chat", name, {})):
            groups.append(group)
            for ask in group:
                known[ask.key] = "\x1f" + text  # behind its reasoning, of which there is none
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    environment = {
        "NEREID_ENGINE": "scripted",
        "NEREID_SCRIPT": str(path),
        "NEREID_MAX_NUM_SEQS": "16",
    }
    return Load(environment, 48, groups, known)


def _story(rng: random.Random, num_sentences: int) -> str:
    choose = rng.choice
    sentences = (
        f"{choose(_PLACES)} {choose(_DEEDS)} {choose(_THINGS)} {rng.randint(0, 999)} times."
        for _ in range(num_sentences)
    )
    return " ".join(sentences)


def _through_all(kind: str, prompt: str, fields: Json) -> list[Ask]:
    """The same prompt through every door that takes plain text, and by which one can go away."""
    exact = {"temperature": 0, "max_tokens": 200, **fields}
    direct = [grpc_stream(kind, prompt, exact), generate_stream(kind, prompt, exact)]
    return [*_completions(kind, prompt, fields), *direct]


def _completions(kind: str, prompt: str, fields: Json) -> list[Ask]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 200, **fields}
    return [Ask(kind, COMPLETIONS, body | {"stream": flag}) for flag in (True, False)]


def _chats(kind: str, prompt: str, fields: Json) -> list[Ask]:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
    return [Ask(kind, CHATS, body | {"stream": flag}) for flag in (True, False)]


def fresh(ask: Ask, rng: random.Random) -> Ask:
    """The same request, of which nothing is in the prefix cache: all of its prompt is computed."""
    salt = {"cache_salt": f"{rng.getrandbits(64):x}"}
    if not ask.is_direct:
        return replace(ask, body=ask.body | salt)
    fields = json.loads(ask.body["sampling_parameters"]) | salt
    return replace(ask, body=ask.body | {"sampling_parameters": json.dumps(fields)})


def door_of(ask: Ask) -> str:
    """The door's name for people."""
    if ask.door == "grpc":
        return "Triton gRPC stream"
    if ask.door == "http":
        return "Triton generate_stream"
    what = "chat" if ask.path == CHATS else "completion"
    return f"OpenAI {what}, {'stream' if ask.is_stream else 'whole'}"
