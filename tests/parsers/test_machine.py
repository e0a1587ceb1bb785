"""Tests of the stream parser: text that is held back, malformed markup, and incomplete text."""

import json
import time
from dataclasses import replace

import pytest
from nereid_parsers import (
    LENIENT,
    STRICT,
    ContentDelta,
    ReasoningDelta,
    StreamParser,
    ToolCallEnd,
    ToolCallStart,
    fold,
    get_format,
)
from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    Format,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    NameIsKey,
    NestedTags,
    Reasoning,
    Sections,
    Shown,
    TaggedArguments,
    ToolSection,
    Wrapper,
)
from parsers.support import TOOLS, calls, counted_ids, parsed, stream, stream_at, tool

HERMES = get_format("hermes")
QWEN = get_format(reasoning="qwen3", tools="hermes")


def fmt_of(*spellings, **section):
    """Return a format with the given spellings of calls. `section` are options of `ToolSection`."""
    return Format("test", Sections(tools=ToolSection(spellings, **section)))


def test_text_is_returned_at_once_unless_it_may_become_a_marker():
    parser = StreamParser(HERMES)
    assert parser.feed("Hello") == [ContentDelta("Hello")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [ContentDelta(" <toolbox>")]
    assert parser.finish() == []


def test_white_space_is_held_back_until_it_is_known_whether_a_marker_follows():
    parser = StreamParser(HERMES)
    assert parser.feed("Hi\n\n") == [ContentDelta("Hi")]
    assert parser.feed("there") == [ContentDelta("\n\nthere")]
    assert parser.feed(" \n") == []
    assert parser.finish() == [ContentDelta(" \n")]


def test_a_marker_that_is_incomplete_at_the_end_is_text():
    assert parsed(HERMES, "so <tool_c", 1).content == "so <tool_c"


@pytest.mark.parametrize("size", [1, 10**6])
def test_reasoning_closed_twice_leaves_no_marker_in_the_content(size):
    for text in ("<think>a</think>\n</think>\nb", "<think>a</think></think>b"):
        message = parsed(QWEN, text, size)
        assert (message.reasoning, message.content.strip()) == ("a", "b")
    message = parsed(QWEN, "</think>b", size, prompt="<think>\n\n</think>\n\n")
    assert (message.reasoning, message.content) == (None, "b")
    text = "so </think> closes it"
    assert parsed(QWEN, text, size, prompt="assistant\n").content == text


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_name_that_occurs_twice_in_a_head_must_be_the_same(size):
    fmt = fmt_of(Call(JsonArguments(), head="to={name}<|m|><do {name}>", close="</do>"))
    good, bad = "to=f<|m|><do f>{}</do>", "to=f<|m|><do g>{}</do>"
    assert calls(parsed(fmt, good, size)) == [("f", {})]
    assert parsed(fmt, bad, size).content == bad


@pytest.mark.parametrize("size", [1, 2, 10**6])
def test_a_bare_object_whose_key_is_the_name_may_be_split_over_several_pieces(size):
    fmt = fmt_of(Call(JsonArray(NameIsKey())))
    text = '[{"f": {"a": "x"}}, {"g": {}}]'
    assert calls(parsed(fmt, text, size, tools=TOOLS)) == [("f", {"a": "x"}), ("g", {})]


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_a_separator_may_be_split_over_several_pieces(size):
    call = Call(JsonArguments(), head="<do {name}>", close="</do>")
    fmt = fmt_of(call, separator="<|part|><|next|>model")
    two = "<do f>{}</do><|part|><|next|>model<do g>{}</do>"
    message = parsed(fmt, two, size)
    assert (calls(message), message.content) == ([("f", {}), ("g", {})], None)
    cut = parsed(fmt, "<do f>{}</do><|part|><|ne", size)
    assert (calls(cut), cut.content) == ([("f", {})], None)


def test_feed_after_finish_is_an_error_and_a_second_finish_is_not():
    parser = StreamParser(HERMES)
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(ValueError, match="Create a new StreamParser"):
        parser.feed("x")


def test_blank_lines_next_to_markers_are_markup_but_indentation_is_not():
    message = parsed(QWEN, "<think>\n\n hm \n</think>\n\n    code\n", 1)
    assert (message.reasoning, message.content) == (" hm", "    code\n")


@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_an_answer_may_contain_several_blocks_of_reasoning(size):
    text = (
        "<think>\na\n</think>\n<think>b</think>c.<think>d</think>\ne\n\n<think>\nf\n</think>\n\ng"
    )
    message = parsed(QWEN, text, size)
    assert message.reasoning == "a\nb\nd\nf"
    assert message.content == "c.\ne\n\n\n\ng"


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize(
    "content",
    [
        "Write <think> first.",
        'Write `<think>`, then "</think>".',
        "写入<think>标签",
        "```text\n<think>\na\n</think>\n```",
    ],
)
def test_an_opening_marker_that_the_content_quotes_stays_in_the_content(content, size):
    message = parsed(QWEN, f"<think>a</think>{content}\n<think>b</think>", size)
    assert (message.reasoning, message.content) == ("a\nb", content)


@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_later_reasoning_in_the_content_is_unchanged_if_reasoning_is_not_separated(size):
    reasoning = Reasoning("<think>\n", "\n</think>\n\n", shown=Shown.INLINE)
    text = "<think>\na\n</think>\n\nHi.\n\n<think>\nb\n</think>\n\nBye."
    message = parsed(Format("inline", Sections(reasoning)), text, size)
    assert (message.reasoning, message.content) == (None, text)


def test_an_opening_marker_inside_reasoning_is_text():
    assert parsed(QWEN, "<think>a <think> b</think>c", 1).reasoning == "a <think> b"


def test_a_call_ends_reasoning_that_was_never_closed():
    text = 'hm\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parsed(QWEN, text, 1, prompt="<think>\n", tools=TOOLS)
    assert message.reasoning == "hm"
    assert calls(message) == [("f", {})]


def test_reasoning_that_is_closed_after_an_interruption_leaves_later_closing_markers_alone():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parsed(QWEN, f"<think>{call}<think>Hm</think>Hi</think>", 1)
    assert (message.reasoning, message.content) == ("Hm", "Hi</think>")
    assert calls(message) == [("f", {})]


def test_a_marker_that_reasoning_only_mentions_does_not_end_it():
    text = "I could write <tool_call> here.</think>No."
    message = parsed(QWEN, text, 1, prompt="<think>\n")
    assert (message.reasoning, message.content) == ("I could write <tool_call> here.", "No.")


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize("end", ["[/assistant]", "{end}"])
def test_a_text_that_ends_the_message_after_a_call_may_start_like_a_call(end, size):
    call = '{"name": "f", "arguments": {}}'
    fmt = replace(fmt_of(Call(JsonObject(Keys("name", "arguments")))), ends=(end,))
    message = parsed(fmt, f"{call}\n{call}{end}", size, tools=TOOLS)
    assert (len(message.tool_calls), message.content) == (2, None)
    assert parsed(fmt, f"{call}{end[:3]} x", size, tools=TOOLS).content == f"{end[:3]} x"


def test_end_of_turn_tokens_are_markup():
    fmt = get_format(reasoning="deepseek_r1", tools="deepseek_v3")
    text = "hm<｜end▁of▁sentence｜></think>yes<｜end▁of▁sentence｜>"
    message = parsed(fmt, text, 1)
    assert (message.reasoning, message.content) == ("hm", None) or message.content == "yes"


def test_malformed_markup_becomes_content_with_a_reason():
    events = stream(HERMES, "<tool_call>no</tool_call>")
    assert fold(events).content == "<tool_call>no</tool_call>"
    assert events[0] == ContentDelta("<tool_call>", "no call follows the marker")


def test_a_section_of_ordinary_tags_without_calls_is_content():
    fmt = get_format(tools="hy_v3")
    text = "<tool_calls> </tool_calls>"
    assert parsed(fmt, text, 1).content == text


def test_a_call_without_arguments_has_an_empty_object():
    message = parsed(HERMES, '<tool_call>{"name": "g"}</tool_call>', 1)
    assert calls(message) == [("g", {})]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('"{\\"a\\": 1}"', {"a": 1}), ("null", {}), ('""', {}), ('{"a": [1, {"b": "}"}]}', None)],
)
def test_arguments_as_a_json_string_or_null_are_decoded(arguments, expected):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    got = calls(parsed(HERMES, text, 1))
    assert got == [("f", expected if expected is not None else {"a": [1, {"b": "}"}]})]


