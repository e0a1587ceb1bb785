"""Tests of the frontend with a part of the requests of `make test-hostile`.

Other tests check the rules by which an answer counts as a defect.
"""

import functools
import json
import urllib.request

import pytest
from fakes.fake_backend import FakeBackend
from fakes.live_frontend import live_frontend

from loadtest.hostile import bodies, http_variants, templates, tensors, wire
from loadtest.hostile.attack import Attack, Outcome, Target
from loadtest.hostile.hostile import all_attacks
from loadtest.hostile.report import Limits
from loadtest.hostile.requests import post

KINDS = (
    *("damaged HTTP", "damaged body", "headers", "identifier", "smuggling", "paths", "contents"),
    "connections",
)
KEYS = '[attacker]\nkey = "sk-attacker"\n[neighbour]\nkey = "sk-neighbour"\n'
# Attacks with these words in their names reach the models of the Triton server, or take long.
NEED_A_SERVER = (
    *("embeddings", "rerank", "score", "classify", "pooling", "300 ", "streams"),
    *("nested 300", "a million chunks", "tokenize", "gzip", "deflate", "2**64"),
)
LIMIT_S = 20.0


def is_for_the_frontend(attack):
    return attack.kind in KINDS and not any(word in attack.name for word in NEED_A_SERVER)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A frontend with a fake backend and two API keys, which has stored a neighbour's response."""
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
        no_server = {"http": 0, "grpc": "", "canary": 0}
        yield Target(port, key="sk-attacker", foreign_response=response_id, **no_server)


def faults_of(target, attacks):
    """Run attacks one after the other, and return the fault of each attack that has one."""
    faults = {}
    for attack in attacks:
        outcome = attack.send(target, LIMIT_S)
        if fault := attack.fault(outcome):
            faults[attack.name] = (fault, outcome.text[:300])
    return faults


@functools.cache
def frontend_attacks():
    modules = (bodies, http_variants, templates, wire)
    attacks = [attack for module in modules for attack in module.attacks()]
    return [attack for attack in attacks if is_for_the_frontend(attack)]


def attacks_of(kind):
    attacks = [attack for attack in frontend_attacks() if attack.kind == kind]
    assert len(attacks) >= 2
    return attacks


def test_the_frontend_survives_some_hostile_requests_of_each_kind(target):
    every_seventh = [attack for kind in KINDS for attack in attacks_of(kind)[::7]]
    assert faults_of(target, every_seventh) == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_frontend_survives_hostile_requests(target, kind):
    assert faults_of(target, attacks_of(kind)) == {}


def test_a_body_that_stops_in_the_middle_ends_the_request(target):
    name = "a body that stops in the middle"
    (attack,) = [attack for attack in wire.attacks() if attack.name == name]
    assert faults_of(target, [attack]) == {}


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
        (Outcome("hung"), (), "no complete answer within the time limit"),
        (Outcome(504), (200, 504), None),
        (Outcome(501, "not supported"), (), None),
        (Outcome(501, "something else"), (), "status 501"),
        (Outcome("closed"), (400,), "status closed"),
        (Outcome(200, '{"type":"server_error"}'), (), 'the answer contains "server_error"'),
        (Outcome(200), (400,), "status 200"),
    ],
)
def test_which_outcomes_are_defects(outcome, allowed, fault):
    # An answer with the status 501 and this text is never a defect.
    own_answers = ((501, "not supported"),)
    attack = Attack("kind", "name", post("/", {}), allowed=allowed, own_answers=own_answers)
    assert attack.fault(outcome) == fault


def test_the_time_limits_of_a_busy_machine_follow_from_a_measurement_without_attacks():
    quiet = Limits.measure(waits=[0.1] * 40)
    busy = Limits.measure(waits=[1.0] * 39 + [3.0])
    # The limit is four times the 99th percentile of the waiting times, but at least 2 s.
    assert (quiet.first_token_s, quiet.slowness) == (2.0, 1.0)
    assert (busy.first_token_s, busy.slowness) == (12.0, 6.0)
