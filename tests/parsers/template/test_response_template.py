"""Tests that a `response_template` of transformers is converted into a `Format`."""

import json

import pytest
from nereid_parsers import FormatError, Stage, parse
from nereid_parsers.format import (
    BareKeyArguments,
    JsonArguments,
    JsonArray,
    JsonObject,
    TaggedArguments,
)
from nereid_parsers.template import format_of_response_template
from nereid_parsers.template.response.regex_parts import (
    OptionalWhitespace,
    VariableText,
    alternatives,
)
from parsers.template.support import TEMPLATES

SPECS = json.loads((TEMPLATES / "response_templates.json").read_text(encoding="utf-8"))
BODIES = {
    "tagged JSON": JsonObject,
    "tagged values": TaggedArguments,
    "bare keys": BareKeyArguments,
    "an array": JsonArray,
    "a named call": JsonArguments,
}


@pytest.mark.parametrize("name", SPECS)
def test_a_declared_format_parses_its_example(name):
    example = SPECS[name]
    message = parse(
        example["text"],
        format=format_of_response_template(example["spec"]),
        tools=example.get("tools", []),
        prompt=example.get("prompt"),
    )
    assert (message.reasoning or "").strip() == example["reasoning"]
    assert (message.content or "").strip() == example["content"]
    calls = [[call.name, json.loads(call.arguments)] for call in message.tool_calls]
    assert calls == example["calls"]


@pytest.mark.parametrize("name", SPECS)
def test_transformers_parses_the_example_in_the_same_way(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.utils.chat_parsing import parse_response

    example = SPECS[name]
    message = parse_response(
        example["text"],
        example["spec"],
        prefix=example.get("prompt") or "",
        tools=example.get("tools"),
    )
    assert (message.get("reasoning_content") or "").strip() == example["reasoning"]
    assert (message.get("content") or "").strip() == example["content"]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [[function["name"], function["arguments"]] for function in functions]
    assert calls == example["calls"]


@pytest.mark.parametrize("name", SPECS)
def test_a_declaration_becomes_the_body_it_describes(name):
    fmt = format_of_response_template(SPECS[name]["spec"])
    assert isinstance(fmt.layout.tools.calls[0].body, BODIES[name])


def test_a_prompt_that_opens_thinking_is_understood():
    fmt = format_of_response_template(SPECS["tagged JSON"]["spec"])
    assert fmt.stage("<|im_start|>assistant\n<think>\n") is Stage.REASONING
    assert fmt.stage("<|im_start|>assistant\n<think>\n\n</think>\n\n") is Stage.CONTENT


def spec(**fields):
    """Return a response template that has the given fields and a start anchor."""
    return {"start_anchor": "<A>", "fields": fields}


REFUSED = {
    "no fields": ({"start_anchor": "<A>"}, "dict of fields"),
    "another version": (spec(content={}) | {"version": 2}, "only version 1"),
    "a field of its own": (spec(mood={"open": "<m>"}), "mood"),
    "reasoning that nothing opens": (spec(reasoning={"close": "</t>"}), "both markers"),
    "calls that nothing opens": (spec(tool_calls={"content": "json"}), "opening marker"),
    "lines of keys": (spec(tool_calls={"open": "<c>", "content": "kv-lines"}), "kv-lines"),
    "a text for a call": (spec(tool_calls={"open": "<c>", "content": "text"}), "text"),
    "a transform of nothing": (
        spec(tool_calls={"open": "<c>", "content": "json", "transform": {"function": 3}}),
        "does not return a tool call",
    ),
    "a placeholder that is none": (
        spec(
            tool_calls={
                "open": "<c>",
                "content": "json",
                "transform": {"function": {"name": "f", "arguments": "{content}"}},
            }
        ),
        "placeholder",
    ),
    "values before keys": (
        spec(
            tool_calls={
                "open_pattern": r"<c (?P<name>\w+)>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<value>.*?)=(?P<key>\w+);"},
            }
        ),
        "it the group",
    ),
    "a call that opens with a field": (
        spec(tool_calls={"open_pattern": r"(?P<name>\w+)\(", "content": "json"}),
        "must begin with a literal",
    ),
    "a field that is no object": (spec(tool_calls=3), "JSON objects"),
    "options that are no object": (
        spec(tool_calls={"open": "<c>", "content": "json", "content_args": 3}),
        "JSON object",
    ),
    "delimiters that are no pair": (
        spec(
            tool_calls={
                "open": "<c>",
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<q>"]]},
            }
        ),
        "list of pairs",
    ),
    "a pattern that is no text": (spec(tool_calls={"open_pattern": 3}), "must be a string"),
    "a long pattern": (spec(tool_calls={"open_pattern": "[" * 5000}), "more than 4000"),
    "deeply nested groups": (spec(content={"close_pattern": "(" * 3000}), "too deeply"),
    "a long marker": (
        spec(reasoning={"open": "<think>" * 20000, "close": "</think>"}),
        "a marker has 140000 characters, but the limit is 1000",
    ),
    "a look-ahead": (spec(content={"close_pattern": r"(?=<e>)"}), "looks ahead"),
}


@pytest.mark.parametrize(("declared", "words"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_declaration_is_rejected_with_the_reason(declared, words):
    with pytest.raises(FormatError, match=words):
        format_of_response_template(declared)


def test_a_regex_is_split_into_literals_white_space_and_fields():
    assert alternatives(r"\s*<f=(?P<name>[^>\n]+)>") == [
        (OptionalWhitespace(), "<f=", VariableText("name"), ">"),
    ]
    assert alternatives(r"<a>|<b\.?>\Z") == [("<a>",), ("<b.>",), ("<b>",)]
    assert alternatives(r"x(?:y|z)[ \n]*\w+.") == [
        ("xy", OptionalWhitespace(), VariableText(""), VariableText("")),
        ("xz", OptionalWhitespace(), VariableText(""), VariableText("")),
    ]


@pytest.mark.parametrize("regex", [r"[^\]]+>", "[^]a]+>", "[]a]+>", r"\W+>", r"\D+\B>"])
def test_brackets_in_classes_and_negated_escapes_are_variable_text(regex):
    assert alternatives(regex) == [(VariableText(""), ">")]


@pytest.mark.parametrize(
    "regex",
    ["a+", "(a", "(?P<name>a", "[a", "a)", "(?!a)", "(?:a?b?c?){9}", r"\x41", "a\\"],
)
def test_other_regexes_are_rejected(regex):
    with pytest.raises(FormatError):
        alternatives(regex)


def test_too_many_alternatives_are_rejected():
    with pytest.raises(FormatError, match="too many"):
        alternatives("a?" * 9)