def test_superfluous_closing_brackets_are_skipped():
    text = '<tool_call>{"name": "f", "arguments": {}}}</tool_call>after'
    message = parsed(HERMES, text, 1)
    assert (calls(message), message.content) == ([("f", {})], "after")


def test_a_call_in_which_the_text_ends_has_a_reason():
    events = stream(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', 1)
    assert events[-1] == ToolCallEnd(0, "the text ended inside the call")
    assert fold(events).tool_calls[0].arguments == '{"a": "x'


CODER = get_format("qwen3_coder")
DEEPSEEK = get_format("deepseek_v31")


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize(
    ("fmt", "whole"),
    [
        (HERMES, '<tool_call>\n{"name": "f"'),
        (CODER, "<tool_call>\n<function=f>\n<parameter"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ],
)
def test_a_call_that_is_incomplete_at_the_end_is_markup(fmt, whole, size):
    beginning = whole.index(">", 3) + 1
    for end in range(beginning, len(whole) + 1):
        message = parsed(fmt, "So: " + whole[:end], size)
        assert message.content.rstrip() == "So:", whole[:end]
        assert [call.name for call in message.tool_calls] in ([], ["f"])


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize("end", range(1, len("</tool_call>")))
def test_an_incomplete_closing_marker_after_a_call_is_markup(end, size):
    text = '<tool_call>{"name": "f", "arguments": {}}\n' + "</tool_call>"[:end]
    message = parsed(HERMES, text, size)
    assert (calls(message), message.content) == ([("f", {})], None)


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_an_incomplete_tag_between_arguments_is_not_content(size):
    beginning = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"
    rest = "<parameter=b"
    for end in range(len(rest) + 1):
        message = parsed(CODER, beginning + rest[:end], size)
        assert (calls(message), message.content) == ([("f", {"a": "x"})], None), rest[:end]


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_an_incomplete_marker_of_several_tags_is_markup(size):
    fmt = get_format("kimi_k3")
    text = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    for end in range(text.rindex("<|close|>") + len("<|close|>"), len(text)):
        assert parsed(fmt, text[:end], size).content == "Yes.", text[:end]


def test_prose_that_ends_like_the_beginning_of_a_marker_is_kept():
    fmt = fmt_of(Call(JsonArguments(), head="to={name}<|m|>", close="<|end|>"))
    assert parsed(fmt, "set it to=five", 1).content == "set it to=five"
    assert parsed(HERMES, "so <tool_c", 1).content == "so <tool_c"


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize("separator", ["", "\n"])
def test_several_objects_between_one_pair_of_markers_are_calls(separator, size):
    first, second = '{"name": "f", "arguments": {"a": "x"}}', '{"name": "g", "arguments": {}}'
    text = f"<tool_call>\n{first}{separator}{second}\n</tool_call>\nok"
    message = parsed(HERMES, text, size, tools=TOOLS)
    assert calls(message) == [("f", {"a": "x"}), ("g", {})]
    assert message.content.strip() == "ok"


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_an_object_after_a_call_that_is_no_call_is_content(size):
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"}}{"x": 1} is it'
    assert parsed(HERMES, text, size, tools=TOOLS).content == '{"x": 1} is it'


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_arguments_with_bare_keys_may_contain_json_strings(size):
    fmt = get_format("gemma4")
    for inside in ('"a": "x \\"y\\"", b:3', 'a:"x \\"y\\"",b:3', 'a:<|"|>x "y"<|"|>,b:3'):
        message = parsed(fmt, f"<|tool_call>call:f{{{inside}}}<tool_call|>ok", size)
        assert calls(message) == [("f", {"a": 'x "y"', "b": 3})]
        assert message.content == "ok"


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_strings_in_double_quotes_beside_bare_keys_are_json_strings(size):
    body = BareKeyArguments('"')
    fmt = fmt_of(Call(body, open="<c>", head='{{name: "{name}", arguments: ', close="}</c>"))
    text = '<c>{name: "f", arguments: {a: "x \\"y\\", \\n}", b: [1, "z"]}}</c>ok'
    message = parsed(fmt, text, size)
    assert calls(message) == [("f", {"a": 'x "y", \n}', "b": [1, "z"]})]
    assert message.content == "ok"
    tag = fmt.structural_tag([tool("f", a={"type": "string"})], "required")
    assert '"json_schema": {"type": "string"}' in json.dumps(tag)


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_string_inside_an_argument_keeps_its_type(size):
    text = '<|tool_call>call:f{o:{k:<|"|>null<|"|>}}<tool_call|>'
    tools = [tool("f", o={"type": "object"})]
    assert calls(parsed(get_format("gemma4"), text, size, tools=tools)) == [
        ("f", {"o": {"k": "null"}})
    ]


@pytest.mark.parametrize(
    ("name", "text", "call_id"),
    [
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
            "<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "functions.f:3",
        ),
        ("mistral", '[TOOL_CALLS][{"id": "early", "name": "f", "arguments": {}}]', "early"),
        # If the id comes after the arguments or is not a string, the parser generates an id.
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "late"}]', "id0"),
        ("mistral", '[TOOL_CALLS][{"id": 7, "name": "f", "arguments": {}}]', "id0"),
    ],
    ids=["marker", "kimi", "first key", "last key", "a number"],
)
def test_an_id_that_the_model_writes_before_the_arguments_is_returned(name, text, call_id):
    events = stream(get_format(name), text, size=1)
    assert events[0] == ToolCallStart(index=0, id=call_id, name="f")


