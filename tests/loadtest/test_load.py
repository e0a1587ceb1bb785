"""Tests that the load test finds the faults of a faulty server, and none of a right server."""

import ast
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.streams import play, stream

from loadtest.load import load, numbered_answers, records

LOADTEST = Path(load.__file__).parents[1]


def locust(url, tmp_path, *scenarios, file=LOADTEST / "locustfile.py"):
    """Run the load test for three seconds against a server that answers with numbered tokens.

    Returns: the exit code and the records of the requests.
    """
    records_path = tmp_path / "records"
    flags = f"--headless -u2 -r2 -t3s --host={url} --records={records_path}".split()
    flags += ["--numbered", "--seed=1", "--arrivals=constant", "--rate=4", "--max-tokens=10"]
    command = [sys.executable, "-m", "locust", "-f", str(file), *scenarios, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert records_path.exists(), done.stderr
    return done.returncode, records.read(records_path)


# For each fault, a function that returns the tokens of an answer with this fault.
FAULTS = {
    "lost": lambda tokens: [*tokens[:3], *tokens[4:]],
    "doubled": lambda tokens: [*tokens[:3], tokens[2], *tokens[3:]],
    "reordered": lambda tokens: [*tokens[:2], tokens[3], tokens[2], *tokens[4:]],
    "truncated": lambda tokens: tokens[:-1],
}


def recite(faults=()):
    """Return a function that answers requests with numbered tokens.

    If there are `faults`, every other stream contains the next fault.
    """
    # For two faults, the streams in turn have: no fault, the first, no fault, the second, ...
    fault_of_stream = itertools.cycle(
        [turn for fault in faults for turn in (None, fault)] or [None]
    )

    def answer(body):
        prompt = body["messages"][-1]["content"]
        series = int(re.search(r"series (\d\d)", prompt)[1])
        tokens = list(numbered_answers.tokens(series)[: body["max_tokens"]])
        usage = {"completion_tokens": len(tokens)}
        if not body.get("stream"):
            choice = {"message": {"content": "".join(tokens)}, "finish_reason": "length"}
            return 200, [json.dumps({"choices": [choice], "usage": usage}).encode()]
        fault = next(fault_of_stream)
        sent_tokens = FAULTS[fault](tokens) if fault else tokens
        return 200, stream(sent_tokens, usage=len(tokens))

    return answer


def test_a_right_server_passes(tmp_path):
    with play(recite()) as server:
        code, found = locust(server.url, tmp_path, "SteadyChat")
    assert code == 0
    assert {one.outcome for one in found} == {"ok"}
    # Four requests start in each second. On a busy machine, the run ends before most of them start.
    assert len(found) <= 26


def test_a_server_with_faulty_streams_fails_and_each_fault_is_named(tmp_path):
    with play(recite(FAULTS)) as server:
        code, found = locust(server.url, tmp_path, "SteadyChat", "Bursts")
    assert code == 1
    assert {one.outcome for one in found} == {"ok", *FAULTS}


RAISES = f"""
import sys
sys.path.insert(0, {str(LOADTEST)!r})
from locustfile import SteadyChat

class Raises(SteadyChat):
    def asks(self):
        asks = super().asks()
        return asks if self.rng.random() < 0.5 else asks[1]
"""


def test_a_scenario_that_raises_fails_the_run(tmp_path):
    file = tmp_path / "raises.py"
    file.write_text(RAISES)
    with play(recite()) as server:
        code, found = locust(server.url, tmp_path, "Raises", file=file)
    assert code == 2
    assert {one.outcome for one in found} == {"ok"}


def test_every_scenario_belongs_to_a_phase():
    tree = ast.parse((LOADTEST / "locustfile.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes == {name for names in load.SCENARIOS.values() for name in names}


def test_numbered_tokens_show_their_series_and_place():
    texts = [
        text
        for series in range(numbered_answers.NUM_SERIES)
        for text in numbered_answers.tokens(series)
    ]
    assert len(set(texts)) == len(texts)
    assert all(numbered_answers.TOKEN.fullmatch(text) for text in texts)
    assert numbered_answers.TOKEN.findall("".join(texts)) == texts


@pytest.mark.triton
def test_a_few_seconds_of_the_mix_on_the_real_server(tmp_path, monkeypatch, capsys):
    chosen = ["SteadyChat", "Bursts", "Writers", "GrpcChat", "Fickle", "Mistaken"]
    command = ["load.py", "--seconds=5", "--phases", "numbered", f"--out={tmp_path}"]
    # In a closed loop, a busy machine gets fewer requests instead of a queue that grows.
    command += ["--arrivals=closed", "--request-limit=240"]
    monkeypatch.setattr(sys, "argv", [*command, "--scenarios", *chosen])
    code = load.main()
    said = capsys.readouterr().out
    assert code == 0, said
    found = records.read(tmp_path / "records-numbered.jsonl")
    assert {one.scenario for one in found} == set(chosen)
    assert {"ok", "rejected"} <= {one.outcome for one in found} <= {"ok", "rejected", "cancelled"}
    assert {one.endpoint for one in found} == {"openai", "triton", "grpc"}
    assert (tmp_path / "report.html").exists()
