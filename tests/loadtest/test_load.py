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


def locust(url, tmp_path, *scenarios, seconds=3, file=LOADTEST / "locustfile.py"):
    """Run the load test against a server that answers with numbered tokens.

    Returns: the exit code and the records of the requests.
    """
    kept = tmp_path / "records"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(file), *scenarios),
            *(
                "--headless",
                "-u2",
                "-r2",
                f"-t{seconds}s",
                f"--host={url}",
                "--numbered",
                "--seed=1",
            ),
            *("--arrivals=constant", "--rate=4", f"--records={kept}", "--max-tokens=10"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert kept.exists(), done.stderr
    return done.returncode, records.read(kept)


FAULTS = {
    "lost": lambda said: [*said[:3], *said[4:]],
    "doubled": lambda said: [*said[:3], said[2], *said[3:]],
    "reordered": lambda said: [*said[:2], said[3], said[2], *said[4:]],
    "truncated": lambda said: said[:-1],
}


def recite(faults=()):
    """Return a function that answers requests with numbered tokens.

    If there are `faults`, every other stream contains the next fault.
    """
    faults = itertools.cycle([*faults, None]) if faults else itertools.repeat(None)
    turns = itertools.cycle([None, faults])

    def answer(body):
        text = body["messages"][-1]["content"]
        series = int(re.search(r"series (\d\d)", text)[1])
        said = list(numbered_answers.tokens(series)[: body["max_tokens"]])
        usage = {"completion_tokens": len(said)}
        if not body.get("stream"):
            message = {"message": {"content": "".join(said)}, "finish_reason": "length"}
            return 200, [json.dumps({"choices": [message], "usage": usage}).encode()]
        turn = next(turns)
        fault = turn and next(turn)
        return 200, stream(FAULTS[fault](said) if fault else said, usage=len(said))

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