def test_generated_ids_differ():
    parser = StreamParser(HERMES)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    first, second = fold([*parser.feed(text), *parser.finish()]).tool_calls
    assert first.id != second.id
    assert first.id.startswith("call_")


def test_names_in_nested_objects_are_found():
    keys = Keys("function.name", "function.arguments", id="id")
    fmt = fmt_of(Call(JsonObject(keys), open="<c>", close="</c>"))
    call = '{"name": "f", "arguments": {"a": "x"}}'
    events = stream(fmt, f'<c>{{"id": "i1", "type": "function", "function": {call}}}</c>', size=1)
    assert events[0] == ToolCallStart(index=0, id="i1", name="f")
    assert calls(fold(events)) == [("f", {"a": "x"})]


def test_the_calls_before_the_fault_in_an_array_are_kept():
    fmt = fmt_of(Call(JsonArray()), open="<s>", close="</s>")
    message = parsed(fmt, '<s>[{"name": "f", "arguments": {}}, {"nam</s>more', 1)
    assert calls(message) == [("f", {})]
    assert message.content.endswith("more")


def test_a_wrapper_may_have_only_one_marker():
    layout = Sections(content=Wrapper("[BEGIN]\n", ""))
    assert parsed(Format("w", layout), "[BEGIN]\nyes", 1).content == "yes"


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("words", ["Answer:", ":", "---"])
def test_words_that_open_the_content_are_kept_inside_the_content(words, size):
    layout = Sections(Reasoning("<think>", "</think>"), Wrapper(f"{words}\n", ""))
    message = parsed(Format("w", layout), f"<think>Hm</think>{words}\nA {words} b\n{words} c", size)
    assert (message.reasoning, message.content) == ("Hm", f"A {words} b\n{words} c")


