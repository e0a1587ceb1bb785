import pytest
from nereid_backend import RequestError
from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.serving.tokenizer.chat.thinking_effort import (
    build_thinking_spec,
    has_variable,
    read_template_kwargs,
    read_thinking_budget,
)
from nereid_parsers import get_format

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
HARMONY = "{{ 'Reasoning: ' + reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "effort", "kwargs"),
    [
        (QWEN, "none", {"enable_thinking": False}),
        (QWEN, "high", {"enable_thinking": True}),
        (DEEPSEEK, "none", {"thinking": False}),
        (DEEPSEEK, "low", {"thinking": True}),
        (HARMONY, "low", {"reasoning_effort": "low"}),
        (HARMONY, "none", {"reasoning_effort": "none"}),
        (HARMONY + QWEN, "none", {"enable_thinking": False}),
    ],
)
def test_effort_reaches_the_template_in_its_own_variables(template, effort, kwargs):
    assert read_template_kwargs({"reasoning_effort": effort}, template) == kwargs


def test_chat_template_kwargs_have_precedence():
    body = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "x": 1}}
    assert read_template_kwargs(body, QWEN) == {"enable_thinking": True, "x": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort: this checkpoint's chat template has no"),
        ({"reasoning_effort": 5}, "reasoning_effort: the value must be a word"),
        ({"thinking": {"type": "disabled"}}, "thinking: this checkpoint's chat template has no"),
        (
            {"thinking": {"type": "maybe"}},
            "thinking: type must be one of enabled, adaptive, disabled",
        ),
        (
            {"documents": [{"text": "x"}]},
            "documents: this checkpoint's chat template does not read documents",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: the value must be an object"),
    ],
)
def test_a_field_that_the_template_does_not_support_is_refused_by_name(body, message):
    with pytest.raises(RequestError, match=message):
        read_template_kwargs(body, "{{ messages }} enable_thinking, thinking hard")


def test_a_word_in_a_templates_text_is_no_variable():
    assert not has_variable(
        "enable_thinking {{ 'thinking' + \"enable_thinking\" }}", "enable_thinking"
    )
    assert not has_variable("{{ message.thinking }}", "thinking")
    assert has_variable("{%- if thinking -%}", "thinking")


@pytest.mark.parametrize("text", ["'{\"a\": {}}'", "'it is %}'", '"don\'t"'])
def test_braces_and_quotes_in_a_string_do_not_hide_a_later_variable(text):
    template = f"{{{{ {text} }}}}{{% if enable_thinking %}}{{{{ 'x' }}}}{{% endif %}}"
    assert has_variable(template, "enable_thinking")


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(thinking=true) %}{% if ns.thinking %}<think>{% endif %}",
        "{# {{ thinking }} #}",
        "{% raw %}{{ thinking }}{% endraw %}",
        "{% if thinking 'x %}",
    ],
    ids=["a namespace", "a comment", "a raw block", "a syntax error"],
)
def test_a_name_that_the_template_does_not_read_is_no_variable(template):
    assert not has_variable(template, "thinking")
    with pytest.raises(RequestError, match="reasoning_effort"):
        read_template_kwargs({"reasoning_effort": "none"}, template)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 7},
        {"thinking_token_budget": "7"},
        {"custom_params": {"thinking_budget": 7}},
        {"reasoning_budget_tokens": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
    ],
)
def test_a_budget_has_a_name_in_every_dialect(fields):
    assert read_thinking_budget(fields) == 7


def test_minus_one_is_no_limit():
    assert read_thinking_budget({"reasoning_budget_tokens": -1}) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"thinking_token_budget": -2},
            "thinking_token_budget: the value must be a number of tokens",
        ),
        (
            {"thinking_token_budget": True},
            "thinking_token_budget: the value must be a number of tokens",
        ),
        (
            {"custom_params": {"x": 1}},
            "custom_params: the only supported key is thinking_budget, but the request has x",
        ),
        (
            {"thinking_token_budget": 1, "reasoning_budget_tokens": 2},
            "thinking_token_budget and reasoning_budget_tokens have different values",
        ),
    ],
)
def test_a_wrong_budget_is_named(fields, message):
    with pytest.raises(RequestError, match=message):
        read_thinking_budget(fields)


def encode(text):
    """Return the token ids of a text in a vocabulary in which each character is a token."""
    return [ord(letter) for letter in text]


def test_the_spec_contains_the_end_marker_and_whether_reasoning_is_open():
    fmt = get_format(reasoning="qwen3", tools="hermes")
    prompt = "<|im_start|>assistant\n<think>\n"
    gate = fmt.reasoning_gate(prompt)
    end_token_ids = tuple(encode(gate.end))
    assert build_thinking_spec(3, fmt, prompt, encode) == ThinkingSpec(
        gate.start, gate.end, end_token_ids, is_open=True, budget=3
    )
    assert not build_thinking_spec(3, fmt, "<|im_start|>assistant\n", encode).is_open
    assert build_thinking_spec(None, fmt, "", encode) is None


def test_a_budget_for_a_format_without_reasoning_is_refused():
    for fmt in (None, get_format(tools="hermes")):
        with pytest.raises(RequestError, match="the marker that ends reasoning is not known"):
            build_thinking_spec(3, fmt, "x", encode)
