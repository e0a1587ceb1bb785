"""Tests of structural tags. Random texts that a tag allows are generated and parsed."""

import itertools
import json
import random
import time

import pytest
from nereid_parsers import ConstraintError, fold, get_format, parse
from nereid_parsers.constraints.constrain import structural_tag
from nereid_parsers.constraints.constrain_reasoning import ReasoningState
from nereid_parsers.constraints.constrain_request import Request, ToolSchema
from nereid_parsers.constraints.schema_merging import merge_schemas
from nereid_parsers.constraints.unenforced_keywords import (
    unenforced_keywords,
    unenforced_keywords_of_answer,
)
from nereid_parsers.format import (
    Call,
    Format,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    Messages,
    NestedTags,
    PythonCalls,
    Route,
    Sections,
    Stage,
    TaggedArguments,
    ToolSection,
)
from nereid_parsers.formats import registry
from nereid_parsers.stream.values.argument_types import json_types_of
from parsers.support import all_formats, markers_of, tool

TOOLS = [
    tool("get_weather", ["city"], city={"type": "string"}, days={"type": "integer"}),
    tool(
        "set_flags",
        ["on"],
        on={"type": "boolean"},
        tags={"type": "array", "items": {"type": "string"}, "maxItems": 2},
        mode={"type": "string", "enum": ["a", "b c"]},
        note={"type": ["integer", "null"]},
        at={
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    ),
    tool("list_alarms", []),
    tool("maybe", [], one={"type": "integer"}, two={"type": "string"}),
]
STRICT_TOOLS = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
NAMES = {declared["function"]["name"] for declared in TOOLS}
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
HERMES = get_format("hermes")
THINKER = get_format(reasoning="qwen3", tools="hermes")

# This format writes tool calls inside content messages. Such tool calls cannot be constrained.
CANNOT_CALL = {"muse"}
CALLABLE_FORMATS = [
    fmt
    for fmt in all_formats()
    if (not isinstance(fmt.layout, Sections) or fmt.layout.tools) and fmt.name not in CANNOT_CALL
]


def assert_arguments_fit(call):
    """Assert that the arguments of a call have the types of the tool's schema."""
    arguments = json.loads(call.arguments)
    types = {
        "city": str, "days": int, "on": bool, "tags": list, "note": int | None, "at": dict,
        "one": int, "two": str,
    }  # fmt: skip
    for key, value in arguments.items():
        if key == "mode":
            assert value in ("a", "b c"), call
        elif types[key] is int and isinstance(value, float):
            # A number such as 2.0 is also an integer in JSON Schema.
            assert value == int(value), call
        else:
            assert isinstance(value, types[key]), call
    required_key = {"get_weather": "city", "set_flags": "on"}.get(call.name)
    assert required_key is None or required_key in arguments, call


class Walker:
    """Generates random texts that a tag allows, from bytes and the markers of the format."""

    def __init__(self, fmt, tag, seed):
        self.xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
        markers = {marker.strip().partition("{")[0].encode() for marker in markers_of(fmt)}
        long_markers = sorted(marker for marker in markers if len(marker) > 1)
        # The tokens 0 to 255 are single bytes. They are followed by a token for each long marker,
        # and by the token that ends the text.
        self.tokens = [*(bytes([byte]) for byte in range(256)), *long_markers, b"</s>"]
        self.stop = len(self.tokens) - 1
        info = self.xgrammar.TokenizerInfo(
            self.tokens, self.xgrammar.VocabType.RAW, stop_token_ids=[self.stop]
        )
        compiler = self.xgrammar.GrammarCompiler(info, max_threads=1)
        self.compiled = compiler.compile_structural_tag(json.dumps(tag))
        self.random = random.Random(seed)

    def allowed(self, matcher, mask):
        """Return the tokens that the grammar allows next. `mask` is a buffer for the token mask."""
        matcher.fill_next_token_bitmask(mask)
        bits = mask[0].tolist()
        return [token for token in range(len(self.tokens)) if bits[token >> 5] >> (token & 31) & 1]

    def choose(self, allowed):
        """Return a random allowed token. Readable tokens and short texts are preferred."""
        if self.stop in allowed and self.random.random() < 0.4:
            return self.stop
        readable = [
            token
            for token in allowed
            if 32 <= token < 127 or token == ord("\n") or 256 <= token < self.stop
        ]
        allowed = readable or allowed
        markers = [token for token in allowed if token >= 256]
        closing = [token for token in allowed if self.tokens[token] in (b'"', b"}", b"]", b")")]
        draw = self.random.random()
        if markers and draw < 0.35:
            return self.random.choice(markers)
        if closing and draw < 0.6:
            return self.random.choice(closing)
        return self.random.choice([token for token in allowed if token != self.stop] or allowed)

    def walk(self, max_tokens=500):
        """Return a random text of the grammar, or None if it is not complete after `max_tokens`."""
        matcher = self.xgrammar.GrammarMatcher(self.compiled)
        mask = self.xgrammar.allocate_token_bitmask(1, len(self.tokens))
        text = b""
        for _ in range(max_tokens):
            if matcher.is_terminated():
                return text.decode()
            token = self.choose(self.allowed(matcher, mask))
            assert matcher.accept_token(token)
            if token == self.stop:
                return text.decode()
            text += self.tokens[token]
        return None

    def texts(self, max_texts=4, max_walks=24):
        """Return up to `max_texts` random texts. Call `walk` at most `max_walks` times."""
        walks = (self.walk() for _ in range(max_walks))
        complete_texts = (text for text in walks if text is not None)
        texts = list(itertools.islice(complete_texts, max_texts))
        assert texts, "no walk ended"
        return texts


@pytest.mark.parametrize("fmt", CALLABLE_FORMATS, ids=[fmt.name for fmt in CALLABLE_FORMATS])
@pytest.mark.parametrize("parallel", [True, False], ids=["several", "single"])
def test_required_calls_that_the_tag_allows_can_be_parsed(fmt, parallel):
    tag = fmt.structural_tag(TOOLS, "required", parallel_tool_calls=parallel)
    for text in Walker(fmt, tag, seed=1).texts():
        message = parse(text, format=fmt, tools=TOOLS)
        assert not (message.content or "").strip(), text
        num_calls = len(message.tool_calls)
        assert num_calls >= 1 if parallel else num_calls == 1, text
        for call in message.tool_calls:
            assert call.name in NAMES, text
            assert_arguments_fit(call)


@pytest.mark.parametrize("name", sorted(CANNOT_CALL))
def test_required_calls_inside_messages_cannot_be_constrained(name):
    with pytest.raises(ConstraintError, match="cannot be constrained"):
        get_format(name).structural_tag(TOOLS, "required")


@pytest.mark.parametrize("fmt", CALLABLE_FORMATS, ids=[fmt.name for fmt in CALLABLE_FORMATS])
def test_calls_in_free_text_that_the_tag_allows_can_be_parsed(fmt):
    tag = fmt.structural_tag(STRICT_TOOLS, "auto")
    for text in Walker(fmt, tag, seed=2).texts():
        for call in parse(text, format=fmt, tools=STRICT_TOOLS).tool_calls:
            assert call.name in NAMES, text
            assert_arguments_fit(call)


@pytest.mark.parametrize("fmt", all_formats(), ids=[fmt.name for fmt in all_formats()])
def test_json_answers_that_the_tag_allows_are_content(fmt):
    tag = fmt.structural_tag(response_format=ANSWER)
    for text in Walker(fmt, tag, seed=3).texts():
        content = parse(text, format=fmt, tools=[]).content
        if "append_think" in fmt.name:  # This format returns the reasoning as content.
            content = content.rpartition("</think>")[2]
        assert isinstance(json.loads(content)["x"], int), text


def test_reasoning_that_the_prompt_opened_is_free_text_up_to_its_end():
    fmt = get_format(reasoning="deepseek_r1", tools="deepseek_v31")
    prompt = "<｜Assistant｜><think>\n"
    tag = fmt.structural_tag(TOOLS, "required", prompt=prompt)
    first = tag["format"]["elements"][0]
    assert (first["begin"], first["end"]) == ("", "</think>")
    for text in Walker(fmt, tag, seed=4).texts():
        message = parse(text, format=fmt, tools=TOOLS, prompt=prompt)
        assert message.tool_calls
        assert "</think>" in text


def test_reasoning_that_the_prompt_closed_is_not_opened_again():
    tag = THINKER.structural_tag(TOOLS, "required", prompt="<think>\n\n</think>\n\n")
    assert "<think>" not in json.dumps(tag)
    assert "<think>" in json.dumps(THINKER.structural_tag(TOOLS, "required", prompt="assistant\n"))


def test_a_reasoning_message_that_the_prompt_opened_is_free_text():
    fmt = get_format("gpt_oss")
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    tag = fmt.structural_tag(TOOLS, "required", prompt=prompt)
    for text in Walker(fmt, tag, seed=5).texts():
        assert parse(text, format=fmt, tools=TOOLS, prompt=prompt).tool_calls


@pytest.mark.parametrize(
    ("tools", "choice", "answer", "parallel"),
    [
        (TOOLS, "auto", None, True),
        (TOOLS, None, None, True),
        (TOOLS, "none", None, True),
        (STRICT_TOOLS, "none", None, False),
        (None, None, None, True),
        ([], "auto", {"type": "text"}, True),
    ],
)
def test_a_request_without_constraints_gives_no_tag(tools, choice, answer, parallel):
    assert HERMES.structural_tag(tools, choice, answer, parallel_tool_calls=parallel) is None


def test_a_single_call_is_enforced_even_when_it_is_optional():
    tag = HERMES.structural_tag(TOOLS, "auto", parallel_tool_calls=False)
    assert tag["format"]["stop_after_first"] is True


def offered(tag):
    """Return the names of the tools that the model may call if a structural tag constrains it."""
    text = json.dumps(tag)
    return {name for name in NAMES if name in text}


def test_a_named_tool_is_the_only_one_and_called_once():
    choice = {"type": "function", "function": {"name": "list_alarms"}}
    tag = HERMES.structural_tag(TOOLS, choice)
    assert offered(tag) == {"list_alarms"}
    for text in Walker(HERMES, tag, seed=6).texts():
        assert [call.name for call in parse(text, format=HERMES).tool_calls] == ["list_alarms"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_narrow_the_offer(mode):
    names = [{"type": "function", "function": {"name": n}} for n in ("maybe", "list_alarms")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    tag = HERMES.structural_tag(STRICT_TOOLS, choice)
    assert offered(tag) == {"maybe", "list_alarms"}


def test_tools_and_a_json_answer_allow_either_of_the_two():
    tag = HERMES.structural_tag(TOOLS, "auto", ANSWER)
    has_calls = set()
    for seed in range(8):
        for text in Walker(HERMES, tag, seed).texts(max_texts=2):
            message = parse(text, format=HERMES, tools=TOOLS)
            has_calls.add(bool(message.tool_calls))
            if not message.tool_calls:
                assert "x" in json.loads(message.content)
    assert has_calls == {True, False}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"tool_choice": "sometimes"},
            "the value must be auto, required, none or an object, but is 'sometimes'",
        ),
        ({"tool_choice": "required", "tools": []}, "tools is empty"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}},
            "the request has no tool with the name 'no'",
        ),
        ({"tool_choice": {"type": "function", "function": {}}}, "has no function name"),
        ({"tool_choice": {"type": "custom"}}, "must be function or allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
            'allowed_tools.mode must be "auto" or "required"',
        ),
        ({"tool_choice": 3}, "tool_choice must be an object, but it is 3"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": 3}},
            "allowed_tools must be an object",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": 3}}},
            "allowed_tools.tools must be a list",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [3]}}},
            "each item of tool_choice.allowed_tools.tools must be an object",
        ),
        ({"response_format": {"type": "xml"}}, "type must be text, json_object, json_schema"),
        ({"tools": [{"type": "function", "function": {}}]}, "tool .* has no function name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            r"tools: `parameters` of the function 'f' must be an object, but it is \[1\]",
        ),
    ],
)
def test_invalid_requests_are_refused(kwargs, words):
    arguments = {"tools": TOOLS, **kwargs}
    with pytest.raises(ConstraintError, match=words):
        HERMES.structural_tag(**arguments)