def test_a_bare_call_within_text_is_a_call_only_if_its_function_is_offered():
    fmt = get_format("llama3_json")
    text = 'Here: {"name": "f", "parameters": {"a": "x"}} so.'
    assert calls(parsed(fmt, text, 1, tools=TOOLS)) == [("f", {"a": "x"})]
    assert parsed(fmt, text, 1, tools=None).content == text
    other = text.replace('"f"', '"h"')
    assert parsed(fmt, other, 1, tools=TOOLS).content == other


def test_a_bare_python_call_within_text_is_a_call_only_if_its_function_is_offered():
    fmt = get_format("pythonic")
    text = "Here: [f(a='x')] and [f(b=1)] so [1]."
    message = parsed(fmt, text, 1, tools=TOOLS)
    assert calls(message) == [("f", {"a": "x"}), ("f", {"b": 1})]
    assert message.content == "Here:  and  so [1]."
    assert parsed(fmt, text, 1, tools=None).content == text


def test_bare_json_of_an_unknown_function_is_an_answer():
    fmt = get_format("llama3_json")
    text = '{"name": "h", "parameters": {}}'
    assert parsed(fmt, text, 1, tools=TOOLS).content == text
    assert calls(parsed(fmt, text, 1, tools=None)) == [("h", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {not json}',
        '{"name": "f", "parameters": "x"}',
        '{"name": "f"}',
        '{"parameters": {}}',
        '{"name": "f", "parameters": {',
    ],
)
def test_bare_json_that_is_not_shaped_like_a_call_is_content(text):
    assert parsed(get_format("llama3_json"), text, 1, tools=TOOLS).content == text


@pytest.mark.parametrize("separator", ["; ", ";", ";\n", "\n", " ; ", ""])
def test_bare_calls_may_be_separated_in_any_way(separator):
    one = '{"name": "f", "parameters": {"a": "x"}}'
    message = parsed(get_format("llama3_json"), one + separator + one, 1, tools=TOOLS)
    assert (len(message.tool_calls), message.content) == (2, None)


def test_bare_keys_may_hold_every_kind_of_value():
    fmt = fmt_of(Call(BareKeyArguments("<q>"), open="<c>", head="{name}", close="</c>"))
    text = "<c>f{a:<q>x, {y}<q>,n:-1.5,b:true,z:null,l:[<q>p<q>,[]],o:{k:{}},e:<q><q>}</c>"
    expected = {
        "a": "x, {y}",
        "n": -1.5,
        "b": True,
        "z": None,
        "l": ["p", []],
        "o": {"k": {}},
        "e": "",
    }
    assert calls(parsed(fmt, text, 1)) == [("f", expected)]
    broken = parsed(fmt, "<c>f{a:<q>x<q> b:1}</c>", 1)
    assert calls(broken) == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"""a "quoted" b"""', 'a "quoted" b'),
        ("'\\x41\\u00e9\\n\\q\\/'", "Aé\n\\q/"),
        ("'\\ud83d\\ude00'", "😀"),
        ("''", ""),
        ("(1, 2,)", [1, 2]),
        ("{'k': {1: [True, None]}}", {"k": {"1": [True, None]}}),
        ("[]", []),
        ("{}", {}),
        ("-1e3", -1000.0),
        ("0x10", 16),
        ("bare_word", "bare_word"),
        ("'\\xZZ'", "\\xZZ"),
    ],
)
def test_python_literals_become_json(written, value):
    fmt = get_format("pythonic")
    for size in (1, 2, 10**9):
        assert calls(parsed(fmt, f"[f(v={written}, w=1)]", size)) == [("f", {"v": value, "w": 1})]


