"""Tests of text that models write although no chat template shows it.

Each case names the format, the text, and the message and the report that the parser must return.
The cases use several formats for each rule, because a rule applies to all formats of one kind.
"""

import json
from dataclasses import dataclass, field

import pytest
from nereid_parsers import STRICT, ToolCallEnd, fold, get_format
from parsers.support import stream, tool

TOOLS = [
    tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        zones={"type": "array"},
    ),
    tool("get_time"),
]
CALL = ("get_weather", {"city": "Rome"})
UNCLOSED = "the reasoning before the tool call is not closed"
MISSING_CLOSE = "the closing marker of an argument is missing"
MISSING_OPEN = "the opening marker of the tool call is missing"
REPEATED_OPEN = "an opening marker before the tool call is repeated"
WRAPPED = "an object that encloses the arguments was removed"


@dataclass
class Case:
    """A text and the message that the parser must return.

    Attributes:
        names: the arguments of `get_format`.
        text: the text that the model writes.
        calls: the name and the arguments of each call.
        content: the content of the message.
        reasoning: the reasoning of the message.
        report: a part of the reason that the parser reports at the end of the first call; None if
            the parser reports no reason.
    """

    names: dict[str, str]
    text: str
    calls: list = field(default_factory=list)
    content: str | None = None
    reasoning: str | None = None
    report: str | None = None


def check(case: Case, **kwargs) -> None:
    """Assert the message and the report, for the whole text and for small pieces of the text."""
    fmt = get_format(**case.names)
    for size in (10**9, 1, 3, 7):
        events = stream(fmt, case.text, size, tools=TOOLS, **kwargs)
        message = fold(events)
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        assert calls == case.calls, size
        assert (message.content or "").strip() == (case.content or ""), size
        assert (message.reasoning or "").strip() == (case.reasoning or ""), size
        reports = [event.reason for event in events if isinstance(event, ToolCallEnd)]
        if case.report is None:
            assert not any(reports), reports
        else:
            assert case.report in (reports[0] or ""), reports


def run(cases: list[Case]):
    """Return the decorator that runs a test for each case."""
    labels = ["+".join(case.names.values()) + f"-{case.text[:40]}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=labels)


# ---- tool calls inside the reasoning -------------------------------------------------------------

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
INVOKE = '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>'
DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)
IN_REASONING = [
    ({"reasoning": "qwen3", "tools": "hermes"}, HERMES),
    ({"reasoning": "nemotron_v3", "tools": "qwen3_coder"}, CODER),
    ({"reasoning": "glm45", "tools": "glm45"}, GLM),
    ({"reasoning": "deepseek_r1", "tools": "hermes"}, HERMES),
    ({"reasoning": "kimi_k2", "tools": "kimi_k2"}, KIMI),
    (
        {"reasoning": "minimax_m2", "tools": "minimax_m2"},
        f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    ),
    (
        {"reasoning": "deepseek_v4", "tools": "deepseek_v4"},
        f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>",
    ),
]


@run(
    [
        Case(names, f"<think>I look it up.\n{call}", [CALL], None, "I look it up.", UNCLOSED)
        for names, call in IN_REASONING
    ]
)
def test_a_call_inside_reasoning_that_never_closes_is_a_call(case):
    check(case)


@run(
    [
        Case(names, f"<think>I write {call} now.</think>Hi", [], "Hi", f"I write {call} now.")
        for names, call in IN_REASONING
    ]
)
def test_a_call_quoted_inside_closed_reasoning_is_reasoning(case):
    check(case)


@run(
    [
        Case(
            names, f"<think>One.{call}\n<think>Two.</think>Hi", [CALL], "Hi", "One.\nTwo.", UNCLOSED
        )
        for names, call in IN_REASONING
    ]
)
def test_a_call_in_unclosed_reasoning_is_a_call_if_reasoning_opens_again_after_it(case):
    check(case)