def test_calls_need_a_tool_section_and_json_objects_are_answers():
    with pytest.raises(ConstraintError, match="does not define how the model writes tool calls"):
        get_format(reasoning="qwen3").structural_tag(TOOLS, "required")
    tag = get_format(reasoning="qwen3").structural_tag(response_format={"type": "json_object"})
    assert '"type": "object"' in json.dumps(tag)


def test_reasoning_without_an_end_cannot_be_constrained():
    layout_of_messages = Messages(
        "<s>", "<h>", (Route(Stage.REASONING, "r"), Route(Stage.CALLS, "{name}"))
    )
    request = Request.of(TOOLS, "required", None, parallel_tool_calls=True)
    for layout in (layout_of_messages, Sections(tools=HERMES.layout.tools)):
        with pytest.raises(ConstraintError, match="no marker that ends the reasoning"):
            structural_tag(Format("m", layout), request, ReasoningState.OPEN)
    with pytest.raises(ConstraintError, match="no message type for an answer in text"):
        Format("m", layout_of_messages).structural_tag(response_format=ANSWER)


@pytest.mark.parametrize(
    "call",
    [
        Call(JsonArguments(), open="<c>", head="{name}{rest}>"),
        Call(TaggedArguments("<{key} {word}>", "</>"), open="<c>", head="{name}>"),
        Call(NestedTags("~"), head="<c {name}>", close="</c>"),
    ],
)
def test_fields_whose_text_is_not_known_cannot_be_constrained(call):
    with pytest.raises(ConstraintError):
        Format("f", Sections(tools=ToolSection((call,)))).structural_tag(TOOLS, "required")