@pytest.mark.parametrize("size", [1, 2, 10**9])
@pytest.mark.parametrize("name", ["f", "3d-render", "docs:search", "a/b"])
def test_python_calls_may_have_names_that_python_does_not_allow(name, size):
    keys = ("Content-Type", "x.y", "$filter", "@type", "1", "a/b", "xml:lang")
    arguments = ", ".join(f"{key}='x, y'" for key in keys)
    message = parsed(get_format("pythonic"), f"[{name}({arguments}), {name}(x-y=1)]", size)
    first = (name, dict.fromkeys(keys, "x, y"))
    assert calls(message) == [first, (name, {"x-y": 1})]


@pytest.mark.parametrize(
    "text", ["[f(1)]", "[f(a-b)]", "[f (a=1)]", "[f(a==1)]", "[f(a", "[f(", "[f", "[1]"]
)
def test_python_that_is_no_keyword_call_is_content(text):
    assert parsed(get_format("pythonic"), text, 1).content == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(a=1 2)]", {"a": 1}),
        ("[f(a=[1, 2)]", {"a": [1, 2]}),
        ("[f(a={'b': 1 : 2})]", {"a": {"b": 1}}),
        ("[f(a=1, 2)]", {"a": 1}),
        ("[f(a=)]", {"a": None}),
        ("[f(a={'b': )]", {"a": {"b": None}}),
        ("[f(a={)]", {"a": {}}),
    ],
)
def test_broken_python_arguments_are_completed_to_json(text, arguments):
    message = parsed(get_format("pythonic"), text, 1)
    assert calls(message) == [("f", arguments)]


def test_python_calls_may_be_followed_by_text():
    message = parsed(get_format("pythonic"), "[f(a=1)] done", 1)
    assert (calls(message), message.content.strip()) == ([("f", {"a": 1})], "done")


TYPED = [
    tool(
        "f",
        s={"type": "string"},
        i={"type": "integer"},
        n={"type": "number"},
        b={"type": "boolean"},
        o={"type": "object"},
        l={"type": ["array", "null"]},
        u={"anyOf": [{"type": "string"}, {"type": "null"}]},
        m={"oneOf": [{"type": "integer"}, {"type": "string"}]},
        e={"enum": ["1", "2"]},
        c={"const": 5},
        r={"$ref": "#/$defs/R"},
        a={"allOf": [{"type": "integer"}, {"minimum": 1}]},
        p={"properties": {}},
        t={"items": {}},
        k={"type": "integer", "nullable": True},
        x={},
        w={"type": "strange"},
        q={"anyOf": [{}, {"type": "null"}]},
        h={"type": "str"},
    )
]
TYPED[0]["function"]["parameters"]["$defs"] = {"R": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "12", "12"),
        ("s", "null", "null"),
        ("s", " x ", " x "),
        ("i", "12", 12),
        ("i", "9007199254740993", 9007199254740993),
        ("i", "12 Main Street", "12 Main Street"),
        ("i", "1.5", 1.5),
        ("n", "2", 2),
        ("n", "1_000", 1000),
        ("b", "True", True),
        ("b", "false", False),
        ("b", "yes", "yes"),
        ("o", '{"a": 1}', {"a": 1}),
        ("o", "{'a': 1}", {"a": 1}),
        ("o", "{broken", "{broken"),
        ("l", "None", None),
        ("l", "[1]", [1]),
        ("u", "null", None),
        ("u", "nullable", "nullable"),
        ("u", "", ""),
        ("m", "7", 7),
        ("m", "seven", "seven"),
        ("e", "1", "1"),
        ("c", "5", 5),
        ("r", "true", True),
        ("a", "3", 3),
        ("p", "{}", {}),
        ("t", "[]", []),
        ("k", "null", None),
        ("x", "5", 5),
        ("x", '"q"', '"q"'),
        ("x", "hello", "hello"),
        ("x", "true story", "true story"),
        ("w", "[1", "[1"),
        ("q", "null", None),
        ("h", "1", "1"),
        ("unknown", "", ""),
    ],
)
def test_tagged_values_have_the_type_that_the_schema_declares(key, written, value):
    text = (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for size in (1, 3, 10**9):
        message = parsed(get_format("qwen3_coder"), text, size, tools=TYPED)
        assert calls(message) == [("f", {key: value})]


def test_a_value_keeps_all_but_its_declared_padding():
    value = "\n\n  x\n\n\n"
    text = f"<tool_call>\n<function=f>\n<parameter=s>{value}</parameter>\n</function>\n</tool_call>"
    assert calls(parsed(get_format("qwen3_coder"), text, 1, tools=TYPED)) == [
        ("f", {"s": "\n  x\n\n"})
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=f>\n<parameter=s>\nPar", '{"s": "Par'),
        ("<tool_call>\n<function=f>\n<parameter=i>\n12", '{"i": 12'),
        ("<tool_call>\n<function=f>\n<parameter=i>\n12\n</parameter>\n", '{"i": 12}'),
        ("<tool_call>\n<function=f>\n", "{}"),
    ],
)
def test_tagged_arguments_in_which_the_text_ends_are_kept_as_far_as_they_arrived(text, arguments):
    message = parsed(get_format("qwen3_coder"), text, 1, tools=TYPED)
    assert [call.arguments for call in message.tool_calls] == [arguments]