def test_a_call_and_a_later_opening_marker_inside_closed_reasoning_are_reasoning():
    reasoning = f"Write {HERMES}, then <think>."
    names = {"reasoning": "qwen3", "tools": "hermes"}
    check(Case(names, f"<think>{reasoning}</think>Hi", [], "Hi", reasoning))


@run([Case(names, f"<think>\n{call}", [CALL], report=UNCLOSED) for names, call in IN_REASONING])
def test_a_call_directly_after_the_opening_of_the_reasoning_is_a_call(case):
    check(case)


def test_the_closing_marker_after_an_interrupting_call_is_removed():
    check(
        Case(
            {"reasoning": "qwen3", "tools": "hermes"},
            f"<think>\n{HERMES}\n</think>\n\nDone.",
            [CALL],
            "Done.",
            report=UNCLOSED,
        )
    )


def test_reasoning_that_the_client_receives_as_content_may_contain_an_unclosed_call():
    names = {"reasoning": "minimax_m2_append_think", "tools": "minimax_m2"}
    text = f"Hm. <minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"
    check(Case(names, text, [CALL], "<think>Hm.", report=UNCLOSED))


def test_special_tokens_of_the_reasoning_never_appear_in_the_content():
    text = "<|channel>thought\n<channel|>Hello<channel|>"
    check(Case({"reasoning": "gemma4"}, text, content="Hello"))


@run(
    [
        Case(
            {"tools": "kimi_k2"},
            "One. <|tool_calls_section_begin|> <|tool_calls_section_end|> Two.",
            content="One.  Two.",
        ),
        Case(
            {"tools": "hy_v3"},
            "One. <tool_calls></tool_calls>",
            content="One. <tool_calls></tool_calls>",
        ),
    ]
)
def test_the_special_tokens_of_an_empty_section_never_appear_in_the_content(case):
    check(case)


REPEATED = [
    ({"tools": "hermes"}, f"<tool_call>\n{HERMES}"),
    ({"tools": "qwen3_coder"}, f"<tool_call>{CODER}"),
    ({"tools": "glm45"}, f"<tool_call>\n<tool_call>\n{GLM}"),
    ({"tools": "kimi_k2"}, f"<|tool_calls_section_begin|>{KIMI}"),
    (
        {"tools": "kimi_k2"},
        KIMI.replace("<|tool_call_begin|>", "<|tool_call_begin|> <|tool_call_begin|>"),
    ),
    ({"tools": "minimax_m2"}, f"<minimax:tool_call>\n<minimax:tool_call>\n{INVOKE}"),
]


@run([Case(names, f"Hi.\n{text}", [CALL], "Hi.", report=REPEATED_OPEN) for names, text in REPEATED])
def test_a_repeated_opening_marker_before_a_call_is_removed(case):
    check(case)


@run(
    [
        Case({"tools": "hermes"}, text, content=text)
        for text in ("<tool_call><tool_call> is written twice.", "Write <tool_call>\n<tool_c.")
    ]
)
def test_a_repeated_opening_marker_without_a_call_is_content(case):
    check(case)


def test_a_closing_tag_in_the_content_stays():
    text = "Write </think> last."
    check(Case({"reasoning": "qwen3"}, text, content=text), prompt="<|im_start|>assistant\n")


# ---- reasoning that the prompt may have opened ---------------------------------------------------

EITHER = [
    ("qwen3", "</think>"),
    ("glm45", "</think>"),
    ("hy_v3", "</think>"),
    ("nemotron_v3", "</think>"),
    ("minimax_m3", "</mm:think>"),
    ("gemma4", "<channel|>"),
]


@run([Case({"reasoning": name}, f"Hm.{close}Hi", [], "Hi", "Hm.") for name, close in EITHER])
def test_text_before_a_lone_closing_marker_is_reasoning_if_the_prompt_is_unknown(case):
    check(case)


@run([Case({"reasoning": name}, "Hello.", content="Hello.") for name, _ in EITHER])
def test_text_without_a_marker_is_content_if_the_prompt_is_unknown(case):
    check(case)