@pytest.mark.parametrize("body", [JsonArray(), PythonCalls()])
def test_prose_is_allowed_next_to_calls_that_start_with_a_bracket(body):
    fmt = Format("f", Sections(tools=ToolSection((Call(body),))))
    options = fmt.structural_tag(STRICT_TOOLS, "auto")["format"]["elements"]
    assert options[1]["elements"][0]["pattern"] == r"[^\[\s]"


SCHEMAS = [
    ({"type": "string"}, []),
    ({"not": {}}, ["not at $"]),
    ({"properties": {"a": {"uniqueItems": True}}}, ["uniqueItems at $.properties.a"]),
    ({"items": {"multipleOf": 2}}, ["multipleOf at $.items"]),
    ({"anyOf": [{"if": {}}]}, ["if at $.anyOf[0]"]),
    ({"allOf": [{}, {}]}, ["allOf of 2 parts at $"]),
    ({"oneOf": [{"type": "string"}, {"type": "string"}]}, ["oneOf whose parts may overlap at $"]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, []),
    ({"oneOf": [{"const": 1}, {"const": 2}, {"type": "string"}]}, []),
    (
        {"oneOf": [{"const": "a"}, {"type": "string"}]},
        ["oneOf whose parts may overlap at $"],
    ),
    ({"oneOf": [{}, True]}, ["oneOf whose parts may overlap at $"]),
    (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Cat": {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}},
                    "required": ["age", "kind"],
                },
                "Dog": {
                    "type": "object",
                    "properties": {"kind": {"enum": ["dog", "puppy"]}, "age": {"type": "integer"}},
                    "required": ["age", "kind"],
                },
            },
        },
        [],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                {"type": "object", "properties": {"kind": {"const": "dog"}}},
            ],
        },
        ["oneOf whose parts may overlap at $"],
    ),
    (
        {"type": "string", "pattern": "a(?=b)"},
        ["pattern at $, because the part '(?=b)' at the position 1 is incomplete or not supported"],
    ),
    ({"type": "string", "enum": ["a"]}, []),
    ({"type": ["string", "null"], "const": None}, []),
    ({"type": "object", "anyOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}, []),
    ({"$ref": "#/$defs/a", "title": "A", "type": "object"}, []),
    ({"type": [{}], "enum": 7, "anyOf": "x", "format": []}, ["anyOf", "format", "type"]),
]
# (schema, keyword that xgrammar ignores in this schema, text that violates the keyword)
IGNORED = [
    ({"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A", "maximum": 5}, "maximum", "9"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 3}, "minimum", "1"),
    ({"type": "integer", "anyOf": [{"type": "string"}, {"type": "integer"}]}, "type", '"x"'),
    ({"type": "string", "enum": ["a", 3]}, "type", "3"),
    ({"const": "abc", "maxLength": 2}, "maxLength", '"abc"'),
    ({"type": "string", "pattern": "^a*$", "minLength": 2}, "minLength", '"a"'),
    ({"type": "string", "format": "date", "pattern": "^a$"}, "pattern", '"2020-01-01"'),
    ({"type": "string", "format": "date", "minLength": 20}, "minLength", '"2020-01-01"'),
]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_keywords_that_are_not_enforced_are_listed(schema, expected):
    descriptions = unenforced_keywords(schema)
    if descriptions != expected:  # In some cases, `expected` contains only the keywords.
        assert [description.split()[0] for description in descriptions] == expected