def test_text_between_tagged_arguments_ends_the_call():
    text = (
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\noops\n</function>\n</tool_call>"
    )
    message = parsed(get_format("qwen3_coder"), text, 1, tools=TYPED)
    assert calls(message) == [("f", {"s": "x"})]
    assert "oops" in message.content


NESTED = fmt_of(Call(NestedTags("~"), head="~<c {name}>", close="~</c>"))
NESTED_TOOLS = [
    tool(
        "f",
        s={"type": "string"},
        l={"type": "array", "items": {"type": "string"}},
        o={"type": "object", "properties": {"n": {"type": "integer"}}},
    )
]


@pytest.mark.parametrize(
    ("elements", "arguments"),
    [
        ("", {}),
        ("~<s> a\nb ~</s>", {"s": " a\nb "}),
        ("~<s>~</s>", {"s": ""}),
        ("~<s>a~b~</s>", {"s": "a"}),
        ("~<l>~<x>1~</x>~<x>2~</x>~</l>", {"l": ["1", "2"]}),
        ("~<l>~</l>~<o>~</o>", {"l": [], "o": {}}),
        ("~<o>\n~<n>7~</n>\n~</o>~<s>x~</s>", {"o": {"n": 7}, "s": "x"}),
        ("~<z>~<item>~<k>v~</k>~</item>~<item>2~</item>~</z>", {"z": [{"k": "v"}, 2]}),
        ("~<z>~<k>~<m>1~</m>~</k>~</z>", {"z": {"k": {"m": 1}}}),
        ("~<o>~<n>7~</wrong>", {"o": {"n": 7}}),
        ("~<s>x~</s>oops", {"s": "x"}),
        ("~<o>~<n>7", {"o": {"n": 7}}),
        ("~<o>~<", {"o": {}}),
        ("~<z>", {"z": ""}),
        ("~<" + "x" * 600, {}),
        ("~</s>", {}),
    ],
)
def test_nested_elements_become_json(elements, arguments):
    for size in (1, 2, 10**9):
        message = parsed(NESTED, f"~<c f>{elements}~</c>", size, tools=NESTED_TOOLS)
        assert calls(message)[:1] == [("f", arguments)], size
        cut = parsed(NESTED, f"~<c f>{elements}", size, tools=NESTED_TOOLS)
        assert not cut.tool_calls or cut.tool_calls[0].arguments.startswith("{")


def test_malformed_tools_are_ignored():
    malformed_tools = [
        {},
        {"function": 3},
        {"function": {"name": 4}},
        {"name": "f", "parameters": None},
    ]
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert calls(parsed(HERMES, text, tools=[*malformed_tools, *TOOLS])) == [("f", {})]


def test_two_calls_of_one_function_are_two_calls():
    text = '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>' * 2
    events = stream(HERMES, text, 1)
    assert [event.index for event in events if isinstance(event, ToolCallStart)] == [0, 1]


def test_an_incomplete_header_is_markup_and_other_text_is_content():
    fmt = get_format("gpt_oss")
    assert parsed(fmt, "<|channel|>ana", 1) == fold([])
    assert parsed(fmt, "<|start|>assistant", 1) == fold([])
    assert parsed(fmt, "<|start|>user", 1).content == "<|start|>user"
    assert parsed(fmt, "Hello.", 1).content == "Hello."


def test_text_between_messages_is_content():
    fmt = get_format("gpt_oss")
    text = "<|channel|>analysis<|message|>a<|end|>b<|start|>assistant<|channel|>final<|message|>c"
    message = parsed(fmt, text, 1)
    assert (message.reasoning, message.content) == ("a", "bc")


def test_built_in_tools_keep_their_full_name():
    text = '<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>'
    assert calls(parsed(get_format("gpt_oss"), text, 1)) == [("browser.search", {"q": 1})]


def test_the_strict_policy_accepts_no_call_message_after_content():
    text = (
        "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f<|message|>{"a": 1}'
    )
    message = parsed(get_format("gpt_oss"), text, 1, policy=STRICT)
    assert message.tool_calls == []


