"""Tests that xgrammar enforces the regular expressions that `check_pattern` accepts."""

import itertools
import json
import re

import pytest
from nereid_parsers.constraints.constrain_nodes import json_schema
from nereid_parsers.constraints.enforceable_pattern import (
    PatternError,
    check_pattern,
    split_pattern,
)

# All strings of at most three of these characters are tried. JSON must escape the last two.
ALPHABET = ("a", "7", ".", "-", "é", '"', "\n")
STRINGS = ["".join(text) for size in range(4) for text in itertools.product(ALPHABET, repeat=size)]


def grammar_of(schema):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    tag = {"type": "structural_tag", "format": json_schema(schema)}
    return xgrammar.Grammar.from_structural_tag(json.dumps(tag))


def accepts(grammar, text):
    from xgrammar.testing import _is_grammar_accept_string

    return _is_grammar_accept_string(grammar, text)


@pytest.mark.parametrize(
    "regex",
    [
        *("a", "a|7", "^a$", "^a|7$", "^a$|^7$", "a*", "a+7?", "(a|7){2}", "(?:a7){0,1}", "a|"),
        *(r"\d+", r"\w", r"\D\d", r"a\.7", ".", ".*", "[a7]+", "[^a]", "[.-]", r"[\d.]+", r"\S"),
        *("(?<one>a)7", r"\x61", r"\u00e9", "é+", "a+?", r"[^\n]+", "(a(7|-))*", "()a", '["a]+'),
    ],
)
def test_what_a_grammar_lets_the_model_write_is_json_and_matches_the_pattern(regex):
    assert check_pattern(regex) is None
    grammar = grammar_of({"type": "string", "pattern": regex})
    python_regex = re.compile(regex.replace("(?<one>", "(?P<one>"))
    # Try each string with and without JSON escapes. A string without escapes may be invalid JSON,
    # which the grammar must reject.
    texts = [json.dumps(string, ensure_ascii=False) for string in STRINGS]
    texts += [f'"{string}"' for string in STRINGS]
    accepted_texts = [text for text in texts if accepts(grammar, text)]
    assert accepted_texts
    for text in accepted_texts:
        assert python_regex.search(json.loads(text)), text


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("(ab", "'(ab' at the position 0 has no closing parenthesis"),
        ("a((b)", "'((b)' at the position 1 has no closing parenthesis"),
        ("ab)", "')' at the position 2 has no opening parenthesis"),
        ("[ab", "'[ab' at the position 0 is incomplete or not supported"),
        ("[]a]", "'[]a]' at the position 0 is incomplete or not supported"),
        ("a\\", r"'\\' at the position 1 is incomplete or not supported"),
        ("a{x}", "'{x}' at the position 1 is incomplete or not supported"),
        ("*a", "'*a' at the position 0 repeats nothing"),
        ("a(+)", "'+)' at the position 2 repeats nothing"),
        ("a|?", "'?' at the position 2 repeats nothing"),
        ("a**", "'*' at the position 2 repeats nothing"),
        ("a++", "'+' at the position 2 repeats nothing"),
        ("a(?=b)", "'(?=b)' at the position 1 is incomplete or not supported"),
        ("(?<!a)b", "'(?<!a)b' at the position 0 is incomplete or not supported"),
        ("(?i)a", "'(?i)a' at the position 0 is incomplete or not supported"),
        (r"\bword", r"'\\bword' at the position 0 is not supported"),
        (r"\Aa", r"'\\Aa' at the position 0 is not supported"),
        (r"(a)\1", r"'\\1' at the position 3 is not supported"),
        (r"\p{L}", r"'\\p{L}' at the position 0 is not supported"),
        (r"[\p{L}]", r"'[\\p{L}]' at the position 0 contains \p, which is not supported"),
        (r"\ud83d", r"'\\ud83d' at the position 0 is half of a surrogate pair"),
        ("[[:alpha:]]", "'[[:alpha:]]' at the position 0 contains another set"),
        ("[a-z&&[^b]]", "'[a-z&&[^b]]' at the position 0 contains another set"),
        ("[^a\n]", r"'[^a\n]' at the position 0 contains a control character, which must be"),
        ("a^b", "'^b' at the position 1 is an anchor inside the expression"),
        ("(^a)", "'^a)' at the position 1 is an anchor inside the expression"),
    ],
)
def test_the_first_part_that_is_not_enforced_is_named(regex, problem):
    with pytest.raises(PatternError) as caught:
        split_pattern(regex)
    assert str(caught.value).startswith(f"the part {problem}")
    assert not caught.value.needs_json_escape


@pytest.mark.parametrize(
    "regex",
    ['a"b', r"\\", r"\x5c", r"a\nb", "a\tb", r"\x0a", r"[\n\t]+", '["]', r"[\x22\\]", r"\""],
)
def test_a_grammar_leaves_out_a_pattern_that_would_let_the_model_write_wrong_json(regex):
    error = check_pattern(regex)
    assert error is not None
    assert error.needs_json_escape
    string = {"type": "string", "pattern": regex}
    for name in ("pattern", "default"):  # A property can have the name of a keyword.
        schema = {"type": "object", "properties": {name: string}, "required": [name]}
        grammar = grammar_of(schema)
        assert accepts(grammar, f'{{"{name}": "any string"}}')
        assert not accepts(grammar, f'{{"{name}": "a"b"}}')
        assert not accepts(grammar, f'{{"{name}": "a\nb"}}')


def test_a_very_long_pattern_is_left_out_of_a_grammar():
    string = {"type": "string", "pattern": "(a|b)*" * 20_000}
    grammar = grammar_of({"type": "object", "properties": {"a": string}, "required": ["a"]})
    assert accepts(grammar, '{"a": "any string"}')
    with pytest.raises(PatternError, match="expression that exceeds the limit of 65536 characters"):
        split_pattern(string["pattern"])
