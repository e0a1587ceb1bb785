"""Tests that chat templates are rendered as transformers renders them."""

import json

import pytest
from nereid_parsers.template.sandbox.compile_template import CompiledTemplate, RenderRefused
from nereid_parsers.template.sandbox.limits import Budget, LimitError
from parsers.template.support import TEMPLATES

SAME = json.loads((TEMPLATES / "rendered.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "expected"), SAME.values(), ids=SAME)
def test_it_renders_the_same(text, expected):
    assert CompiledTemplate(text, Budget()).render({}) == expected


@pytest.mark.parametrize(("text", "expected"), SAME.values(), ids=SAME)
def test_transformers_renders_the_same(text, expected):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.utils.chat_template_utils import _compile_jinja_template

    assert _compile_jinja_template(text).render() == expected


def test_changing_a_list_is_allowed_and_recorded():
    template = CompiledTemplate("{% set a = [] %}{% set _ = a.append(1) %}{{ a }}", Budget())
    assert template.changes_lists
    assert template.render({}) == "[1]"


def test_a_dict_may_not_be_changed():
    with pytest.raises((RenderRefused, LimitError)):
        CompiledTemplate("{{ {}.update(a=1) }}", Budget()).render({})


def test_names_and_constants_are_recorded():
    template = CompiledTemplate("{% if mode == 'on' %}<x>{% endif %}", Budget())
    assert "mode" in template.names
    assert template.compared["mode"] == ("on",)
    assert "<x>" in template.literals


@pytest.mark.parametrize(
    ("value", "type_name"),
    [("missing", "Undefined"), ("messages[0].missing", "Undefined"), ("range(3)", "range")],
)
def test_the_error_for_a_value_that_is_not_json_names_the_type_of_the_value(value, type_name):
    template = CompiledTemplate("{{ " + value + " | tojson }}", Budget())
    with pytest.raises(RenderRefused, match=f"tojson cannot write a value of the type {type_name}"):
        template.render({"messages": [{}]})


def test_a_missing_include_refuses_the_rendering():
    with pytest.raises(RenderRefused):
        CompiledTemplate("{% include 'other' %}", Budget()).render({})