@pytest.mark.parametrize(("schema", "keyword", "text"), IGNORED)
def test_keywords_that_xgrammar_ignores_because_of_other_keywords_are_listed(schema, keyword, text):
    (description,) = unenforced_keywords(schema)
    assert description.startswith(f"{keyword} next to ")
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    from xgrammar.testing import _is_grammar_accept_string

    # If this assertion fails, the installed version of xgrammar enforces the keyword.
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert _is_grammar_accept_string(grammar, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"minimum": 3}, "1"),
        ({"maxLength": 1}, '"xx"'),
        ({"pattern": "^a$"}, '"x"'),
        ({"format": "date"}, '"x"'),
        ({"minItems": 2}, "[]"),
        ({"required": ["a"]}, "{}"),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}'),
    ],
)
def test_keywords_that_xgrammar_ignores_without_a_type_are_listed(schema, text):
    (keyword,) = schema
    assert unenforced_keywords(schema) == [f"{keyword} without type at $"]
    assert not unenforced_keywords_of_answer(schema)
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    from xgrammar.testing import _is_grammar_accept_string

    # If this assertion fails, the installed version of xgrammar enforces the keyword.
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert _is_grammar_accept_string(grammar, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {}, "minItems": 1},
        {"properties": {"a": {}}, "required": ["a"], "maxProperties": 2},
        {"additionalProperties": {"type": "null"}, "minProperties": 1},
    ],
)
def test_keywords_of_an_implied_type_are_enforced(schema):
    assert not unenforced_keywords(schema)


