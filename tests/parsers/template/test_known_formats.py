"""Tests of the parts of a format that the analysis takes from the registry of formats.

A chat template does not show these parts.
"""

import json

import pytest
from nereid_parsers import analyze_template, get_format, parse
from nereid_parsers.template import format_for_checkpoint
from parsers.template.support import TOOLS, analysis_of, source

# A template that offers tools and renders their results, but no calls.
NO_CALLS = (
    "{%- if tools %}{{ '<|system|>LIST_OPEN' + tools | tojson + 'LIST_CLOSE<|end|>' }}{% endif %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ 'RESULT_OPEN' + m.content + 'RESULT_CLOSE' if m.role == 'tool' else m.content }}"
    "{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def template_without_calls(tools=("Tools: ", ""), result=("", "")):
    """Return a template whose tools and results have the given opening and closing markers."""
    text = NO_CALLS.replace("LIST_OPEN", tools[0]).replace("LIST_CLOSE", tools[1])
    return text.replace("RESULT_OPEN", result[0]).replace("RESULT_CLOSE", result[1])


def names_of_calls(fmt, text):
    """Parse a text, and return the names of the tools that it calls."""
    message = parse(text, format=fmt, tools=TOOLS)
    return [call.name for call in message.tool_calls]


# ---- the spellings of a family -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tagged_parameters", "<function=list_all>\n</function>\n</tool_call>"),
        ("reasoning_parts", '[TOOL_CALLS][{"name": "list_all", "arguments": {}}]'),
        (
            "python_list",
            '<|tool_call_start|>[{"name": "list_all", "arguments": {}}]<|tool_call_end|>',
        ),
    ],
)
def test_an_inferred_format_accepts_the_spellings_of_its_family(name, text):
    assert names_of_calls(analysis_of(name).format, text) == ["list_all"]


def test_an_inferred_format_accepts_the_keys_of_its_family():
    text = (
        '<|action_start|><|plugin|>\n{"name": "save", "arguments": {"text": "a"}}<|action_end|>\n'
    )
    message = parse(text, format=analysis_of("plugin_action").format, tools=TOOLS)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"text": "a"}]


def test_constrained_output_contains_only_the_spelling_of_the_template():
    calls = analysis_of("tagged_parameters").format.layout.tools.calls
    assert calls[0].open == "<tool_call>\n"
    assert [call.open for call in calls[1:]] == [""]


def test_calls_without_markers_belong_to_no_family():
    assert len(analysis_of("bare_array").format.layout.tools.calls) == 1


# ---- calls that a template does not render -------------------------------------------------------


@pytest.mark.parametrize(
    "markers",
    [
        {"tools": ("<|tool_list_start|>", "<|tool_list_end|>")},
        {"result": ("<|tool_response_start|>", "<|tool_response_end|>")},
    ],
    ids=["the markers of the tools", "the markers of results"],
)
def test_the_calls_of_a_template_are_recognised_by_similar_markers(markers):
    analysis = analyze_template(template_without_calls(**markers))
    text = '<|tool_call_start|>[list_all(), save(text="a")]<|tool_call_end|>'
    assert names_of_calls(analysis.format, text) == ["list_all", "save"]
    assert any("recognised, not inferred" in sentence for sentence in analysis.undecided)
    assert analysis.supports.calls == "none"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (
            "tokenizer_config.json",
            {
                "added_tokens_decoder": {
                    "0": {"content": "<|tool_call_start|>"},
                    "1": {"content": "<|tool_call_end|>"},
                }
            },
        ),
        (
            "tokenizer.json",
            {
                "added_tokens": [
                    {"content": "<|tool_call_start|>"},
                    {"content": "<|tool_call_end|>"},
                ]
            },
        ),
    ],
)
def test_the_calls_of_a_checkpoint_are_recognised_by_its_added_tokens(tmp_path, file, content):
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(template_without_calls(), encoding="utf-8")
    chosen = format_for_checkpoint(tmp_path)
    assert chosen.format.layout.tools == get_format("lfm2").layout.tools


def test_calls_that_nothing_shows_are_reported():
    analysis = analyze_template(template_without_calls())
    assert analysis.format.layout.tools is None
    assert any("Calls are returned as content." in sentence for sentence in analysis.undecided)


def test_markers_of_several_formats_show_no_format():
    tools = ("<tool_calls>", "</tool_calls><tool_call></tool_call><arg_key></arg_key>")
    analysis = analyze_template(template_without_calls(tools=tools))
    assert analysis.format.layout.tools is None


def test_a_template_that_ignores_the_tools_gets_no_calls():
    without_tools = "{% set tools = [] %}" + template_without_calls(
        tools=("<|tool_list_start|>", "<|tool_list_end|>")
    )
    analysis = analyze_template(without_tools)
    assert analysis.format.layout.tools is None
    assert not analysis.undecided


def test_markers_with_a_suffix_are_inferred():
    text = source("tagged_keys_and_values")
    for name in ("tool_call", "arg_key", "arg_value"):
        text = text.replace(f"<{name}>", f"<{name}:open>").replace(f"</{name}>", f"</{name}:open>")
    argument = "<arg_key:open>text</arg_key:open>\n<arg_value:open>a</arg_value:open>"
    call = f"<tool_call:open>save\n{argument}"
    message = parse(f"{call}\n</tool_call:open>", format=analyze_template(text).format, tools=TOOLS)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"text": "a"}]
