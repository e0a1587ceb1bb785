"""Tests of policies. Each test parses whole texts, and texts in small pieces."""

import json
import logging
from dataclasses import replace

import pytest
from nereid_parsers import LENIENT, STRICT, Policy, ToolCallStart, get_format
from nereid_parsers.format import BrokenArguments, StrayClose, TextRule, UnknownTool
from parsers.support import TOOLS, calls, parsed, stream

V31 = get_format(reasoning="deepseek_v3", tools="deepseek_v31")
R1 = get_format(reasoning="deepseek_r1", tools="deepseek_v3")
THINKING, ANSWERING = "<｜Assistant｜><think>", "<｜Assistant｜></think>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"


def call(name="f", arguments='{"a": "x"}'):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


CALL = SECTION.format(call())


@pytest.fixture(params=[1, 3, 10**9], ids=["by character", "by three", "whole"])
def strict(request):
    def read(text, prompt=THINKING, fmt=V31, policy=STRICT, tools=TOOLS):
        return parsed(fmt, text, request.param, prompt=prompt, policy=policy, tools=tools)

    return read


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content"),
    [(THINKING, "some text", None), (ANSWERING, None, "some text"), ("x", None, "some text")],
)
def test_strict_without_a_closing_marker_all_text_belongs_to_the_stage_of_the_prompt(
    strict, prompt, reasoning, content
):
    message = strict("some text", prompt)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_strict_a_call_inside_unclosed_reasoning_is_reasoning(strict):
    message = strict("hm " + CALL)
    assert message.reasoning == "hm " + CALL
    assert message.tool_calls == []


def test_strict_only_the_first_closing_marker_is_markup(strict):
    message = strict("one</think>two</think>three")
    assert (message.reasoning, message.content) == ("one", "two</think>three")


@pytest.mark.parametrize("fmt", [V31, R1], ids=["model opens", "prompt opens"])
def test_strict_without_a_prompt_the_text_before_a_lone_closing_marker_is_reasoning(strict, fmt):
    message = strict("one</think>two", None, fmt)
    assert (message.reasoning, message.content) == ("one", "two")


def test_strict_without_a_prompt_or_a_marker_the_stage_of_the_format_applies(strict):
    assert strict("plain", None, V31).content == "plain"
    assert strict("plain", None, R1).reasoning == "plain"


def test_strict_without_a_prompt_calls_are_recognised(strict):
    assert calls(strict(CALL, None)) == [("f", {"a": "x"})]


def test_strict_after_text_between_reasoning_and_the_first_call_everything_is_content(strict):
    message = strict("hm</think>Well, " + CALL)
    assert message.reasoning == "hm"
    assert message.content == "Well, " + CALL
    assert message.tool_calls == []


def test_strict_white_space_between_reasoning_and_the_first_call_is_dropped(strict):
    message = strict("hm</think>\n \n" + CALL)
    assert (message.reasoning, message.content) == ("hm", None)
    assert calls(message) == [("f", {"a": "x"})]


@pytest.mark.parametrize("between", ["oops", " oops ", "\noops\n"])
def test_strict_text_after_a_call_ends_the_calls(strict, between):
    message = strict("hm</think>" + SECTION.format(call() + between + call("g", "{}")))
    assert calls(message) == [("f", {"a": "x"})]
    assert message.content.strip().startswith("oops")
    assert message.content.strip().endswith(call("g", "{}") + "<｜tool▁calls▁end｜>")


def test_strict_text_between_sections_ends_the_calls(strict):
    message = strict("</think>" + CALL + "so" + CALL)
    assert calls(message) == [("f", {"a": "x"})]
    assert message.content == "so" + CALL


def test_strict_without_thinking_text_before_the_first_call_means_content_only(strict):
    message = strict("Well, " + CALL, ANSWERING)
    assert message.content == "Well, " + CALL
    assert message.tool_calls == []


def test_strict_without_thinking_calls_alone_are_calls(strict):
    message = strict(CALL, ANSWERING)
    assert (message.content, calls(message)) == (None, [("f", {"a": "x"})])


BROKEN = {
    "cut off": '{"a": "x", "b": 1',
    "unclosed string": '{"a": "x}',
    "unclosed value": '{"a": "x", "b": ',
}


@pytest.mark.parametrize("arguments", BROKEN.values(), ids=BROKEN)
def test_strict_broken_arguments_are_repaired_and_other_calls_are_unchanged(strict, arguments):
    message = strict("</think>" + SECTION.format(call("f", arguments) + call("g", '{"b": 2}')))
    assert [name for name, _ in calls(message)] == ["f", "g"]
    assert calls(message)[0][1]["a"].startswith("x")
    assert calls(message)[1] == ("g", {"b": 2})


@pytest.mark.parametrize("arguments", ["no json", "{a: b: c}", "[1, 2]"])
def test_strict_a_call_whose_arguments_cannot_be_repaired_is_discarded(strict, arguments, caplog):
    with caplog.at_level(logging.WARNING):
        message = strict("</think>" + SECTION.format(call("f", arguments) + call("g", '{"b": 2}')))
    assert [name for name, _ in calls(message)][-1:] == ["g"]
    if len(message.tool_calls) == 1:
        assert "broken arguments" in caplog.text
        assert message.tool_calls[0].id


