import gc
import json
import time

import pytest
from nereid_backend.grammar.validate_answer import describe_violation

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_valid_text_has_no_violation():
    assert describe_violation('{"a": 1}', SCHEMA) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"a": NaN}', "is not JSON"),
        ('{"a": "x"}', r"$.a: 'x' is not of type 'integer'"),
        ("{}", "'a' is a required property"),
    ],
)
def test_a_violation_is_described_with_its_path(text, words):
    assert words in describe_violation(text, SCHEMA)


def doubled(depth, **keywords):
    """Return a schema in which each definition refers to the next definition twice."""
    definitions = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2, **keywords} for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "object"}}}


SLOW_PATTERN = "^(?:(a|a)*b|a*)$"
LONG = "a" * 60


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (LONG, {"pattern": SLOW_PATTERN}),
        ({LONG: 1}, {"patternProperties": {SLOW_PATTERN: {"type": "integer"}}}),
        (
            {LONG: 1},
            {"patternProperties": {SLOW_PATTERN: True}, "additionalProperties": False},
        ),
        ({}, doubled(40)),
        ({}, doubled(40, **{"$schema": "https://json-schema.org/draft/2020-12/schema"})),
    ],
)
def test_a_schema_that_takes_exponential_time_ends_at_the_limit(value, schema):
    started_s = time.process_time()
    assert "took longer than" in describe_violation(json.dumps(value), schema)
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize(
    ("value", "problem"), [("2026-11-29", None), ("yesterday", "does not match")]
)
def test_a_pattern_is_searched(value, problem):
    violation = describe_violation(json.dumps(value), {"pattern": r"^\d{4}-\d\d-\d\d$"})
    assert violation is None if problem is None else problem in violation


def test_references_are_not_fetched():
    assert "cannot be checked" in describe_violation("1", {"$ref": "http://127.0.0.1:9/x"})


TUPLE = {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}}
EXCLUSIVE = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
INCLUSIVE = {"type": "integer", "minimum": -5, "exclusiveMinimum": False}


@pytest.mark.parametrize(
    ("text", "schema", "is_valid"),
    [
        ("[1, null]", TUPLE, True),
        ('["a"]', TUPLE, False),
        ("[1, 2]", TUPLE, False),
        ("4", EXCLUSIVE, True),
        ("3", EXCLUSIVE, False),
        ("-4", INCLUSIVE, True),
        ("-6", INCLUSIVE, False),
        ("1", {"exclusiveMaximum": True}, True),
        ("1", {"exclusiveMaximum": 1}, False),
    ],
)
def test_the_forms_of_older_drafts_are_checked(text, schema, is_valid):
    assert (describe_violation(text, schema) is None) == is_valid


def test_the_validators_of_large_schemas_are_not_kept_in_memory():
    properties = {f"property {number}": {"type": "string"} for number in range(10_000)}
    violation = describe_violation('{"property 1": 1}', {"properties": properties})
    assert "1 is not of type 'string'" in violation
    kept_schemas = [
        kept for kept in gc.get_objects() if isinstance(kept, dict) and "property 9" in kept
    ]
    assert kept_schemas == [properties]