@pytest.mark.parametrize(
    "text",
    [
        " " * 60_000,
        "<" * 60_000,
        "<tool_call>" * 6_000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 60_000,
        '<tool_call>{"name": "f", "arguments": ' + "{" * 60_000,
        '<tool_call>{"name": "f", "arguments": {"a":' + " " * 60_000,
    ],
    ids=["blanks", "beginnings", "markers", "escapes", "brackets", "blanks in JSON"],
)
def test_time_is_linear_for_adversarial_text(text):
    parser = StreamParser(HERMES, new_id=counted_ids())
    start = time.process_time()
    for char in text:
        parser.feed(char)
    parser.finish()
    assert time.process_time() - start < 60e-6 * len(text)


@pytest.mark.parametrize(
    ("name", "start", "repeated", "size"),
    [
        ("hermes", "<tool_call>", "\n", 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "\n", 1),
        ("qwen3_coder", "<tool_call>\n<function=f>", "\n", 1),
        ("pythonic", "[", "\n", 1),
        ("llama3_json", "{", "\n", 1),
        ("gpt_oss", "<|channel|>", "\n", 1),
        ("gpt_oss", "<|channel|>analysis", "<|channel|>final x<|start|>assistant", 10**9),
    ],
)
def test_time_is_linear_for_an_incomplete_header(name, start, repeated, size):
    text = start + repeated * (100_000 // len(repeated))
    parser = StreamParser(get_format(name), tools=TOOLS, new_id=counted_ids())
    start_s = time.process_time()
    for position in range(0, len(text), size):
        parser.feed(text[position : position + size])
    parser.finish()
    # On average, the parser may take at most 60 microseconds for a character.
    assert time.process_time() - start_s < 60e-6 * len(text)


@pytest.mark.parametrize("padding", ["\n" * 2000, "\n" * 3000, "\n" * 2047 + "f", "f" * 3000])
def test_a_long_header_is_read_alike_however_it_arrives(padding):
    # If a header is not complete after 2048 characters, the parser stops waiting for its end.
    for text in (
        f'<tool_call>{padding}{{"name": "f", "arguments": {{}}}}</tool_call>',
        f"<tool_call>\n<function=f{padding}>\n</function>\n</tool_call>",
    ):
        for fmt in (HERMES, get_format("qwen3_coder")):
            expected = parsed(fmt, text)
            for size in (1, 700, 2049):
                assert parsed(fmt, text, size) == expected


@pytest.mark.parametrize("size", [1, 10**9])
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("o", '{"x": "one\ntwo"}', {"x": "one\ntwo"}),
        ("o", '{\n  "x": 1.50\n}', {"x": 1.5}),
        ("n", "NaN", "NaN"),
        ("n", "-Infinity", "-Infinity"),
    ],
)
def test_a_value_between_tags_becomes_valid_json(key, value, expected, size):
    def refuse_constant(word):
        """Fail for NaN and Infinity: they are not JSON, but Python's JSON parser accepts them."""
        raise AssertionError(word)

    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    (call,) = parsed(get_format("qwen3_coder"), text, size, tools=TYPED).tool_calls
    assert json.loads(call.arguments, parse_constant=refuse_constant) == {key: expected}


@pytest.mark.parametrize("policy", [LENIENT, STRICT])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n\\ud83d"}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d</tool_call>'),
        (
            "hermes",
            r'<tool_call>{"name": "g", "arguments": {"input": {"a": "\ud83d"}}}</tool_call>',
        ),
        (
            "qwen3_coder",
            r"<tool_call><function=f><parameter=o>{'a': '\ud83d'}</parameter></function>",
        ),
    ],
)
def test_half_of_a_surrogate_pair_can_be_sent_to_the_client(name, text, policy):
    offered = [*TYPED, tool("g", a={"type": "string"})] if "f\\" not in text else None
    message = parsed(get_format(name), text, tools=offered, policy=policy)
    (call,) = message.tool_calls
    assert "\\ud83d" in call.name + call.arguments
    (call.name + call.arguments).encode()


def test_deeply_nested_arguments_raise_nothing():
    depth = 5_000
    text = "[f(a=" + "[" * depth + "]" * depth + ")]"
    assert parsed(get_format("pythonic"), text).tool_calls
    value = "[" * depth + "]" * depth
    text = f"<tool_call>\n<function=f>\n<parameter=o>{value}</parameter>\n</function>\n</tool_call>"
    assert parsed(get_format("qwen3_coder"), text, tools=TYPED).tool_calls


def test_events_are_values():
    assert ReasoningDelta("a") == ReasoningDelta("a")
    assert ReasoningDelta("a") != ContentDelta("a")


@pytest.mark.parametrize("size", [1, 100])
def test_the_end_of_a_message_inside_inline_reasoning_is_not_content(size):
    reasoning = Reasoning("<think>", "</think>", shown=Shown.INLINE)
    fmt = Format("test", Sections(reasoning=reasoning), ends=("<|im_end|>",))
    assert parsed(fmt, "<think>Hm<|im_end|>", size).content == "<think>Hm"


