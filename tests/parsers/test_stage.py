"""Tests of the stage in which the output starts, from the text or the token ids of the prompt."""

import pytest
from nereid_parsers import LENIENT, STRICT, Message, Stage, StreamParser, fold, get_format
from nereid_parsers.format import Format, Opener, Reasoning, Sections, ToolSection
from parsers.support import TOOLS, calls, counted_ids, parsed

QWEN = get_format(reasoning="qwen3", tools="hermes")


@pytest.mark.parametrize(
    ("names", "prompt", "stage"),
    [
        ({"reasoning": "qwen3"}, "<|im_start|>assistant\n", Stage.CONTENT),
        ({"reasoning": "qwen3"}, "<|im_start|>assistant\n<think>\n", Stage.REASONING),
        ({"reasoning": "qwen3"}, "assistant\n<think>\n\n</think>\n\n", Stage.CONTENT),
        ({"reasoning": "qwen3"}, None, Stage.CONTENT),
        ({"reasoning": "deepseek_r1"}, None, Stage.REASONING),
        ({"reasoning": "deepseek_r1"}, "", Stage.REASONING),
        ({"reasoning": "deepseek_r1"}, "<｜Assistant｜>", Stage.CONTENT),
        ({"reasoning": "qwen3_thinking"}, "<|im_start|>assistant\n", Stage.REASONING),
        ({"reasoning": "qwen3_thinking"}, "<think>\n</think>", Stage.CONTENT),
        ({"reasoning": "minimax_append_think"}, "<think>\n", Stage.REASONING),
        ({"reasoning": "glm47"}, "<|assistant|></think>", Stage.CONTENT),
        ({"tools": "hermes"}, "<|im_start|>assistant\n", Stage.CONTENT),
        ({"tools": "kimi_k2"}, "<|im_middle|><|tool_calls_section_begin|>", Stage.CALLS),
        ({"tools": "hermes"}, "assistant\n<tool_call>\n", Stage.CALLS),
        ({"reasoning": "gpt_oss"}, "<|end|><|start|>assistant", Stage.CONTENT),
        (
            {"reasoning": "gpt_oss"},
            "<|start|>assistant<|channel|>analysis<|message|>",
            Stage.REASONING,
        ),
        (
            {"reasoning": "gpt_oss"},
            "<|start|>assistant<|channel|>final<|message|>Well, ",
            Stage.CONTENT,
        ),
    ],
)
def test_the_end_of_the_prompt_decides_the_stage(names, prompt, stage):
    assert get_format(**names).stage(prompt) is stage


def test_markers_earlier_in_the_prompt_are_ignored():
    prompt = (
        "system: think between <think> and </think>, call with <tool_call>\nuser: hi\nassistant:"
    )
    assert QWEN.stage(prompt) is Stage.CONTENT
    assert parsed(QWEN, "Hi.", prompt=prompt).content == "Hi."


def test_the_output_after_an_unknown_prompt_starts_in_the_default_stage():
    fmt = get_format("deepseek_r1", policy=STRICT)
    assert fmt.stage(None) is Stage.REASONING


TURN = Format(
    "with a turn",
    Sections(
        Reasoning("<think>\n", "\n</think>\n\n", opener=Opener.MODEL),
        tools=QWEN.layout.tools,
    ),
    turn=("<|im_start|>assistant\n",),
)


def test_a_prefilled_answer_is_read_if_the_marker_of_the_turn_is_known():
    prompt = "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>\nFirst, "
    assert TURN.stage(prompt) is Stage.REASONING
    message = parsed(TURN, "I add.\n</think>\n\nFour.", prompt=prompt)
    assert (message.reasoning, message.content) == ("I add.", "Four.")


def test_a_prefilled_call_is_returned_completely():
    prompt = '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": '
    assert TURN.stage(prompt) is Stage.CALLS
    parser = StreamParser(TURN, tools=TOOLS, prompt=prompt, new_id=counted_ids())
    message = fold([*parser.feed('"x"}}\n</tool_call>'), *parser.finish()])
    assert calls(message) == [("f", {"a": "x"})]


def test_complete_calls_in_the_prompt_are_not_returned():
    complete_call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
    prompt = f"<|im_start|>assistant\n{complete_call}" + '<tool_call>\n{"name": "f", "arguments": {'
    parser = StreamParser(TURN, tools=TOOLS, prompt=prompt, new_id=counted_ids())
    events = [*parser.feed("}}"), *parser.finish()]
    assert calls(fold(events)) == [("f", {})]
    parser = StreamParser(TURN, tools=TOOLS, prompt=f"<|im_start|>assistant\n{complete_call}")
    assert fold([*parser.feed("Done."), *parser.finish()]) == Message(content="Done.")


def test_without_the_marker_of_the_turn_the_end_of_the_prompt_decides():
    assert TURN.stage("something else <think>") is Stage.REASONING


def test_an_opening_marker_in_the_prompt_without_a_call_is_not_content():
    fmt = get_format(tools="hermes")
    message = parsed(fmt, "Sorry, no.", prompt="assistant\n<tool_call>\n")
    assert message.content == "Sorry, no."


def test_the_recipient_at_the_end_of_the_prompt_is_recognised():
    fmt = get_format("functionary_v3_2")
    assert parsed(fmt, "all\nHi.", prompt="assistant\n\n>>>").content == "Hi."
    assert parsed(fmt, "Hi there.", prompt="a >>> b").content == "Hi there."
    turn = Format("f", fmt.layout, turn=("assistant",))
    assert parsed(turn, "there.", prompt="a >>> b assistant\n>>>all\nHi ").content == "there."
    assert parsed(turn, "all\nHi.", prompt="a >>> b assistant").content == "Hi."


def test_after_a_complete_last_message_the_output_starts_in_a_header():
    fmt = get_format("gpt_oss")
    prompt = (
        "<|start|>assistant<|channel|>final<|message|>Hi<|end|><|start|>user<|message|>Yo<|end|>"
    )
    text = "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    assert parsed(fmt, text, prompt=prompt).content == "Hello"


def test_a_format_without_tools_has_a_stage():
    assert Format("plain", Sections(tools=None)).stage("x") is Stage.CONTENT
    assert isinstance(QWEN.layout.tools, ToolSection)


@pytest.mark.parametrize("policy", [LENIENT, STRICT], ids=["lenient", "strict"])
def test_a_call_that_the_prompt_leaves_open_is_the_first_call_of_the_output(policy):
    prompt = '<tool_call>\n{"name": "f", "arguments": {"a": '
    fmt = Format("f", get_format("hermes").layout, turn=("<|assistant|>",))
    message = parsed(fmt, '"x"}}\n</tool_call>', prompt="<|assistant|>" + prompt, policy=policy)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": "x"}')]