def test_the_schema_of_an_answer_may_have_keywords_that_llguidance_enforces():
    assert not unenforced_keywords_of_answer({"pattern": "^a+$", "minLength": 2})
    (lookahead,) = unenforced_keywords_of_answer({"items": {"pattern": "^(?!a)"}})
    assert lookahead.startswith("pattern at $.items, because the part '(?!a)'")


def test_a_pattern_that_would_make_an_answer_invalid_json_is_refused_or_left_out(caplog):
    spec = {"schema": {"type": "string", "pattern": '^"+$'}}
    answer = {"type": "json_schema", "json_schema": spec}
    tag = HERMES.structural_tag(response_format=answer)
    assert tag["format"]["json_schema"] == {"type": "string"}
    assert "pattern at $" in caplog.text
    with pytest.raises(ConstraintError, match=r"pattern at \$, because"):
        HERMES.structural_tag(response_format={**answer, "json_schema": {**spec, "strict": True}})


@pytest.mark.parametrize("pattern", [r"\bword", "(?<!a)b", r"(a)\1"])
def test_a_pattern_that_xgrammar_refuses_is_left_out_if_the_request_is_not_strict(pattern):
    string = {"type": "string", "pattern": pattern}
    tag = HERMES.structural_tag([tool("f", ["a"], a=string)], "required")
    assert pattern not in json.dumps(tag).replace("\\\\", "\\")
    spec = {"schema": string, "strict": True}
    with pytest.raises(ConstraintError, match=r"pattern at \$, because"):
        HERMES.structural_tag(response_format={"type": "json_schema", "json_schema": spec})