def test_a_stop_marker_without_the_tag_prefix_may_arrive_in_pieces():
    fmt = fmt_of(Call(NestedTags("~"), head="<c {name}>", close="</c>"))
    text = "<c f>~<city>Paris~</city></c>"
    for size in range(1, len(text)):
        events = stream(fmt, text, size)
        assert calls(fold(events)) == [("f", {"city": "Paris"})]
        assert all(event.reason is None for event in events if isinstance(event, ToolCallEnd))


def test_a_stop_marker_that_starts_like_an_argument_may_arrive_in_pieces():
    tags = TaggedArguments("[{key}]", "[/{key}]")
    fmt = fmt_of(Call(tags, head="[[{name}]]", close="[[end]]"))
    for text, arguments in (("[city]Paris[/city]", {"city": "Paris"}), ("", {})):
        text = f"[[f]]{text}[[end]] Hi"
        for size in range(1, len(text)):
            message = parsed(fmt, text, size)
            assert (calls(message), message.content) == ([("f", arguments)], " Hi")


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("offered", [None, TOOLS])
@pytest.mark.parametrize(
    ("head", "tag", "close", "section"),
    [
        ("- {name}:\n", "  {key}: ", "\n", ("<calls>\n", "</calls>")),
        ("call: {name}\n", "  {key}: ", "\n", ("<calls>\n", "</calls>")),
        ("<fn={name}>\n", "<k>{key}</k><v>", "</v>\n", ("", "")),
    ],
    ids=["list", "lines", "tags"],
)
def test_the_next_call_ends_the_arguments_if_calls_have_no_closing_marker(
    head, tag, close, section, offered, size
):
    section_open, section_close = section
    tools = ToolSection(
        (Call(TaggedArguments(tag, close), head=head),), section_open, section_close
    )
    fmt = Format("test", Sections(tools=tools), ends=("<|end|>",))
    # The first call has two arguments, and the other two calls have no arguments.
    arguments = f"{tag.format(key='a')}x{close}{tag.format(key='b')}2{close}"
    written_calls = head.format(name="f") + arguments + head.format(name="g") * 2
    text = f"Hi.{section_open}{written_calls}{section_close}<|end|>"

    message = parsed(fmt, text, size, tools=offered)

    # The schema of the tool declares that the argument b is an integer.
    expected_arguments = {"a": "x", "b": 2 if offered else "2"}
    assert calls(message) == [("f", expected_arguments), ("g", {}), ("g", {})]
    assert message.content == "Hi."


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("separator", ["; ", "\n", ", "])
@pytest.mark.parametrize("value", ["x", "a, b; c\nd", "1, 2", "long, " * 60 + "x"])
def test_the_last_value_may_lack_the_separator_that_ends_the_other_values(value, separator, size):
    fmt = fmt_of(Call(TaggedArguments("{key}=", separator), "<call>", "{name} ", "</call>"))
    text = f"<call>f a={value}{separator}b=2</call><call>f a=y{separator}b=3{separator}</call> Hi"
    message = parsed(fmt, text, size, tools=TOOLS)
    assert calls(message) == [("f", {"a": value, "b": 2}), ("f", {"a": "y", "b": 3})]
    assert message.content == " Hi"


@pytest.mark.parametrize("value", ["null", " null", "null\n", "\u2028null"])
@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {}])
def test_white_space_around_null_does_not_make_it_a_string(schema, value):
    text = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
    for size in (1, 3, 1000):
        message = parsed(get_format("qwen3_coder"), text, size, tools=[tool("f", a=schema)])
        assert calls(message) == [("f", {"a": None})]


def test_a_name_ends_at_a_bracket_that_is_not_ascii():
    fmt = fmt_of(Call(TaggedArguments("«{key}»", "«/{key}»"), "<call>", "{name}", "</call>"))
    for size in (1, 100):
        message = parsed(fmt, "<call>f«a»x«/a»</call>", size)
        assert calls(message) == [("f", {"a": "x"})]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("offered", [None, TOOLS])
def test_a_call_ends_before_the_next_one_if_a_marker_separates_its_arguments(offered, size):
    fmt = fmt_of(Call(TaggedArguments("{key}=", "<sep>"), "<call>", "{name} ", "</call>"))
    text = "<call>f a=x</call><call>f a=y</call> z<sep>c=2</call>"
    for cut in range(1, len(text)):
        assert fold(stream_at(fmt, text, [cut], tools=offered)) == parsed(fmt, text, tools=offered)
    message = parsed(fmt, text, size, tools=offered)
    assert calls(message) == [("f", {"a": "x"}), ("f", {"a": "y</call> z", "c": "2"})]
    assert not message.content