def test_text_before_a_call_is_content_if_the_prompt_is_unknown():
    names = {"reasoning": "qwen3", "tools": "hermes"}
    check(Case(names, f"I look it up.\n{HERMES}", [CALL], "I look it up."))


@pytest.mark.parametrize(("name", "close"), EITHER)
def test_the_model_may_open_the_reasoning_in_constrained_output(name, close):
    fmt = get_format(reasoning=name)
    gate = fmt.reasoning_gate(None)
    assert (gate.is_open, gate.may_open, gate.end.strip()) == (False, True, close)


# ---- white space around calls --------------------------------------------------------------------


@run(
    [
        Case({"tools": "hermes"}, f"One.\n\n{HERMES}\n\nTwo.", [CALL], "One.\n\n\n\nTwo."),
        Case({"tools": "qwen3_coder"}, f"One. {CODER} Two.", [CALL], "One.  Two."),
        Case({"tools": "glm45"}, f"One.\n{GLM}\n{GLM}\nTwo.", [CALL, CALL], "One.\n\nTwo."),
        Case({"tools": "kimi_k2"}, f"One. {KIMI}", [CALL], "One."),
    ]
)
def test_white_space_before_a_call_is_kept_if_content_follows_the_call(case):
    check(case)


# ---- white space, names and missing markers ------------------------------------------------------

BEAM = (
    "<|start|>assistant to=get_weather<|channel|>analysis <|constrain|>xml<|message|>"
    '<rfl:parameter name="city">\nRome\n</rfl:parameter><|call|>'
)
HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city": "Rome"}<|call|>'
)
PLUGIN = (
    "<|action_start|><|plugin|>\n"
    '{"name": "get_weather", "parameters": {"city": "Rome"}}<|action_end|>'
)
BLANKS = [
    ("kimi_k2", KIMI.replace(":0<", ":0 <")),
    ("kimi_k2", KIMI.replace("begin|>f", "begin|>\nf")),
    ("glm45", GLM.replace("call>get", "call>\nget")),
    ("glm47", GLM.replace("call>get", "call> get").replace("weather\n", "weather ")),
    ("glm45", GLM.replace("key>city<", "key>\ncity\n<")),
    ("mistral", '[TOOL_CALLS] get_weather [ARGS] {"city": "Rome"}'),
    ("gemma4", '<|tool_call> call:get_weather {city: <|"|>Rome<|"|> } <tool_call|>'),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function <｜tool▁sep｜> get_weather\n"
        '```json\n{"city": "Rome"}\n``` <｜tool▁call▁end｜> <｜tool▁calls▁end｜>',
    ),
    ("qwen3_coder", CODER.replace("=get_weather>", "= get_weather >")),
    ("beam", BEAM.replace("<|start|>", "<|start|> ")),
    ("beam", BEAM.replace("assistant", "assistant ").replace("<|start|>", "<|start|>\n")),
    ("gpt_oss", HARMONY.replace("<|start|>", "<|start|> ")),
    ("gpt_oss", HARMONY.replace("<|channel|>c", " <|channel|> c")),
    ("internlm", PLUGIN),
    ("internlm", PLUGIN.replace("><", ">\n<")),
    ("minicpm5", '<functionname="get_weather"><paramname="city">Rome</param></function>'),
    ("minicpm5", '<functionĠname="get_weather"><paramĠname="city">Rome</param></function>'),
]


@run([Case({"tools": name}, text, [CALL]) for name, text in BLANKS])
def test_white_space_around_markers_and_inside_tags_may_differ(case):
    check(case)


@pytest.mark.parametrize("name", ["glm45", "glm47", "ling3", "poolside_v1", "spark25", "hy_v4"])
@pytest.mark.parametrize("text", ["<tool_call>get_weath", "<tool_call>\nget_weath"])
def test_a_name_that_the_end_of_the_message_cuts_off_is_no_call(name, text):
    for size in (1, 10**9):
        assert not fold(stream(get_format(tools=name), text, size, tools=TOOLS)).tool_calls


def test_a_number_is_not_the_name_of_a_function():
    text = KIMI.replace("functions.get_weather:0", "0")
    assert not fold(stream(get_format(tools="kimi_k2"), text, tools=TOOLS)).tool_calls


