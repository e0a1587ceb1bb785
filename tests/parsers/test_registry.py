"""Tests of the registry: names, aliases, pairs of names, and errors."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
from nereid_parsers import FormatError, UnknownFormatError, format_names, formats, get_format
from nereid_parsers.format import STRICT, Messages, Sections
from nereid_parsers.formats.registry import (
    REASONING,
    REASONING_ALIASES,
    TOOL_ALIASES,
    TOOLS,
    listing,
)

FIRST_REASONING = [
    "deepseek-r1",
    "deepseek-v3",
    "glm45",
    "gpt-oss",
    "kimi",
    "kimi_k2",
    "qwen3",
    "qwen3-thinking",
    "minimax",
    "minimax-append-think",
    "step3",
    "nano_v3",
    "interns1",
]
FIRST_TOOLS = [
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "glm",
    "glm45",
    "glm47",
    "gpt-oss",
    "kimi_k2",
    "llama3",
    "mimo",
    "mistral",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "step3",
    "minimax-m2",
    "interns1",
]


@pytest.mark.parametrize("name", FIRST_REASONING)
def test_the_common_reasoning_names_are_registered(name):
    assert get_format(reasoning=name).name == name.replace("-", "_")


@pytest.mark.parametrize("name", FIRST_TOOLS)
def test_the_common_tool_names_are_registered(name):
    assert get_format(tools=name).sources


def test_hyphens_and_underscores_are_equal():
    assert get_format(tools="minimax-m2") == get_format(tools="minimax_m2")
    assert get_format("gpt-oss") == get_format("gpt_oss")


def test_aliases_name_the_same_parts():
    assert get_format(tools="qwen3_xml").layout == get_format(tools="qwen3_coder").layout
    assert get_format(tools="deepseekv31").layout == get_format(tools="deepseek_v31").layout
    assert get_format(reasoning="nemotron_3").layout == get_format(reasoning="nano_v3").layout


def test_a_single_name_selects_both_parts_that_it_names():
    both = get_format("mistral").layout
    assert both.reasoning is not None
    assert both.tools is not None
    assert get_format("hermes").layout.reasoning is None
    assert get_format("qwen3").layout.tools is None


def test_two_names_make_one_format():
    fmt = get_format(reasoning="deepseek_r1", tools="deepseek_v31")
    assert isinstance(fmt.layout, Sections)
    assert fmt.layout.reasoning == get_format("deepseek_r1").layout.reasoning
    assert fmt.layout.tools == get_format(tools="deepseek_v31").layout.tools
    assert len(fmt.sources) == 2


def test_two_halves_of_one_message_format_combine():
    assert isinstance(get_format(reasoning="openai_gptoss", tools="openai").layout, Messages)


@pytest.mark.parametrize(
    "names",
    [
        {"reasoning": "gpt_oss", "tools": "hermes"},
        {"reasoning": "qwen3", "tools": "gpt_oss"},
        {"reasoning": "gpt_oss", "tools": "muse"},
    ],
)
def test_a_message_format_cannot_be_combined_with_another_format(names):
    with pytest.raises(FormatError, match=r"cannot be combined.*get_format\('gpt_oss'\)"):
        get_format(**names)


def test_a_tool_name_may_add_the_reasoning_of_its_family():
    assert get_format(tools="granite").layout.reasoning is not None


@pytest.mark.parametrize("kwargs", [{"name": "qwen3_codr"}, {"reasoning": "qwen"}, {"tools": "no"}])
def test_the_error_for_an_unknown_name_lists_similar_names(kwargs):
    with pytest.raises(UnknownFormatError, match="There is no format with the name") as caught:
        get_format(**kwargs)
    if "name" in kwargs:
        assert "qwen3_coder" in str(caught.value)
    assert str(UnknownFormatError()) == ""


def test_a_name_and_separate_names_exclude_each_other():
    with pytest.raises(FormatError, match="Remove the name or the keyword arguments"):
        get_format("qwen3", tools="hermes")
    with pytest.raises(FormatError, match="requires the name of a format"):
        get_format()


def test_a_policy_can_be_given():
    assert get_format("deepseek_v3", policy=STRICT).policy is STRICT


def test_every_listed_name_has_a_format_with_a_source():
    for name in format_names():
        assert get_format(name).sources[0].text
    for row in listing():
        entries = REASONING if row.kind == "reasoning" else TOOLS
        assert str(entries[row.name].source) == str(row.source)
        assert row.source.date


def test_aliases_refer_to_registered_names():
    assert set(REASONING_ALIASES.values()) <= set(REASONING)
    assert set(TOOL_ALIASES.values()) <= set(TOOLS)
    assert not set(REASONING_ALIASES) & set(REASONING)
    assert not set(TOOL_ALIASES) & set(TOOLS)


def test_every_declared_entry_is_registered_and_no_name_is_declared_twice():
    modules = [
        import_module(f"nereid_parsers.formats.{module.name}")
        for module in iter_modules(formats.__path__)
        if module.name != "registry"
    ]
    for table, registered in (("REASONING", REASONING), ("TOOLS", TOOLS)):
        names = [name for module in modules for name in getattr(module, table, {})]
        assert sorted(names) == sorted(registered)
