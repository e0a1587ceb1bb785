"""Tests with cases that were rendered with real chat templates.

The environment variable NEREID_CONFORMANCE names the folder with the cases. Without the folder, the
tests are skipped.
"""

import importlib.util
import json
import random

import pytest
from nereid_parsers import fold, get_format
from parsers.support import conformance, stream_at

FOLDER = conformance()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="there are no conformance cases")

# In this case, the template renders content into the channel of the reasoning. The text is the same
# as with reasoning, so no parser can return the right message.
INDISTINCT = {"openai-gpt-oss-120b.jinja::content_then_tool"}


def load():
    """Return two dicts by template: the names of the formats, and the scored cases."""
    if FOLDER is None:
        return {}, {}
    names = json.loads((FOLDER / "named.json").read_text(encoding="utf-8"))
    cases: dict[str, list] = {}
    for line in (FOLDER / "roundtrip.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["template"] in names and not case.get("ambiguous"):
            cases.setdefault(case["template"], []).append(case)
    return names, cases


NAMES, CASES = load()


def differences(expected, message):
    """Return the differences that score.py, the program of the conformance cases, reports."""
    spec = importlib.util.spec_from_file_location("conformance_score", FOLDER / "score.py")
    score = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score)
    return score.differences(expected, message)


@pytest.mark.parametrize("template", sorted(CASES))
def test_every_scored_case_passes_whole_by_character_and_in_random_pieces(template):
    fmt = get_format(**NAMES[template])
    rng = random.Random(template)
    for case in CASES[template]:
        if case["id"] in INDISTINCT:
            continue
        text = case["output"]
        all_positions = range(1, len(text))
        some_positions = rng.sample(all_positions, min(len(text) - 1, len(text) // 6))
        for cuts in ([], all_positions, some_positions):
            message = fold(stream_at(fmt, text, cuts, tools=case["tools"], prompt=case["prompt"]))
            assert differences(case["expected"], as_dict(message)) == [], case["id"]


def as_dict(message):
    """Return a parsed message as a dict that can be compared with a conformance case."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"reasoning": message.reasoning, "content": message.content, "tool_calls": calls}