TWO = ("get_weather", {"city": "Rome", "days": 3})


@run(
    [
        Case(
            {"tools": "qwen3_coder"},
            CODER.replace("\n</parameter>", "\n<parameter=days>\n3\n</parameter>"),
            [TWO],
            report=MISSING_CLOSE,
        ),
        Case(
            {"tools": "minimax_m2"},
            "<minimax:tool_call>"
            + INVOKE.replace("</parameter>", '\n<parameter name="days">3</parameter>')
            + "</minimax:tool_call>",
            [("get_weather", {"city": "Rome\n", "days": 3})],
            report=MISSING_CLOSE,
        ),
        Case(
            {"tools": "glm45"},
            GLM.replace("</arg_value>", "<arg_key>days</arg_key>\n<arg_value>3</arg_value>"),
            [TWO],
            report=MISSING_CLOSE,
        ),
        Case(
            {"tools": "qwen3_coder"},
            CODER.replace("\n</parameter>", "") + "\nBye",
            [CALL],
            "Bye",
            report=MISSING_CLOSE,
        ),
        Case(
            {"tools": "step3p5"},
            CODER.replace("\n</parameter>\n</function>", "") + "\nBye",
            [CALL],
            "Bye",
            report=MISSING_CLOSE,
        ),
        Case(
            {"tools": "qwen3_coder"},
            CODER.replace("\n</parameter>", "") + "\n" + CODER,
            [CALL, CALL],
            report=MISSING_CLOSE,
        ),
    ]
)
def test_an_argument_without_its_closing_marker_ends_at_the_next_marker(case):
    check(case)


@run(
    [
        Case(
            {"tools": "qwen3_coder"},
            CODER.replace("Rome", "a</function></tool_call>b"),
            [("get_weather", {"city": "a</function></tool_call>b"})],
        ),
        Case(
            {"tools": "qwen3_coder"},
            CODER.replace("Rome", "use <parameter=other> here"),
            [("get_weather", {"city": "use <parameter=other> here"})],
        ),
    ]
)
def test_a_marker_inside_a_closed_argument_is_a_part_of_the_argument(case):
    check(case)


@run(
    [
        Case({"tools": "minimax_m2"}, INVOKE, [CALL], report=MISSING_OPEN),
        Case(
            {"tools": "minimax_m2"},
            f"Sure. {INVOKE}\n</minimax:tool_call>",
            [CALL],
            "Sure.",
            report=MISSING_OPEN,
        ),
        Case({"tools": "deepseek_v4"}, DSML, [CALL], report=MISSING_OPEN),
        Case({"tools": "deepseek_v32"}, f"{DSML}\n{DSML}", [CALL, CALL], report=MISSING_OPEN),
        Case(
            {"tools": "seed_oss"},
            "<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>",
            [CALL],
            report=MISSING_OPEN,
        ),
        Case(
            {"tools": "minimax_m2"},
            INVOKE.replace("get_weather", "other"),
            content=INVOKE.replace("get_weather", "other"),
        ),
    ]
)
def test_a_call_of_an_offered_function_needs_no_opening_marker(case):
    check(case)


# ---- keys and objects around the arguments -------------------------------------------------------


def named(key, value='{"city": "Rome"}'):
    """Return a tool call whose arguments are under `key`."""
    return f'{{"name": "get_weather", "{key}": {value}}}'


@run(
    [
        Case({"tools": "hermes"}, f"<tool_call>{named('parameters')}</tool_call>", [CALL],
             report="under the key 'parameters'"),
        Case({"tools": "granite4"}, f"<tool_call>{named('input')}</tool_call>", [CALL],
             report="under the key 'input'"),
        Case({"tools": "mistral"}, f"[TOOL_CALLS][{named('parameters')}]", [CALL],
             report="under the key 'parameters'"),
        Case({"tools": "llama3_json"}, named("input"), [CALL], report="under the key 'input'"),
        Case({"tools": "llama3_json"},
             f'{{"type": "function", "function": {named("parameters")}}}', [CALL],
             report="under the key 'function'"),
        Case({"tools": "llama3_json"}, f"[{named('parameters')}]", [CALL]),
        Case({"tools": "hermes"}, f"<tool_call>[{named('arguments')}]</tool_call>", [CALL]),
        Case({"tools": "phi4_mini_json"}, f"functools{named('arguments')}", [CALL]),
    ]
)  # fmt: skip
def test_the_name_and_the_arguments_may_be_under_other_keys(case):
    check(case)


