"""Tests with real chat templates. They run if the conformance cases are installed."""

import json
import time

import pytest
from nereid_parsers import analyze_template
from nereid_parsers.template.sandbox.limits import ANALYSIS_LIMITS
from parsers.support import conformance
from parsers.template.support import Written, stream_written

CASES = conformance()
pytestmark = pytest.mark.skipif(
    CASES is None, reason="no conformance cases beside the repository (NEREID_CONFORMANCE)"
)
# The same text is content in one rendering and reasoning in another, so no parser can be right.
CONTRADICTORY = {"openai-gpt-oss-120b.jinja::content_then_tool"}
# The tests require that at least this share of the cases is parsed correctly.
FLOOR = 0.98


@pytest.fixture(scope="module")
def templates():
    """The text of each template, by name."""
    paths = sorted((CASES / "templates").glob("*.jinja"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def timed_analyses(templates):
    """The analysis of each template, and the seconds that the analysis took."""
    return {name: timed_analysis(text) for name, text in templates.items()}


def timed_analysis(text):
    """Analyse a template. Return the analysis and the processor time that it took, in seconds."""
    start = time.thread_time()
    analysis = analyze_template(text)
    return analysis, time.thread_time() - start


def scored_cases():
    """Return the conformance cases whose text can be parsed in only one way."""
    with (CASES / "roundtrip.jsonl").open(encoding="utf-8") as lines:
        return [case for line in lines if not (case := json.loads(line)).get("ambiguous")]


def parsed_message(case, fmt, size):
    """Parse the text of a case in pieces of `size` characters, and return the message."""
    written = Written(case["prompt"], case["output"])
    return stream_written(fmt, written, size, tools=case["tools"])


def is_same(expected, message):
    """Return whether a message equals the expected message. Ignore white space around texts."""

    def text(value):
        return (value or "").strip()

    calls = [(call.name, json.loads(call.arguments or "{}")) for call in message.tool_calls]
    return (
        text(expected["reasoning"]) == text(message.reasoning)
        and text(expected["content"]) == text(message.content)
        and [(call["name"], call["arguments"]) for call in expected["tool_calls"]] == calls
    )


@pytest.mark.parametrize("size", [1, pytest.param(7, marks=pytest.mark.long), 10**6])
def test_rendered_messages_are_parsed_correctly(timed_analyses, size):
    cases = scored_cases()
    failed_cases = []
    for case in cases:
        analysis, _ = timed_analyses[case["template"]]
        message = parsed_message(case, analysis.format, size)
        if case["id"] not in CONTRADICTORY and not is_same(case["expected"], message):
            failed_cases.append(case["id"])
    assert failed_cases == []
    assert 1 - len(CONTRADICTORY) / len(cases) > FLOOR


def test_an_analysis_takes_less_than_half_of_its_time_limit(templates, timed_analyses):
    limit = ANALYSIS_LIMITS.seconds / 2
    slow = [name for name, (_, seconds) in timed_analyses.items() if seconds > limit]
    # Slow analyses are measured again, because the first measurement may include a slow start.
    assert [name for name in slow if timed_analysis(templates[name])[1] > limit] == []