def test_strict_requests_refuse_unenforced_keywords_and_other_requests_log_them(caplog):
    declared = tool("f", ["a"], a={"type": "array", "uniqueItems": True})
    strict = {**declared, "function": {**declared["function"], "strict": True}}
    with pytest.raises(ConstraintError, match=r"uniqueItems at \$.properties.a"):
        HERMES.structural_tag([strict], "auto")
    HERMES.structural_tag([declared], "required")
    assert "uniqueItems" in caplog.text
    spec = {"schema": {"not": {}}, "strict": True}
    with pytest.raises(ConstraintError, match="not at"):
        HERMES.structural_tag(response_format={"type": "json_schema", "json_schema": spec})


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma"])
@pytest.mark.parametrize("reference", ["#/$defs/A", "#/$defs/A~1b"])
def test_references_inside_arguments_are_resolved(reference, name):
    declared = tool("f", ["a"], a={"$ref": reference})
    integer = {"type": "integer"}
    declared["function"]["parameters"]["$defs"] = {"A": integer, "A/b": integer}
    fmt = get_format(name)
    tag = fmt.structural_tag([declared], "required")
    for text in Walker(fmt, tag, seed=7).texts():
        message = parse(text, format=fmt, tools=[declared])
        assert all("a" in json.loads(call.arguments) for call in message.tool_calls)


def test_fold_of_nothing_is_an_empty_message():
    assert fold([]).tool_calls == []


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", sorted(set(registry.TOOLS) - {"muse"}))
def test_the_structural_tag_for_many_optional_arguments_is_small(name, choice):
    types = ("string", "integer", "boolean")
    arguments = {
        f"argument_{number}": {"type": types[number % 3], "description": "The value. " * 9}
        for number in range(20)
    }
    num_tools, max_bytes_per_tool = 10, 10_000
    tools = [tool(f"tool_{number}", **arguments) for number in range(num_tools)]
    try:
        tag = get_format(tools=name).structural_tag(tools, choice)
    except ConstraintError:
        pytest.skip("the format cannot constrain tool calls inside other text")
    assert len(json.dumps(tag)) < num_tools * max_bytes_per_tool


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        (Keys(), '{"name": "'),
        (Keys(order=("arguments", "name")), '{"arguments": '),
        (Keys(id="id", order=("id", "name", "arguments")), '{"id": '),
        (Keys("function.name", "function.arguments"), '{"function": {"name": "'),
        (
            Keys("function.name", "function.arguments", order=("type", "name", "arguments")),
            '{"type": "function"',
        ),
    ],
)
def test_an_unmarked_object_is_recognised_by_its_first_characters(keys, start):
    fmt = Format("objects", Sections(tools=ToolSection((Call(JsonObject(keys)),))))
    tag = fmt.structural_tag(STRICT_TOOLS)
    assert tag["format"]["triggers"] == [start]
    assert all(inner["begin"].startswith(start) for inner in tag["format"]["tags"])


UNION_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "anyOf": [
                {"properties": {"code": {"type": "string", "enum": ["12"]}}, "required": ["code"]},
                {"$ref": "#/$defs/Place"},
            ],
            "$defs": {"Place": {"properties": {"at": {"type": "integer"}}, "required": ["at"]}},
        },
    },
}


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4"])
def test_a_call_has_the_arguments_of_one_member_of_the_union_of_parameters(name):
    fmt = get_format(tools=name)
    tag = fmt.structural_tag([UNION_TOOL], "required", parallel_tool_calls=False)
    found = set()
    for text in Walker(fmt, tag, seed=7).texts(max_texts=12):
        [call] = parse(text, format=fmt, tools=[UNION_TOOL]).tool_calls
        [(key, value)] = json.loads(call.arguments).items()
        assert value == "12" if key == "code" else isinstance(value, int), text
        found.add(key)
    assert found == {"code", "at"}