@run(
    [
        Case({"tools": "hermes"},
             "<tool_call>" + named("arguments", '{"arguments": {"city": "Rome"}}') + "</tool_call>",
             [CALL], report=WRAPPED),
        Case({"tools": "hermes"},
             "<tool_call>" + named("arguments", '{"arguments": 3}') + "</tool_call>",
             [("get_weather", {"arguments": 3})]),
        Case({"tools": "kimi_k2"}, KIMI.replace('{"city": "Rome"}', '{"input":{"city":"Rome"}}'),
             [CALL], report=WRAPPED),
        Case({"tools": "qwen3_coder"},
             CODER.replace("=city", "=properties").replace("Rome", "{'city': 'Rome'}"),
             [CALL], report=WRAPPED),
        Case({"tools": "pythonic"}, '[get_weather(arguments={"city": "Rome"})]', [CALL],
             report=WRAPPED),
    ]
)  # fmt: skip
def test_an_object_around_the_arguments_is_removed(case):
    check(case)


def test_an_argument_that_the_tool_declares_is_not_removed():
    offered = [tool("run", arguments={"type": "object"})]
    text = '<tool_call>{"name": "run", "arguments": {"arguments": {"a": 1}}}</tool_call>'
    message = fold(stream(get_format(tools="hermes"), text, 1, tools=offered))
    assert json.loads(message.tool_calls[0].arguments) == {"arguments": {"a": 1}}


# ---- damaged values ------------------------------------------------------------------------------


@run(
    [
        Case({"tools": "lfm2"},
             "<|tool_call_start|>[get_weather(zones={'a', 'b'}, days=07)]<|tool_call_end|>",
             [("get_weather", {"zones": ["a", "b"], "days": 7})]),
        Case({"tools": "pythonic"}, "[get_weather(zones={1, 2})]",
             [("get_weather", {"zones": [1, 2]})]),
        Case({"tools": "pythonic"}, "[get_weather(zones={}), get_time()]",
             [("get_weather", {"zones": {}}), ("get_time", {})]),
        Case({"tools": "pythonic"}, """[get_weather(city='sed 's/(a)/b/' f', days=3)]""",
             [("get_weather", {"city": "sed 's/(a)/b/' f", "days": 3})]),
        Case({"tools": "pythonic"}, """[get_weather(city='print('a')')]""",
             [("get_weather", {"city": "print('a')"})]),
        Case({"tools": "pythonic"}, """[get_weather(city='a', zones=['b', "c"])]""",
             [("get_weather", {"city": "a", "zones": ["b", "c"]})]),
    ]
)  # fmt: skip
def test_python_values_that_json_cannot_express_are_converted(case):
    check(case)


