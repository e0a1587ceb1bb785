import pytest
from nereid_backend.grammar.validate_answer import describe_violation

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_fitting_text_has_no_problem():
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
def test_a_problem_is_told_with_its_place(text, words):
    assert words in describe_violation(text, SCHEMA)


def test_references_are_not_fetched():
    assert "cannot be checked" in describe_violation("1", {"$ref": "http://127.0.0.1:9/x"})
