"""Tests of tool calls whose closing marker repeats the name of the function: `<f>..</f>`."""

import json
import time

import pytest
from nereid_parsers import FormatError, StreamParser, analyze_template, fold, parse
from nereid_parsers.format import Call, JsonObject
from parsers.template.support import TOOLS, analysis_of, calls_of, tool

# A template that writes tool calls as in CALL, and declares the tools first.
MESSAGES = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ARGUMENTS = (
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}"
    "</{{ k }}>{% endfor %}"
)


def format_of(call):
    """Return the format of a template that writes tool calls as in `call`.

    The text `call` may contain three words, for which the template writes parts of the tool call:
    NAME stands for the name of the function, JSON for the arguments as a JSON object, and TAGS for
    one pair of tags for each argument.
    """
    call = call.replace("NAME", "{{ c.function.name }}").replace("TAGS", ARGUMENTS)
    call = call.replace("JSON", "{{ c.function.arguments | tojson }}")
    analysis = analyze_template(MESSAGES.replace("CALL", call))
    assert analysis.undecided == ()
    return analysis.format


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("<NAME>TAGS</NAME>", "<save><text>x</text></save>"),
        ("<call><NAME>TAGS</NAME></call>", "<call><save><text>x</text></save></call>"),
        ("<tool:NAME>TAGS</tool:NAME>", "<tool:save><text>x</text></tool:save>"),
        ("<NAME>JSON</NAME>", '<save>{"text": "x"}</save>'),
        ("[NAME]JSON[/NAME]", '[save]{"text": "x"}[/save]'),
        ("<|NAME|>JSON<|/NAME|>", '<|save|>{"text": "x"}<|/save|>'),
        ('<c n="NAME"><NAME>JSON</NAME></c>', '<c n="save"><save>{"text": "x"}</save></c>'),
    ],
)
def test_a_closing_marker_with_the_name_ends_a_call(call, text):
    fmt = format_of(call)
    message = parse(f"Hi.{text}{text}", format=fmt, tools=TOOLS)
    assert calls_of(message) == [("save", {"text": "x"})] * 2
    assert message.content == "Hi."


@pytest.mark.parametrize(
    "value", ["</list_all>", "</save>", "<save>", "a </text", "<b>x</b> < y", "</save> <text>"]
)
def test_a_value_may_contain_the_closing_marker(value):
    text = f"Hi.<save>\n<text>{value}</text>\n</save>\n<list_all>\n</list_all>\nBye."
    fmt = analysis_of("name_tags").format
    whole = parse(text, format=fmt, tools=TOOLS)
    assert calls_of(whole) == [("save", {"text": value}), ("list_all", {})]
    assert whole.content == "Hi.\nBye."
    for split in range(1, len(text)):
        parser = StreamParser(fmt, tools=TOOLS)
        events = [*parser.feed(text[:split]), *parser.feed(text[split:]), *parser.finish()]
        message = fold(events)
        assert (message.content, calls_of(message)) == (whole.content, calls_of(whole))


@pytest.mark.parametrize(
    "text",
    [
        "It is <b>bold</b>, and 1 < 2.",
        "<div><name>x</name></div>",
        "I love it <33",
        "The tag <save",
        "Write <save> to call the tool.",
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_tags_that_name_no_offered_function_are_content(text, size):
    parser = StreamParser(analysis_of("name_tags").format, tools=TOOLS)
    events = []
    for start in range(0, len(text), size):
        events += parser.feed(text[start : start + size])
    message = fold([*events, *parser.finish()])
    assert message.content == text
    assert not message.tool_calls


def test_strict_tools_allow_content_without_a_call():
    fmt = analysis_of("name_tags").format
    strict_tool = tool("save", text="string")
    strict_tool["function"]["strict"] = True
    tag = fmt.structural_tag([strict_tool], "auto")
    assert '"triggers": ["<save>\\n"]' in json.dumps(tag)


def test_the_header_must_contain_a_name_that_the_closing_marker_repeats():
    with pytest.raises(FormatError, match=r"Call.close is '</{name}>'.*Call.head must contain"):
        Call(JsonObject(), open="<call>", close="</{name}>")


def test_many_closing_markers_in_a_value_take_little_time():
    text = "<save>\n<text>" + "</save>" * 300
    parser = StreamParser(analysis_of("name_tags").format, tools=TOOLS)
    started = time.process_time()
    for char in text:
        parser.feed(char)
    parser.finish()
    assert time.process_time() - started < 3
