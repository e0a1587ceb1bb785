import json

import pytest
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.request_grammar import (
    MAX_GRAMMAR_BYTES,
    build_chat_grammar,
    build_text_grammar,
)
from nereid_parsers import get_format

QWEN = get_format(reasoning="qwen3", tools="hermes")
# Three ends of a prompt. After the first, the model is reasoning. After the second, the reasoning
# has ended. After the third, the model decides whether to reason.
THINKING = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
EITHER = "<|im_start|>assistant\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def tool(name, **function):
    function = {"name": name, "parameters": SCHEMA} | function
    return {"type": "function", "function": function}


def chat(fields, prompt=CLOSED, fmt=QWEN, tools=None):
    """Return the grammar for the answer to a chat."""
    return build_chat_grammar(fields, fmt, prompt, tools)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"response_format": STRICT}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"regex": "a+"}, "regex"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"grammar": 'root ::= "a"'}, "ebnf"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    ],
)
def test_every_dialect_gives_a_plain_grammar(fields, kind):
    assert build_text_grammar(fields).spec.kind == kind
    spec = chat(fields, prompt=CLOSED).spec
    assert (spec.kind, spec.after) == (kind, "")
    assert chat(fields, prompt=THINKING).spec == spec._replace(after="</think>")


@pytest.mark.parametrize("name", ["schema", "value"])
def test_a_schema_inside_json_object_constrains_the_answer(name):
    def grammar_of(**response_format):
        return build_text_grammar({"response_format": response_format})

    grammar = grammar_of(type="json_object", **{name: SCHEMA})
    assert grammar == grammar_of(type="json_schema", json_schema={"schema": SCHEMA})
    assert grammar != grammar_of(type="json_object")


def test_the_grammar_allows_reasoning_if_the_model_can_still_begin_to_reason():
    spec = chat({"regex": "a+"}, EITHER).spec
    assert (spec.kind, spec.after) == ("structural_tag", "")
    assert "<think>" in spec.source
    assert '"pattern": "a+"' in spec.source


@pytest.mark.parametrize(
    "value",
    [
        {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}},
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<f"],
        },
    ],
)
def test_both_forms_of_structural_tags_are_accepted(value):
    for fields in (
        {"response_format": value},
        {"structured_outputs": {"structural_tag": json.dumps(value)}},
    ):
        tag = json.loads(chat(fields).spec.source)
        assert tag["type"] == "structural_tag"
        assert tag["format"]["type"] in ("const_string", "triggered_tags")


def test_only_a_strict_schema_is_checked_afterwards():
    assert json.loads(chat({"response_format": STRICT}).strict_schema) == SCHEMA
    assert chat({"response_format": {"type": "json_object"}}).strict_schema == ""
    assert chat({"structured_outputs": {"json": SCHEMA}}).strict_schema == ""


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"regex": ""}]
)
def test_a_free_answer_has_no_grammar(fields):
    assert chat(fields).spec is None
    assert chat(fields, tools=[tool("f")]).spec is None
    assert build_text_grammar(fields).spec is None


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "f"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        },
    ],
)
def test_a_required_tool_call_becomes_a_structural_tag(choice):
    spec = chat({"tool_choice": choice}, THINKING, tools=[tool("f")]).spec
    assert (spec.kind, spec.after) == ("structural_tag", "</think>")
    assert "<tool_call>" in spec.source


@pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, {}])
def test_the_grammar_enforces_the_schemas_of_strict_tools_and_of_single_calls(fields):
    tools = [tool("f", strict=not fields)]
    assert chat(fields, tools=tools).spec.kind == "structural_tag"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format: type must be one of text, json_object",
        ),
        ({"response_format": "json"}, "response_format: type must be one of text"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema must be a JSON schema"),
        (
            {"response_format": {"type": "json_object", "schema": "{}"}},
            "response_format: schema must be a JSON schema",
        ),
        (
            {"regex": "a", "ebnf": "b"},
            "ebnf: the request constrains its output with both regex and ebnf",
        ),
        ({"regex": 5}, "regex: the value must be a string, but the request has 5"),
        ({"json_schema": "{"}, "json_schema: the text is not valid JSON"),
        ({"json_schema": False}, "json_schema: the schema is false, which no JSON value satisfies"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format: the schema is false",
        ),
        (
            {"json_schema": r'{"const": "\udfff"}'},
            "json_schema: a text contains half of a surrogate pair",
        ),
        (
            {"structured_outputs": {"structural_tag": r'{"format": "\ud800"}'}},
            "structured_outputs.structural_tag: a text contains half of a surrogate pair",
        ),
        (
            {"structured_outputs": {"json": "[]"}},
            "structured_outputs.json: the value must be a JSON schema",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: choice must be a list"),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "does not support the key whitespace_pattern",
        ),
        (
            {"structured_outputs": {"json": {"a": 1}, "regex": "a"}},
            "must have only one of the keys",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice: the value must be auto, required, none or an"),
        ({"tool_choice": "required"}, "tool_choice: a tool call is required, but tools is empty"),
        (
            {"parallel_tool_calls": 1, "tool_choice": "required"},
            "the value must be true or false, but the request has 1",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields, message):
    with pytest.raises(RequestError, match=message):
        chat(fields)


def test_a_lark_grammar_that_cannot_be_enforced_is_refused_with_a_remedy():
    lark = {"structured_outputs": {"grammar": 'start: "a"'}}
    assert chat(lark).spec.kind == chat(lark, THINKING).spec.kind == "ebnf"

    for unsupported_case in ({"prompt": EITHER}, {"tools": [tool("f")]}):
        with pytest.raises(RequestError, match=r"structured_outputs: .* Write the grammar in EBNF"):
            chat(lark, **unsupported_case)

    with pytest.raises(RequestError, match="structured_outputs: grammar must be"):
        chat({"structured_outputs": {"grammar": 5}}, EITHER)


def test_a_tool_that_is_not_offered_cannot_be_chosen():
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(
        RequestError, match="tool_choice: the request has no tool with the name 'g'"
    ):
        chat({"tool_choice": choice}, tools=[tool("f")])


def test_a_tool_call_cannot_be_required_of_a_checkpoint_without_tool_calls():
    with pytest.raises(
        RequestError, match='tool_choice: the request has "required", but the chat format'
    ):
        chat({"tool_choice": "required"}, fmt=None, tools=[tool("f")])
    assert chat({}, fmt=None, tools=[tool("f")]).spec is None


def test_a_grammar_beyond_the_limit_is_refused_with_its_size():
    with pytest.raises(RequestError, match=f"regex: .* the limit is {MAX_GRAMMAR_BYTES} bytes"):
        build_text_grammar({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)})