def test_the_quotes_of_strings_do_not_enclose_other_values():
    # A template that writes YAML encloses only strings in quotes: `city: "Rome"` and `days: 3`.
    without_quotes = TaggedArguments("{key}: ", "\n")
    body = TaggedArguments('{key}: "', '"\n', also=(without_quotes,), escapes="json")
    call = Call(body, open="<tool>\n", head="{name}\n", close="</tool>")
    fmt = Format("yaml", Sections(tools=ToolSection((call,))))
    properties = {"stay": TOOLS[1]["function"]["parameters"]["properties"]["at"]}
    properties["unit"] = {"enum": ["C", None, 3]}
    tools = [tool("f", list(properties), **properties)]
    tag = fmt.structural_tag(tools, "required", parallel_tool_calls=False)
    for text in Walker(fmt, tag, seed=8).texts(max_texts=12):
        [call] = parse(text, format=fmt, tools=tools).tool_calls
        arguments = json.loads(call.arguments)
        assert isinstance(arguments["stay"]["x"], int), text
        assert arguments["unit"] in ("C", None, 3), text


@pytest.mark.parametrize("prompt", ["", "<think>\n"], ids=["optional", "open"])
def test_the_content_after_reasoning_is_exactly_one_of_the_choices(prompt):
    choices = {"type": "choice", "choice": ["yes", "no"]}
    tag = THINKER.structural_tag(None, None, choices, prompt=prompt)
    for text in Walker(THINKER, tag, seed=9).texts(max_texts=12):
        assert parse(text, format=THINKER, prompt=prompt).content in ("yes", "no"), text


@pytest.mark.parametrize(
    ("name", "function", "argument"),
    [
        ("qwen3_coder", "my tool", "a"),
        ("qwen3_coder", "f", 'a"b'),
        ("kimi_k2", "a:b", "a"),
        ("pythonic", "my tool", "a"),
        ("pythonic", "f", "user[id]"),
    ],
)
def test_a_name_that_the_parser_cannot_read_is_refused(name, function, argument):
    tools = [tool(function, [argument], **{argument: {"type": "integer"}})]
    unreadable = function if function != "f" else argument
    with pytest.raises(ConstraintError, match="cannot be used in constrained output") as error:
        get_format(tools=name).structural_tag(tools, "required")
    assert unreadable in str(error.value).replace('\\"', '"')
    assert get_format(tools="hermes").structural_tag(tools, "required")


def test_a_regular_expression_that_is_not_enforced_is_refused_with_a_remedy_for_custom_tools():
    declared = tool("f", ["input"], input={"type": "string", "pattern": "^(?:[a-z]+)$"})
    declared["function"]["strict"] = True
    fmt = get_format(tools="qwen3_coder")
    with pytest.raises(ConstraintError, match="so remove the regular expression"):
        fmt.structural_tag([declared], "auto")


def test_an_optional_id_is_a_member_of_the_outer_object():
    keys = Keys("function.name", "function.arguments", id="id")
    fmt = Format("nested", Sections(tools=ToolSection((Call(JsonObject(keys), open="<c>"),))))
    tag = fmt.structural_tag(TOOLS[:1], "required", parallel_tool_calls=False)
    elements = tag["format"]["elements"]
    end_of_function, id_at_end, end_of_object = elements[-4:-1]
    assert end_of_function["value"] == end_of_object["value"] == "}"
    assert id_at_end["content"]["elements"][0]["value"] == ', "id": '