@run(
    [
        Case({"tools": "functiongemma"},
             "<start_function_call>call:get_weather{city:<escape>3<escape>,days:<escape>3<escape>}"
             "<end_function_call>", [("get_weather", {"city": "3", "days": 3})]),
        Case({"tools": "gemma4"}, "<|tool_call>call:get_weather{city:New York,days:3}<tool_call|>",
             [("get_weather", {"city": "New York", "days": 3})]),
        Case({"tools": "deepseek_v32"},
             "<｜DSML｜function_calls>\n"
             + DSML.replace('"city"', '"days"').replace("Rome", "42")
             + "\n</｜DSML｜function_calls>", [("get_weather", {"days": 42})]),
        Case({"tools": "deepseek_v32"},
             "<｜DSML｜function_calls>\n"
             + DSML.replace("true", "false").replace("Rome", "null")
             + "\n</｜DSML｜function_calls>", [("get_weather", {"city": "null"})]),
        Case({"tools": "qwen3_coder"}, CODER.replace("=city", "=days").replace("Rome", "007"),
             [("get_weather", {"days": 7})]),
    ]
)  # fmt: skip
def test_the_schema_decides_the_type_of_a_value(case):
    check(case)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome",}', {"city": "Rome"}),
        ('{"days": 1, "flag": True,}', {"days": 1, "flag": True}),
        ("{'city': 'Rome'}", {"city": "Rome"}),
    ],
)
def test_the_strict_policy_repairs_python_syntax(arguments, expected):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    fmt = get_format(tools="hermes", policy=STRICT)
    events = stream(fmt, text, tools=TOOLS)
    assert json.loads(fold(events).tool_calls[0].arguments) == expected
    assert "repaired" in events[-1].reason


# ---- single formats ------------------------------------------------------------------------------


@run(
    [
        Case({"reasoning": "hy_v3", "tools": "hy_v3"},
             "<think:opensource>Hm</think:opensource><tool_calls:opensource>\n"
             "<tool_call:opensource>get_weather<tool_sep:opensource>\n"
             "<arg_key:opensource>city</arg_key:opensource>\n"
             "<arg_value:opensource>Rome</arg_value:opensource>\n</tool_call:opensource>\n"
             "</tool_calls:opensource>", [CALL], reasoning="Hm"),
        Case({"tools": "phi4_mini_json"}, f"<|tool_call|>[{named('arguments')}]<|/tool_call|>",
             [CALL]),
        Case({"tools": "ling3"}, GLM + "<|role_end|>", [CALL]),
        Case({"name": "gpt_oss"},
             "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm<|end|>"
             "<|start|>assistant<|channel|>final<|message|>Hi", content="Hi", reasoning="Hm"),
        Case({"name": "gpt_oss"},
             "<|channel|>commentary to=browser.search<|message|>cats<|end|>"
             "<|start|>assistant<|channel|>final<|message|>Hi", content="Hi", reasoning="cats"),
    ]
)  # fmt: skip
def test_published_checkpoints_write_these_forms(case):
    check(case)


def test_a_call_that_is_quoted_in_a_message_to_the_user_is_content():
    quoted = (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Rome</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>"
    )
    fmt = {"name": "muse"}
    check(Case(fmt, f" to=user<|message|>Write {quoted}<|eot|>", content=f"Write {quoted}"))
    check(Case(fmt, f" to=functions<|message|>{quoted}<|eot|>", [CALL]))


NS = "]<]minimax[>["


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        (f"{NS}<tag>a{NS}</tag>{NS}<tag>b{NS}</tag>", {"tag": ["a", "b"]}),
        (f"{NS}<tag>a{NS}</tag>{NS}<n>1{NS}</n>", {"tag": "a", "n": 1}),
        (f"{NS}<days>007{NS}</days>", {"days": 7}),
    ],
)
def test_repeated_elements_become_an_array(elements, expected):
    text = f'{NS}<tool_call>\n{NS}<invoke name="get_weather">\n{elements}'
    closing = f"{NS}</invoke>\n{NS}</tool_call>"
    fmt = get_format(tools="minimax_m3")
    for size in (1, 10**9):
        message = fold(stream(fmt, text + closing, size, tools=TOOLS))
        assert json.loads(message.tool_calls[0].arguments) == expected


@pytest.mark.parametrize(
    ("element", "expected"),
    [("<city>Rome", {"city": "Rome"}), ("<days>3", {"days": 3})],
)
def test_an_element_inside_the_text_of_an_element_ends_the_call(element, expected):
    text = f'{NS}<tool_call>\n{NS}<invoke name="get_weather">\n{NS}{element}{NS}<n>1{NS}</n>'
    fmt = get_format(tools="minimax_m3")
    for size in (1, 10**9):
        message = fold(stream(fmt, text, size, tools=TOOLS))
        assert json.loads(message.tool_calls[0].arguments) == expected


