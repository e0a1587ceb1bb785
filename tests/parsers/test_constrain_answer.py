"""Tests of response formats other than JSON schemas, and of the reasoning gate."""

import json

import pytest
from nereid_parsers import ConstraintError, ReasoningGate, get_format

THINKER = get_format(reasoning="qwen3", tools="hermes")
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}


def node_of(response_format, **kwargs):
    """Return the structural tag's format with which `response_format` constrains an answer."""
    return get_format("hermes").structural_tag(response_format=response_format, **kwargs)["format"]


def test_a_structural_tag_is_passed_through():
    inner = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    assert node_of({"type": "structural_tag", "format": inner}) == inner


def test_the_older_form_of_structural_tags_is_converted():
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=go>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    node = node_of(old)
    assert (node["type"], node["triggers"]) == ("triggered_tags", ["<f="])
    assert (node["tags"][0]["begin"], node["tags"][0]["end"]) == ("<f=go>", "</f>")
    assert node["tags"][0]["content"]["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"type": "regex", "pattern": "a+"}, "regex"),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, "grammar"),
        ({"type": "choice", "choice": ["a", "b"]}, "or"),
        ({"type": "choice", "choice": ["a"]}, "const_string"),
    ],
)
def test_other_grammars_can_be_the_content(answer, kind):
    assert node_of(answer)["type"] == kind


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"type": "structural_tag"}, r"response_format\.format: the value must be an object"),
        (
            {"type": "structural_tag", "format": {"type": "x"}},
            r"format\.type: the value must be one of .*, but is 'x'",
        ),
        (
            {
                "type": "structural_tag",
                "format": {"type": "sequence", "elements": [{"type": "or", "elements": []}]},
            },
            r"elements\[0\]\.elements: the value must be a list",
        ),
        ({"type": "structural_tag", "structures": []}, "triggers: the value must be a list"),
        (
            {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "a"}]},
            r"structures\[0\]\.end",
        ),
        (
            {
                "type": "structural_tag",
                "triggers": ["<"],
                "structures": [{"begin": "a", "end": ""}],
            },
            "must start with one of the strings in response_format.triggers",
        ),
        ({"type": "regex"}, "pattern must be a string"),
        ({"type": "choice", "choice": []}, "at least one string"),
        ({"type": "choice", "choice": ["a", 1]}, r"choice\[1\]"),
        ({"type": "json_schema", "json_schema": 1}, "must be an object"),
    ],
)
def test_an_invalid_response_format_is_refused_and_its_field_is_named(answer, words):
    with pytest.raises(ConstraintError, match=words):
        node_of(answer)


def test_the_tag_can_skip_the_reasoning():
    whole = THINKER.structural_tag(response_format=SCHEMA, prompt="<think>\n")
    answer_only = THINKER.structural_tag(
        response_format=SCHEMA, prompt="<think>\n", skip_reasoning=True
    )
    assert "</think>" in json.dumps(whole)
    assert answer_only["format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("prompt", "is_open", "may_open"),
    [
        ("<|im_start|>assistant\n", False, True),
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
    ],
)
def test_the_gate_shows_whether_the_prompt_opened_the_reasoning(prompt, is_open, may_open):
    gate = THINKER.reasoning_gate(prompt)
    assert isinstance(gate, ReasoningGate)
    assert (gate.start.strip(), gate.end.strip()) == ("<think>", "</think>")
    assert (gate.is_open, gate.may_open) == (is_open, may_open)


def test_a_format_without_reasoning_has_no_gate():
    assert get_format("hermes").reasoning_gate("anything") is None


def test_reasoning_in_messages_has_a_gate_and_a_tag_for_the_text_after_it():
    fmt = get_format("gpt_oss")
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    gate = fmt.reasoning_gate(prompt)
    assert (gate.end, gate.is_open) == ("<|end|>", True)
    tag = fmt.structural_tag([TOOL], "required", prompt=prompt, skip_reasoning=True)
    assert tag["format"]["elements"][0]["value"].startswith("<|start|>assistant")
