"""Tests that a custom tool's regular expression is either enforced or refused."""

import itertools
import json
import re

import pytest
import xgrammar
from nereid_client.errors import FieldError
from nereid_client.protocol.custom_tools import CustomTool, to_function
from nereid_client.protocol.input_patterns import whole_input_pattern
from nereid_client.streaming.custom_tool_input import decode_input
from xgrammar.testing import _is_grammar_accept_string

ALPHABET = "a7.\n-é"
INPUTS = ["".join(text) for size in range(4) for text in itertools.product(ALPHABET, repeat=size)]


def grammar_of(regex):
    """Return the grammar that the backend uses to constrain the arguments of a custom tool."""
    tool_format = {"type": "grammar", "syntax": "regex", "definition": regex}
    function = to_function(CustomTool(name="f", format=tool_format), "tools[0]")["function"]
    node = {"type": "json_schema", "json_schema": function["parameters"]}
    tag = {"type": "structural_tag", "format": node}
    return xgrammar.Grammar.from_structural_tag(json.dumps(tag))


@pytest.mark.parametrize(
    "regex",
    [
        *("a", "a|7", "^a$", "^a|7$", "^a$|^7$", "a*", "a+7?", "(a|7){2}", "(?:a7){0,1}"),
        *(r"\d+", r"\w", r"\D\d", r"a\.7", ".", ".*", "[a7]+", "[^a]", "[.-]", r"[\d.]+", "a|"),
        *("(?P<one>a)7", "(?<one>a)7", r"\x61", r"\u00e9", "é+", "a+?", r"[^\n]+"),
        *("a{2}", "a{1,}", "(a(7|-))*", r"\-", "()a"),
    ],
)
def test_the_whole_input_must_match(regex):
    grammar = grammar_of(regex)
    python_regex = re.compile(regex.replace("(?<one>", "(?P<one>"), re.ASCII)
    for text in INPUTS:
        arguments = f'{{"input": "{text}"}}'
        assert decode_input(arguments) == text
        is_match = python_regex.fullmatch(text) is not None
        # A JSON string cannot contain a line break, so the grammar never accepts one.
        is_expected = is_match and "\n" not in text
        assert _is_grammar_accept_string(grammar, arguments) == is_expected, text


@pytest.mark.parametrize("regex", ['["a7]+', r"[\\a]", '[^a"]', r"[^\\]+", ".+", r"\S", r"\W"])
def test_sets_do_not_match_the_characters_that_json_escapes(regex):
    grammar = grammar_of(regex)
    for text in ('"', "\\", '\\"', "\\\\", 'a"', "a\\", "\\a"):
        assert not _is_grammar_accept_string(grammar, f'{{"input": "{text}"}}'), text


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("(ab", "'(ab' at the position 0 has no closing parenthesis"),
        ("a(?=b)", "'(?=b)' at the position 1 is incomplete or not supported"),
        ("a^b", "'^b' at the position 1 is an anchor inside the expression"),
        (r"a\nb", r"'\\nb' at the position 1 requires a quotation mark, a backslash or a control"),
    ],
)
def test_an_expression_that_cannot_be_enforced_is_refused(regex, problem):
    with pytest.raises(FieldError) as raised:
        whole_input_pattern(regex, "tools[0].format.definition")
    assert raised.value.field == "tools[0].format.definition"
    assert str(raised.value).startswith(
        "tools[0].format.definition must be a regular expression that can be enforced, but the "
        f"part {problem}"
    )


def test_an_expression_that_is_too_long_is_refused():
    assert whole_input_pattern("a" * 4096, "x") == f"^(?:{'a' * 4096})$"
    with pytest.raises(FieldError, match=r"at most 4096 characters, but the request has 4097"):
        whole_input_pattern("a" * 4097, "x")