def test_definitions_with_many_references_to_each_other_take_little_time():
    definitions = {
        f"D{level}": {"anyOf": [{"$ref": f"#/$defs/D{level + 1}"}] * 200} for level in range(3)
    }
    parameters = {
        "$defs": {**definitions, "D3": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/$defs/D0"}},
    }
    start = time.process_time()
    assert json_types_of(parameters["properties"]["a"], parameters) == {"integer"}
    assert time.process_time() - start < 1


DEFINITIONS = {
    "A": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "S": {"type": "string", "enum": ["u", "v"]},
}


def strict_tool(argument):
    """Return a strict tool "f" whose argument "a" has the schema `argument`."""
    parameters = {
        "type": "object",
        "properties": {"a": argument},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


def assert_calls_match(fmt, tools, tag):
    """Assert that the arguments of generated calls match the schema of the first tool."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = tools[0]["function"]["parameters"]
    for text in Walker(fmt, tag, seed=1).texts():
        for call in parse(text, format=fmt, tools=tools).tool_calls:
            jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32", "lfm2", "functiongemma"])
@pytest.mark.parametrize(
    "argument",
    [
        {"$ref": "#/$defs/S"},
        {"$ref": "#/$defs/A"},
        {"type": "array", "items": {"$ref": "#/$defs/A"}},
        {"anyOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]},
        {"type": "string", "const": "z"},
        {"enum": ["a", 1, None]},
        {"type": ["string", "null"], "enum": ["a", "b"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    ],
    ids=str,
)
def test_the_arguments_of_a_strict_call_match_the_schema(name, argument):
    fmt, tools = get_format(name), [strict_tool(argument)]
    assert_calls_match(fmt, tools, fmt.structural_tag(tools, "required"))


@pytest.mark.parametrize("name", ["qwen3_coder", "lfm2", "functiongemma"])
def test_the_parameters_of_a_tool_may_be_a_reference(name):
    parameters = {"$ref": "#/$defs/A", "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    fmt = get_format(name)
    assert_calls_match(fmt, tools, fmt.structural_tag(tools, "required"))


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32", "functiongemma"])
@pytest.mark.parametrize(
    "argument",
    [
        {"type": "string", "maxLength": 2},
        {"type": "string", "pattern": "^a+$"},
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string"}]},
    ],
    ids=str,
)
def test_a_restriction_that_text_without_quotes_would_violate_is_reported(name, argument, caplog):
    fmt, tools = get_format(name), [strict_tool(argument)]
    with pytest.raises(ConstraintError, match=r"inside \$\.properties\.a, because the format does"):
        fmt.structural_tag(tools, "required")
    tools[0]["function"]["strict"] = False
    assert fmt.structural_tag(tools, "required") is not None
    assert "inside $.properties.a" in caplog.text


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("qwen3_coder", {"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}),
        ("qwen3_coder", {"type": "object", "default": ["x" * 10_000]}),
        ("qwen3_coder", {"enum": [f"choice {n}" for n in range(5000)]}),
        ("pythonic", {"type": "array", "items": {"const": "x" * 10_000}}),
        ("functiongemma", {"type": "object", "properties": {f"p{n}": {} for n in range(99)}}),
    ],
)
def test_a_definition_that_many_arguments_share_does_not_fill_the_memory(name, definition):
    arguments = {f"a{number}": {"$ref": "#/$defs/shared"} for number in range(5000)}
    parameters = {"properties": arguments, "$defs": {"shared": definition}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(ConstraintError, match="would exceed the limit of 4194304 characters"):
        get_format(name).structural_tag(tools, "required")


def test_a_warning_about_a_schema_is_one_short_line(caplog):
    names = ["evil\nERROR \x1b[2J", *(f"long {number} " * 99 for number in range(999))]
    tools = [tool("f\n", **{name: {"type": "array", "uniqueItems": True} for name in names})]
    HERMES.structural_tag(tools, "required")
    (line,) = caplog.text.splitlines()
    assert r"uniqueItems at $.properties.evil\nERROR \x1b[2J; uniqueItems at" in line
    assert line.endswith("; and 984 more")
    assert len(line) < 5000


def test_a_recursive_schema_for_unquoted_keys_is_refused():
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/T"}},
        "$defs": {"T": {"type": "object", "properties": {"child": {"$ref": "#/$defs/T"}}}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(ConstraintError, match="at most 100 values in total"):
        get_format("functiongemma").structural_tag(tools, "required")


def test_thousands_of_arguments_and_allowed_values_take_little_time():
    names = [f"argument_{number:05}" for number in range(20_000)]
    parameters = {
        "properties": {name: {"type": "integer"} for name in names},
        "required": [*reversed(names), ["no name"]],
    }
    start = time.process_time()

    schema = ToolSchema.of({"name": "f", "parameters": parameters})
    merged = merge_schemas({"enum": [*names, [1]]}, {"enum": [*reversed(names), [1]]})

    assert time.process_time() - start < 2
    assert schema.arguments.required_keys == names
    assert schema.arguments.optional_keys == []
    assert merged == {"enum": [*names, [1]]}
