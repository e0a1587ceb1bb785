"""A part of `make test-hostile` on the frontend alone, and the rules for defects."""

import json
import urllib.request

import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend

from loadtest.hostile import bodies, tensors, wire
from loadtest.hostile.attack import Attack, Outcome, Target, post
from loadtest.hostile.hostile import all_attacks

KINDS = ("damaged HTTP", "damaged body", "headers", "identifier", "smuggling", "slow client")
KEYS = '[attacker]\nkey = "sk-attacker"\n[neighbour]\nkey = "sk-neighbour"\n'
# These requests reach the models of the Triton server, or take long.
NEED_A_SERVER = (
    *("embeddings", "rerank", "score", "classify", "pooling", "connections", "streams"),
    *("nested 300", "a million chunks", "tokenize"),
)


def is_for_the_frontend(attack):
    return attack.kind in KINDS and not any(word in attack.name for word in NEED_A_SERVER)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The frontend with the echo model, two keys, and a stored response of the other client."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    with live_frontend(FakeBackend(), api_key_file=str(keys), receive_timeout_s=1) as port:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/responses",
            json.dumps({"input": "my secret"}).encode(),
            {"Authorization": "Bearer sk-neighbour", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            response_id = json.load(answer)["id"]
        yield Target(port, 0, "", "sk-attacker", response_id, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frontend_survives_hostile_requests(target, kind):
    attacks = [one for one in (*bodies.attacks(), *wire.attacks()) if is_for_the_frontend(one)]
    attacks = [one for one in attacks if one.kind == kind]
    assert len(attacks) >= 5
    if kind == "slow client":
        attacks = attacks[1:4]  # each one waits until the limit of one second
    found = [(one.name, one.send(target, 20.0)) for one in attacks]
    faults = {
        name: (attack.fault(outcome), outcome.text[:300])
        for attack, (name, outcome) in zip(attacks, found, strict=True)
        if attack.fault(outcome)
    }
    assert faults == {}


def test_the_table_of_attacks_covers_all_models_and_has_no_name_twice():
    names = [f"{attack.kind}: {attack.name}" for attack in all_attacks()]
    assert len(names) == len(set(names)) >= 200
    models = {attack.name.partition(":")[0] for attack in tensors.attacks()}
    assert {"llm", "tokenizer", "executor", "postprocessor", "embedding", "rerank"} <= models


@pytest.mark.parametrize(
    ("outcome", "allowed", "fault"),
    [
        (Outcome(200), (), None),
        (Outcome(500), (), "status 500"),
        (Outcome("hung"), (), "no complete answer within 5 s"),
        (Outcome("closed"), (400,), "status closed"),
        (Outcome(200, '{"type":"server_error"}'), (), 'the answer contains "server_error"'),
        (Outcome(200), (400,), "status 200"),
    ],
)
def test_which_outcomes_are_defects(outcome, allowed, fault):
    attack = Attack("kind", "name", post("/", {}), allowed, 5)
    assert attack.fault(outcome) == fault