def test_strict_arguments_that_cannot_be_repaired_are_returned_unchanged_by_policy(strict):
    raw = Policy(TextRule.CALLS_FIRST, broken_arguments=BrokenArguments.REPAIR_OR_RAW)
    text = "</think>" + SECTION.format(call("f", "no json") + call("g", '{"b": 2}'))
    message = strict(text, policy=raw)
    assert [(made.name, made.arguments) for made in message.tool_calls] == [
        ("f", "no json"),
        ("g", '{"b": 2}'),
    ]


def test_lenient_broken_arguments_are_returned_unchanged_and_other_calls_are_kept(strict):
    text = "</think>" + SECTION.format(call("f", "no json") + call("g", '{"b": 2}'))
    message = strict(text, policy=LENIENT)
    assert [one.arguments for one in message.tool_calls] == ["no json", '{"b": 2}']


@pytest.mark.parametrize("policy", [LENIENT, STRICT], ids=["lenient", "strict"])
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": ARGS]',
        '{"name": "f", "arguments": ARGS, "id": x y}',
        '{"arguments": ARGS, "name": "f"]',
        '{"name": "f", "arguments": ENCODED]',
        '[{"name": "f", "arguments": ARGS]',
    ],
    ids=["a bracket", "a member", "arguments before the name", "encoded arguments", "an array"],
)
def test_damaged_json_after_the_arguments_does_not_change_the_arguments(strict, call, policy):
    arguments = {"a": "x</tool_call>y"}
    as_text = json.dumps(arguments)
    text = call.replace("ARGS", as_text).replace("ENCODED", json.dumps(as_text))
    message = strict(f"<tool_call>{text}</tool_call>", "x", get_format(tools="hermes"), policy, [])
    assert (calls(message), message.content) == ([("f", arguments)], None)


def test_text_of_the_prompt_inside_a_call_never_becomes_content(strict):
    fmt = replace(get_format(tools="hermes"), turn=("<|assistant|>",))
    prompt = '<|assistant|><tool_call>{"name": "f", "arguments": {"a": "one </tool_call> two'
    message = strict(" three", prompt, fmt, STRICT, [])
    assert calls(message) == [("f", {"a": "one </tool_call> two three"})]
    assert message.content is None


def test_text_after_a_damaged_call_without_markers_is_content(strict):
    text = '{"name": "f", "parameters": {"a": "x"}] It is done.'
    message = strict(text, "x", get_format(tools="llama3_json"), LENIENT)
    assert (calls(message), message.content) == ([("f", {"a": "x"})], "] It is done.")


def test_strict_calls_are_returned_when_their_arguments_are_complete():
    text = "</think>" + SECTION.format(call())
    events = stream(V31, text, 1, prompt=THINKING, policy=STRICT, tools=TOOLS)
    start = next(n for n, event in enumerate(events) if isinstance(event, ToolCallStart))
    assert json.loads(events[start + 1].text) == {"a": "x"}


def test_lenient_text_around_calls_is_kept(strict):
    message = strict("hm</think>Before " + CALL + " between " + CALL + "\nafter", policy=LENIENT)
    assert message.reasoning == "hm"
    assert message.content == "Before  between \nafter"
    assert len(message.tool_calls) == 2


def test_lenient_text_inside_a_section_is_kept(strict):
    text = "</think>" + SECTION.format(call() + "note" + call("g", "{}"))
    message = strict(text, policy=LENIENT)
    assert (message.content, len(message.tool_calls)) == ("note", 2)


def test_an_unknown_tool_is_forwarded_by_default(strict):
    message = strict("</think>" + SECTION.format(call("nobody")), policy=LENIENT)
    assert [one.name for one in message.tool_calls] == ["nobody"]


def test_an_unknown_tool_can_be_dropped(strict, caplog):
    text = "</think>" + SECTION.format(call("nobody") + call())
    with caplog.at_level(logging.WARNING):
        message = strict(text, policy=Policy(unknown_tool=UnknownTool.DROP))
    assert calls(message) == [("f", {"a": "x"})]
    assert "nobody" in caplog.text


def test_an_unknown_tool_can_be_content(strict):
    text = "</think>" + SECTION.format(call("nobody") + call())
    message = strict(text, policy=Policy(unknown_tool=UnknownTool.CONTENT))
    assert calls(message) == [("f", {"a": "x"})]
    assert "nobody" in message.content


def test_an_unknown_tool_is_forwarded_when_the_tools_are_not_known(strict):
    policy = Policy(unknown_tool=UnknownTool.DROP)
    assert len(strict("</think>" + CALL, policy=policy, tools=None).tool_calls) == 1


def test_without_the_stray_close_rule_a_lone_closing_marker_opens_the_answer_only_at_the_start():
    fmt = get_format("mimo")
    assert parsed(fmt, "</think>yes").content == "yes"
    assert parsed(fmt, "no</think>yes").content == "no</think>yes"
    held = Policy(stray_close=StrayClose.REASONING)
    assert parsed(fmt, "no</think>yes", policy=held).reasoning == "no"
