"""Tests that schemas that are rewritten for xgrammar accept the same values as before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nereid_parsers.constraints.enforceable_schema import rewrite_for_xgrammar
from nereid_parsers.constraints.unenforced_keywords import unenforced_keywords

ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TREE = {"allOf": [{"$ref": "#/$defs/tree"}, {"type": "object"}]}


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"type": "string"}, {"type": "string"}),
        (True, True),
        ({"allOf": [{"type": "integer"}, {"maximum": 5}]}, {"type": "integer", "maximum": 5}),
        ({"allOf": [{"minLength": 1}, {"minLength": 3}]}, {"minLength": 3}),
        ({"allOf": [{"type": ["integer", "null"]}, {"type": "number"}]}, {"type": "integer"}),
        ({"allOf": [{"enum": [1, "a"]}], "type": "integer"}, {"enum": [1], "type": "integer"}),
        (
            {"items": {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}},
            {"items": {"multipleOf": 12}},
        ),
        (
            {"allOf": [ADDRESS, {"properties": {"zip": {}}, "required": ["zip"]}]},
            {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {}},
                "required": ["city", "zip"],
            },
        ),
        (
            {"allOf": [{**ADDRESS, "additionalProperties": False}, {"properties": {"zip": {}}}]},
            {**ADDRESS, "additionalProperties": False},
        ),
        (
            {"$defs": {"a": ADDRESS}, "allOf": [{"$ref": "#/$defs/a"}, {"maxProperties": 2}]},
            {"$defs": {"a": ADDRESS}, **ADDRESS, "maxProperties": 2},
        ),
        ({"allOf": [{"$ref": "#/$defs/a"}], "title": "A"}, {"$ref": "#/$defs/a", "title": "A"}),
        (
            {
                "$defs": {"a": {"minimum": 1}},
                "allOf": [{"allOf": [{"$ref": "#/$defs/a"}]}, {"maximum": 5}],
            },
            {"$defs": {"a": {"minimum": 1}}, "minimum": 1, "maximum": 5},
        ),
        (
            {"$defs": {"a": {"minimum": 1}}, "items": {"$ref": "#/$defs/a", "maximum": 5}},
            {"$defs": {"a": {"minimum": 1}}, "items": {"maximum": 5, "minimum": 1}},
        ),
        (
            {"$defs": {"a/b ~": {"minimum": 1}}, "items": {"$ref": "#/$defs/a~1b%20~0"}},
            {"$defs": {"a/b ~": {"minimum": 1}}, "items": {"minimum": 1}},
        ),
        ({"allOf": [{"enum": [1, True, [0]]}, {"enum": [True, [0]]}]}, {"enum": [True, [0]]}),
        ({"type": "number", "multipleOf": 5.0}, {"type": "integer", "multipleOf": 5}),
        (
            {"properties": {"default": {"allOf": [{"type": "integer"}, {"maximum": 5}]}}},
            {"properties": {"default": {"type": "integer", "maximum": 5}}},
        ),
        (
            {"type": "integer", "multipleOf": 5, "exclusiveMinimum": 5, "maximum": 20.5},
            {"enum": [10, 15, 20]},
        ),
        ({"type": "integer", "minimum": 0.5}, {"type": "integer", "minimum": 1}),
        (
            {"type": ["integer", "null"], "maximum": 1.5},
            {"type": ["integer", "null"], "maximum": 1},
        ),
        ({"type": ["integer", "number"], "maximum": 1.5},) * 2,
        (
            {"items": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 10**400}},
            {"items": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 2**63 - 1}},
        ),
        (
            {"type": "integer", "exclusiveMinimum": -(10**20), "maximum": 2**64 - 1},
            {"type": "integer", "exclusiveMinimum": -(2**63), "maximum": 2**63 - 1},
        ),
        (
            {"items": [{"type": "string"}, {"type": "null"}], "additionalItems": False},
            {"prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
        ),
        (
            {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
            {"type": "integer", "exclusiveMinimum": 3},
        ),
        (
            {"type": "number", "maximum": 3, "exclusiveMaximum": False},
            {"type": "number", "maximum": 3},
        ),
        (
            {"items": {"type": "object", "properties": None, "required": None}},
            {"items": {"type": "object"}},
        ),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b", "a"]},
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "a"]},
        ),
        (
            {"type": "object", "required": ["b"], "additionalProperties": {"type": "null"}},
            {
                "type": "object",
                "required": ["b"],
                "additionalProperties": {"type": "null"},
                "properties": {"b": {"type": "null"}},
            },
        ),
    ],
)
def test_a_schema_is_rewritten_and_then_enforced(schema, rewritten):
    assert rewrite_for_xgrammar(schema) == rewritten
    rest = [part for part in unenforced_keywords(rewritten) if "without type" not in part]
    assert not rest or rest == ["multipleOf at $.items"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"pattern": "a"}, {"maxLength": 3}]},
        {"allOf": [{"properties": {"a": False}}, {"properties": {"b": {}}}]},
        {"$ref": "https://a.example/schema", "maximum": 5},
        {"allOf": [{"anyOf": [{}, {}]}, {"maxLength": 3}]},
        {"allOf": [{"$ref": "https://a.example/schema"}, {}]},
        {"allOf": [{"$ref": "#/$defs/missing"}, {}]},
        {"allOf": [{"required": 5}, {"required": ["a"]}]},
        {"allOf": [{"type": [{}]}, {"type": "string"}]},
        {"allOf": [5, {}]},
        {"allOf": [{"items": True}, {"items": False}]},
        {"allOf": [{"properties": {"a": False}, "required": ["a"]}, {"properties": {"a": {}}}]},
        {"allOf": [{"patternProperties": {"^a": {}}}, {"properties": {"a": {}}}]},
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 5, "minimum": 0},
        {"type": "integer", "multipleOf": 10**400},
        {"type": "integer", "multipleOf": 10**400, "minimum": 5, "maximum": 9},
        {"type": "integer", "multipleOf": 10**400, "minimum": 5.0, "maximum": 9},
        {"type": "integer", "multipleOf": 5000},
        {"type": "integer", "multipleOf": "5"},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20, "not": {"const": 10}},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20, "const": 10},
        {"allOf": [{"items": {"maximum": 5}}, {"prefixItems": [{"type": "integer"}]}]},
        {"properties": {"a": {"minimum": 5}}},
        {"items": {"required": ["a"]}},
        {"type": "object", "required": ["a"], "patternProperties": {"^a": {}}},
        {"maxItems": 2},
        {"type": "object", "dependencies": {"a": ["b"]}},
        {"$dynamicRef": "#a"},
        {"$ref": "https://a.example/schema"},
    ],
)
def test_what_cannot_be_rewritten_stays_and_is_reported(schema):
    assert rewrite_for_xgrammar(schema) == schema
    assert unenforced_keywords(schema)


@pytest.mark.parametrize("keyword", ["allOf", "properties"])
def test_definitions_that_double_at_each_level_are_not_all_inlined(keyword):
    definitions = {"d40": {"type": "object"}}
    for level in range(40):
        reference = {"$ref": f"#/$defs/d{level + 1}", "maxProperties": 9}
        inner = [reference, reference] if keyword == "allOf" else {"a": reference, "b": reference}
        definitions[f"d{level}"] = {"type": "object", keyword: inner}
    schema = {"$defs": definitions, "$ref": "#/$defs/d0", "minProperties": 1}
    rewritten = rewrite_for_xgrammar(schema)
    assert len(json.dumps(rewritten)) < 1_000_000
    assert unenforced_keywords(rewritten)


def test_a_long_chain_of_references_stays_and_is_reported():
    definitions = {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}, {"minimum": level}]}
        for level in range(500)
    }
    definitions["d500"] = {"type": "integer"}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0", "maximum": 9}}, "$defs": definitions}
    rewritten = rewrite_for_xgrammar(schema)
    assert rewritten["properties"]["a"] == schema["properties"]["a"]
    assert "maximum next to $ref at $.properties.a" in unenforced_keywords(rewritten)


def test_thousands_of_members_of_all_of_are_not_merged_because_this_would_take_minutes():
    members = [{"properties": {f"p{number}": {"type": "string"}}} for number in range(3000)]
    assert rewrite_for_xgrammar({"allOf": members})["allOf"] == members


def test_many_references_to_a_large_definition_do_not_fill_the_memory():
    large = {"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}
    member = {"$ref": "#/$defs/large", "required": ["p1"]}
    schema = {
        "$defs": {"large": large},
        "properties": {f"q{number}": member for number in range(99)},
    }
    rewritten = rewrite_for_xgrammar(schema)
    num_merged = sum("properties" in inner for inner in rewritten["properties"].values())
    assert 0 < num_merged < 50
    assert rewritten["properties"]["q98"] == member


def test_multiples_with_thousands_of_digits_are_not_merged():
    members = [{"type": "integer", "multipleOf": 10**4000 + odd} for odd in (1, 3)]
    rewritten = rewrite_for_xgrammar({"allOf": members})
    assert json.loads(json.dumps(rewritten)) == {"allOf": members}


def test_a_schema_that_is_nested_too_deeply_to_be_examined_is_reported():
    schema = {"not": {}}
    for _ in range(100):
        schema = {"items": schema}
    assert any("inside 65 other schemas" in found for found in unenforced_keywords(schema))


def test_a_recursive_schema_is_inlined_once():
    tree = {"type": "object", "properties": {"left": TREE, "right": TREE}}
    found = rewrite_for_xgrammar({"$defs": {"tree": tree}, **TREE})
    assert found["properties"]["left"] == TREE


_PARTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["integer", "number", "string", "object", ["string", "integer"]]),
        "minimum": st.integers(-6, 6),
        "exclusiveMaximum": st.integers(-6, 9),
        "multipleOf": st.sampled_from([1, 2, 3.0, 0.5]),
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(0, 4),
        "enum": st.lists(st.sampled_from([1, 2, "a", "bb"]), min_size=1, max_size=3),
        "properties": st.dictionaries(
            st.sampled_from("ab"),
            st.sampled_from([True, {"type": "integer"}, {"type": "number", "minimum": 2}]),
        ),
        "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
    },
)
_VALUES = st.one_of(
    st.integers(-8, 12),
    st.sampled_from([0.5, 2.0, 3.5, "", "a", "bb", "ccc", None]),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([1, 2, 3.5, "a"])),
)


@given(
    parts=st.lists(_PARTS, min_size=1, max_size=3),
    others=_PARTS,
    values=st.lists(_VALUES, min_size=5, max_size=20),
)
def test_the_rewritten_schema_accepts_the_same_values(parts, others, values):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**others, "allOf": parts}
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(rewrite_for_xgrammar(schema))
    for value in values:
        assert before.is_valid(value) == after.is_valid(value), value
