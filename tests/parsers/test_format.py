"""Tests that a format refuses invalid parts when they are created."""

import pytest
from nereid_parsers import STRICT, FormatError, get_format
from nereid_parsers.format import (
    Call,
    JsonArguments,
    JsonObject,
    Keys,
    Messages,
    NestedTags,
    PatternField,
    Reasoning,
    Route,
    Source,
    Stage,
    TaggedArguments,
    ToolSection,
    Wrapper,
    split_pattern,
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Reasoning(" ", "</think>"), "Reasoning.open is ' '"),
        (
            lambda: Wrapper("", "\n"),
            "at least one of the two markers must contain a visible character",
        ),
        (lambda: Keys("function..name"), "has an empty part"),
        (lambda: Keys(order=("name",)), "must contain 'name' and 'arguments'"),
        (lambda: Keys(order=("name", "name", "arguments")), "must contain 'name' and 'arguments'"),
        (lambda: Keys(order=("name", "arguments", "index")), "must contain 'name' and 'arguments'"),
        (lambda: Keys(order=("id", "name", "arguments")), "Keys.id is None"),
        (lambda: TaggedArguments("<p>", "</p>"), "must contain {key}"),
        (lambda: TaggedArguments("<p={key}>", " "), "TaggedArguments.close is ' '"),
        (lambda: TaggedArguments(" {key} ", ";"), "a visible character before or after the key"),
        (lambda: TaggedArguments("{key}=", " "), "a marker must contain a visible character"),
        (lambda: Call(JsonArguments()), "must contain the field {name}"),
        (
            lambda: Call(JsonObject(), head="{name}"),
            "A JsonObject body already contains the function's name",
        ),
        (
            lambda: Call(JsonObject(), head="{nonsense}"),
            "contains '{nonsense}', which is not a field",
        ),
        (lambda: Call(JsonObject(), head="{name"), "contains '{', which is not a field"),
        (lambda: Call(JsonArguments(), head="{name}{id}"), "two fields without text between them"),
        (lambda: NestedTags(" "), "NestedTags.tag_prefix is ' '"),
        (lambda: Call(NestedTags("~"), head="{name}"), "Call.close is '', but must contain a mar"),
        (lambda: ToolSection(()), "at least one Call"),
        (lambda: ToolSection((Call(JsonObject()),), close="</c>"), "also needs an opening marker"),
        (lambda: Route(Stage.CALLS, "to="), "must contain {name}"),
        (lambda: Messages(" ", "<m>", (Route(Stage.CONTENT, "a"),)), "Messages.start is ' '"),
        (lambda: Messages("<s>", "", (Route(Stage.CONTENT, "a"),)), "header_end must not be empty"),
        (lambda: Messages("<s>", "<m>", ()), "at least one Route"),
    ],
)
def test_an_invalid_declaration_is_refused(make, words):
    with pytest.raises(FormatError, match=words):
        make()


def test_patterns_split_into_literals_and_fields():
    assert split_pattern("<f={name}>{{}}") == ("<f=", PatternField("name"), ">{}")
    assert split_pattern("") == ()


@pytest.mark.parametrize(
    ("call", "trigger"),
    [
        (Call(JsonObject(), open="<c>\n"), "<c>"),
        (Call(JsonArguments(), head="<f={name}>"), "<f="),
        (Call(JsonArguments(), head="{name}>"), ""),
        (Call(JsonObject()), ""),
    ],
)
def test_a_calls_trigger_is_its_first_marker(call, trigger):
    assert call.trigger == trigger


def test_formats_are_values():
    fmt = get_format("hermes")
    assert fmt.with_policy(STRICT).policy is STRICT
    assert fmt.with_policy(fmt.policy) == fmt
    assert hash(fmt) == hash(fmt.with_policy(fmt.policy))
    assert str(Source("a", "2025")) == "a, 2025"
    assert str(Source("a")) == "a"
