"""Tests of the example program for retrieval-augmented generation (RAG), with the demo models."""

import os
from pathlib import Path

import pytest
from warm_python import run_python

pytestmark = pytest.mark.triton

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "rag.py"


@pytest.fixture(scope="module")
def ask(served):
    """A function that runs the example and returns its lines: the passages and the answer."""

    def run(question, *arguments):
        command = [str(EXAMPLE), question, f"--base-url={served.openai_url}", *arguments]
        process = run_python(command, os.environ, EXAMPLE.parent, timeout_s=300)
        assert process.returncode == 0, process.stderr
        return process.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("question", "passage", "answer"),
    [
        ("Who keeps a hedgehog?", "Elin has a hedgehog.", "Elin has a hedgehog."),
        ("Which river flows through Saltmere?", "The river Tidewater", "Tidewater"),
    ],
)
def test_the_answer_rests_on_the_passage_that_says_it(ask, question, passage, answer):
    *passages, answer_line = ask(question)
    assert any(passage in line for line in passages)
    relevances = [float(line[1:6]) for line in passages]
    assert relevances == sorted(relevances, reverse=True)
    assert relevances[0] > 0.5
    assert answer in answer_line


def test_passages_of_ones_own_are_searched(ask, tmp_path):
    file = tmp_path / "passages.txt"
    file.write_text("Mirelda lives in Oslo.\nMirelda is a baker.\nTasko lives in Rome.\n")
    first, *_ = ask("Where does Mirelda live?", f"--passages={file}", "--keep=1")
    assert "Mirelda lives in Oslo." in first