# ---- other spellings -----------------------------------------------------------------------------

SPELLINGS = [
    Case({"tools": "gemma4"}, '<|tool_call>:get_weather{city:<|"|>Rome<|"|>}<tool_call|>', [CALL]),
    Case(
        {"tools": "step3"},
        '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Rome</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        [CALL],
    ),
    Case({"reasoning": "gemma4"}, "<|channel>Hm.<channel|>Hi.", content="Hi.", reasoning="Hm."),
    Case(
        {"reasoning": "gemma4"},
        "<|channel><|channel>thought\nHm.<channel|>Hi.",
        content="Hi.",
        reasoning="Hm.",
    ),
    Case(
        {"name": "gpt_oss"},
        "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi.<|end|>",
        content="Hi.",
    ),
]


@pytest.mark.parametrize("case", SPELLINGS, ids=lambda case: case.text[:30])
def test_a_spelling_that_models_sometimes_write_is_read(case):
    check(case)


def test_content_markers_end_empty_reasoning():
    names = {"reasoning": "kimi_k3", "tools": "kimi_k3"}
    text = "<|open|>response<|sep|>Hi.<|close|>response<|sep|><|close|>message<|sep|>"
    check(Case(names, text, content="Hi."), prompt="<|open|>think<|sep|>")


def test_values_are_strings_if_the_request_declares_no_tools():
    text = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    for size in (10**9, 1, 5):
        message = fold(stream(get_format(tools="qwen3_coder"), text, size, tools=None))
        assert json.loads(message.tool_calls[0].arguments) == {"n": "1"}


def test_a_call_without_wrapper_needs_no_declared_tool_if_its_marker_is_a_special_token():
    text = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    for size in (10**9, 1, 5):
        message = fold(stream(get_format(tools="deepseek_v4"), text, size, tools=None))
        assert [call.name for call in message.tool_calls] == ["f"], size


# ---- white space inside markers ------------------------------------------------------------------

# For each format, the text of one tool call. `~` marks the places at which a blank is inserted.
SPACED = [
    (
        {"tools": "minimax_m3"},
        f'{NS}~<tool_call>\n{NS}~<invoke ~name="get_weather">{NS}~<city>Rome{NS}~</city>'
        f"{NS}~</invoke>{NS}~</tool_call>",
    ),
    (
        {"tools": "kimi_k3"},
        '<|open|>~tools~<|sep|><|open|>~call tool=~"get_weather" ~index=~"0"~<|sep|>'
        '<|open|>~argument key=~"city" type=~"string"~<|sep|>Rome<|close|>~argument~<|sep|>'
        "<|close|>~call~<|sep|>"
        "<|close|>~tools~<|sep|>",
    ),
    (
        {"tools": "interns1"},
        '<|action_start|>~ ~<|plugin|>\n{"~name~": "~get_weather~", '
        '"~parameters~": {"city": "Rome"}}<|action_end|>',
    ),
    (
        {"tools": "gigachat3"},
        'function~ ~call~<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Rome"}}',
    ),
    (
        {"name": "gpt_oss"},
        "<|channel|>~commentary~ ~to=~functions~.~get_weather~ ~<|constrain|>~json~<|message|>"
        '{"city": "Rome"}',
    ),
    (
        {"tools": "deepseek_v3"},
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>~function~<｜tool▁sep｜>~get_weather~\n~```~json~\n"
        '{"city": "Rome"}\n```~<｜tool▁call▁end｜>~<｜tool▁calls▁end｜>',
    ),
]


@pytest.mark.parametrize("blank", [" ", "\n"])
@pytest.mark.parametrize(("names", "text"), SPACED, ids=lambda value: str(value)[:20])
def test_one_blank_inside_a_marker_changes_nothing(names, text, blank):
    pieces = text.split("~")
    for number in range(len(pieces)):
        spaced = "".join(pieces[:number]) + blank + "".join(pieces[number:])
        check(Case(names, spaced, [CALL]))
