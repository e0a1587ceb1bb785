"""Tests of the analysis with the small templates of tests/data/templates.

The file forms.json declares the form of each template.
"""

import json
import time

import pytest
from nereid_parsers import ConstraintError, analyze_template, parse
from nereid_parsers.format import Messages, NestedTags, Sections
from nereid_parsers.template.quarantine import QUARANTINE
from nereid_parsers.template.report import report_json, report_of
from nereid_parsers.template.sandbox.limits import ANALYSIS_LIMITS
from parsers.template.support import (
    CALLS,
    FORMS,
    NAMES,
    TOOLS,
    Renderer,
    Written,
    analysis_of,
    calls_of,
    message_of,
    source,
    stream_written,
    tool,
)

# The messages of these templates do not start with their generation prompt.
UNLIKE_PROMPT = {
    "prompt_opens_thinking",
    "tagged_section",
    "effort_switch",
    "delimited_by_words",
    "prompt_opens_channel",
    "prompt_opens_message",
    "invoke_in_call",
    "section_fenced",
    "bare_keys_channel",
    "no_switch_prompt",
}


def described(analysis):
    """Return an inferred format in the notation of forms.json."""
    layout, calls = analysis.format.layout, analysis.supports.calls
    if isinstance(layout, Messages):
        return {"layout": "Messages", "calls": calls}
    reasoning, content, tools = layout.reasoning, layout.content, layout.tools
    form = {"reasoning": [reasoning.open, reasoning.close] if reasoning else None}
    if reasoning and reasoning.opener.value != "model":
        form["opener"] = reasoning.opener.value
    form["content"] = [content.open, content.close] if content else None
    form["calls"] = calls
    if tools:
        call = tools.calls[0]
        form["section"] = [tools.open, tools.close, tools.separator]
        form["call"] = [call.open, call.head, call.close]
        form["body"] = repr(call.body)
    return form | {"ends": list(analysis.format.ends)}


def test_every_template_has_a_form_and_every_form_a_template():
    assert sorted(FORMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_form_is_inferred(name):
    assert described(analysis_of(name)) == FORMS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_rendering_is_parsed_correctly(name):
    analysis = analysis_of(name)
    assert analysis.proofs
    assert [(proof.name, proof.differs) for proof in analysis.proofs if proof.differs] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_samples_of_the_report_have_known_kinds_and_no_differences(name):
    analysis = analysis_of(name)
    report = json.loads(report_json(report_of(name, "", analysis.format, analysis)))
    assert report["format"]["part"] == "Format"
    for sample in report["samples"]:
        kinds = {kind for kind, _ in sample["spans"]}
        assert kinds <= {"reasoning", "content", "call", "markup"}
        assert sample["differs"] == []


def assert_parsed(message, parts):
    """Assert that a parsed message has the content and the calls in `parts`."""
    content = (message.content or "").strip().removesuffix("</s>")
    assert content == parts.get("content", "")
    assert calls_of(message) == list(parts.get("calls", ()))


def messages_of(supports):
    """Return messages that a template can render.

    A message is a dict of its parts: "content", "reasoning" and "calls".
    """
    calls = CALLS if supports.parallel_calls else CALLS[:1]
    messages = [{"content": "It is 5 > 3.\n\n- yes"}]
    if supports.calls != "none":
        messages.append({"calls": calls})
    if supports.content_with_calls:
        messages.append({"content": "I look.", "calls": calls[:1]})
    if supports.reasoning and supports.calls == "none":
        messages.append({"content": "Four.", "reasoning": "Two\nand two."})
    return messages


@pytest.mark.parametrize("name", sorted(set(NAMES) - UNLIKE_PROMPT))
@pytest.mark.parametrize("size", [1, 4, 10**6])
def test_other_messages_are_parsed_as_they_were_rendered(name, size):
    analysis = analysis_of(name)
    renderer = Renderer(source(name))
    for parts in messages_of(analysis.supports):
        message = message_of(**parts, supports=analysis.supports)
        if name == "parts_only" and parts.get("content"):
            message["content"] = [{"type": "text", "text": parts["content"]}]
        written = renderer.written(message, TOOLS)
        if written is not None:
            assert_parsed(stream_written(analysis.format, written, size), parts)


@pytest.mark.parametrize(
    "parts", [{"content": "It is."}, {"calls": CALLS[1:2]}], ids=["content", "calls"]
)
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"no_switch_prompt", "parts_only"}))
@pytest.mark.parametrize("size", [1, 10**6])
def test_an_answer_after_a_tool_result_is_parsed_correctly(name, size, parts):
    analysis, renderer = analysis_of(name), Renderer(source(name))
    if analysis.supports.calls == "none":
        pytest.skip("this template makes no calls")
    call = message_of(calls=CALLS[:1], supports=analysis.supports)
    call_id, tool_name = call["tool_calls"][0]["id"], CALLS[0][0]
    result = {"role": "tool", "tool_call_id": call_id, "name": tool_name, "content": "Open."}
    history = [{"role": "user", "content": "Is it open?"}, call, result]
    answer = message_of(**parts, supports=analysis.supports)

    prompt = renderer.render(history, TOOLS, prompt=True)
    conversation = renderer.render([*history, answer], TOOLS)

    if conversation.startswith(prompt):
        written = Written(prompt, conversation.removeprefix(prompt))
        assert_parsed(stream_written(analysis.format, written, size), parts)


def test_reasoning_that_the_prompt_opens_after_a_tool_result_is_parsed_correctly():
    fmt, renderer = analysis_of("results_then_think").format, Renderer(source("results_then_think"))
    result = {"role": "tool", "name": CALLS[0][0], "content": "Open."}
    history = [{"role": "user", "content": "Is it?"}, message_of(calls=CALLS[:1]), result]
    prompt = renderer.render(history, TOOLS, prompt=True, thinking=True)
    written = Written(prompt, "It says so.</think>It is.")
    message = stream_written(fmt, written, size=1)
    assert (message.reasoning, message.content) == ("It says so.", "It is.")


@pytest.mark.parametrize("name", NAMES)
def test_an_inferred_format_has_a_constraint_or_an_error_with_the_reason(name):
    if analysis_of(name).supports.calls == "none":
        pytest.skip("this template makes no calls")
    fmt, layout = analysis_of(name).format, analysis_of(name).format.layout
    tools = TOOLS[:1]
    if isinstance(layout, Sections) and isinstance(layout.tools.calls[0].body, NestedTags):
        with pytest.raises(ConstraintError, match="begins each tag of the arguments"):
            fmt.structural_tag(tools, "required")
    else:
        assert "get_Station" in json.dumps(fmt.structural_tag(tools, "required"))


def test_numbers_are_read_if_a_template_writes_quotes_around_strings_only():
    # The template writes a number as <key>line</key><value>3</value>, and a string with quotes as
    # <key>name</key><value>"Nord"</value>.
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}"
        "<key>{{ k }}</key><value>{{ v | tojson }}</value>{% endfor %}</call>{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    fmt = analyze_template(template).format
    text = (
        "<call>get_Station<key>line</key><value>3</value>"
        '<key>name</key><value>"Nord"</value></call>'
        "<call>get_Station<key>line</key><value>-1</value></call>"
    )
    message = parse(text, format=fmt, tools=TOOLS)
    arguments = [json.loads(call.arguments) for call in message.tool_calls]
    assert arguments == [{"line": 3, "name": "Nord"}, {"line": -1}]


@pytest.mark.parametrize(
    "marker", ["«%s»", "｟%s｠", "【%s】", "<|%s|>"], ids=["angle", "round", "lenticular", "ascii"]
)
@pytest.mark.parametrize("around_call", ["(call)%s(/call)", "\ue010%s\ue011"])
def test_markers_may_consist_of_characters_that_are_not_ascii(marker, around_call):
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
        "{{ '(ROLE)'.replace('ROLE', m.role) + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
        "{{ '(/ROLE)'.replace('ROLE', m.role) }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '(assistant)' }}{% endif %}"
    ).replace("CALL", around_call % "{{ c.function | tojson }}")
    text = f"Hi.{around_call}(/assistant)" % '{"name": "f", "arguments": {}}'
    # Replace the markers in round brackets by markers of the tested form: (call) becomes «call».
    for word in ("ROLE", "/ROLE", "assistant", "/assistant", "call", "/call"):
        template = template.replace(f"({word})", marker % word)
        text = text.replace(f"({word})", marker % word)

    analysis = analyze_template(template)
    message = parse(text, format=analysis.format)

    assert analysis.undecided == ()
    assert message.content == "Hi."
    assert [call.name for call in message.tool_calls] == ["f"]


@pytest.mark.parametrize(
    ("name", "key", "written", "value"),
    [
        ("json_in_tags", "text", r'"a\n\"b\" \u00e9 C:\\d"', 'a\n"b" é C:\\d'),
        ("json_in_tags", "text", '"12"', "12"),
        ("json_in_tags", "text", r'"C:\dir"', r"C:\dir"),
        ("json_in_tags", "text", r'"\ud83d"', "\ud83d"),
        ("json_in_tags", "note", '"null"', "null"),
        ("json_in_tags", "note", "null", None),
        ("html_in_tags", "text", "&lt;b&gt; &amp;amp; &#39;x&#39;", "<b> &amp; 'x'"),
        ("html_in_tags", "place", "{&#34;a&#34;: [1]}", {"a": [1]}),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_escapes_in_a_tagged_value_are_decoded(name, key, written, value, size):
    text = f'<call name="save"><arg name="{key}">{written}</arg></call>'
    message = stream_written(analysis_of(name).format, Written("", text), size)
    assert calls_of(message) == [("save", {key: value})]
    # Half of a surrogate pair stays an escape, because UTF-8 cannot encode it.
    assert message.tool_calls[0].arguments.encode()


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("string", r'"a \"b\" c: \\"', 'a "b" c: \\'),
        ("string", r'"a </call>\n  line: 3"', "a </call>\n  line: 3"),
        ("string", '"12"', "12"),
        ("integer", "12", 12),
        ("array", "[1, {}]", [1, {}]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_each_argument_may_be_on_a_line(kind, written, value, size):
    text = f"Hi.<call>\nname: f\narguments:\n  a: {written}\n  b: {written}\n</call>\n"
    fmt, tools = analysis_of("argument_lines").format, [tool("f", a=kind, b=kind)]
    message = stream_written(fmt, Written("", text), size, tools=tools)
    assert message.content == "Hi."
    assert calls_of(message) == [("f", {"a": value, "b": value})]


@pytest.mark.parametrize("separator", ["\\n", "; "])
def test_a_separator_between_arguments_is_no_part_of_the_last_argument(separator):
    # Example of a call that the template writes: <call>get_Station name=Nord; line=4</call>.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' }}"
        "{% for k, v in c.function.arguments.items() %}"
        "{{ k + '=' + (v if v is string else v | tojson) }}"
        "{% if not loop.last %}{{ 'SEPARATOR' }}{% endif %}{% endfor %}</call>{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("SEPARATOR", separator)
    calls = [("get_Station", {"name": "Nord", "line": 4}), ("get_Station", {"line": 5})]
    written = Renderer(template).written(message_of(calls=calls), TOOLS)
    message = parse(written.text, format=analyze_template(template).format, tools=TOOLS)
    assert calls_of(message) == calls
    assert message.content is None


def test_an_attribute_with_an_array_cannot_be_constrained():
    fmt = analysis_of("argument_attributes").format
    with pytest.raises(ConstraintError, match="the schema of 'tags' allows an array"):
        fmt.structural_tag([tool("f", tags="array")], "required")


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("place", "<name>Zoë</name>\n<tags><item>a</item></tags>", {"name": "Zoë", "tags": ["a"]}),
        ("place", "<lat>48.5</lat><lat>2</lat>", {"lat": [48.5, 2]}),
        ("place", "<a><a>x</a></a>", {"a": {"a": "x"}}),
        ("tags", "<tag>1</tag><tag>b</tag>", [1, "b"]),
        ("place", "", {}),
        ("tags", "", []),
        ("place", "<name>a</name> b", "<name>a</name> b"),
        ("text", "<name>a</name>", "<name>a</name>"),
        ("note", "<name>a</name>", "<name>a</name>"),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_an_object_or_array_in_an_argument_may_consist_of_tags(key, written, value, size):
    text = f"<tool_use><name>save</name><arguments><{key}>{written}</{key}></arguments></tool_use>"
    message = stream_written(analysis_of("elements").format, Written("", text), size)
    assert calls_of(message) == [("save", {key: value})]


def test_an_argument_in_an_element_ends_only_at_the_closing_tag_with_its_name():
    value = "a <b>c</b> </arguments></tool_use> <text>d"
    text = f"<tool_use><name>save</name><arguments><note>{value}</note></arguments></tool_use>!"
    message = parse(text, format=analysis_of("elements").format)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"note": value}]
    assert message.content == "!"


def test_a_switch_is_reported_with_its_effect_on_the_prompt():
    switches = analysis_of("tag_json").supports.switches
    assert switches["enable_thinking=False"] == "<think>\n\n</think>\n\n"
    assert "thinking_mode='disabled'" in analysis_of("mode_switch").supports.switches


def test_the_rendered_reasoning_field_is_reported():
    assert analysis_of("tag_json").supports.reasoning == ("reasoning_content",)
    assert analysis_of("thinking_only_with_calls").supports.reasoning == ("thinking",)
    assert analysis_of("reasoning_parts").supports.reasoning == ("parts",)


def test_the_input_form_of_calls_is_reported():
    assert analysis_of("text_arguments").supports.arguments == "text"
    assert analysis_of("numbered_ids").supports.ids == "numbered"
    assert not analysis_of("bare_json").supports.parallel_calls


def test_recognised_templates_are_reported_as_recognised():
    for name in ("harmony", "recipients"):
        assert "was recognised, not inferred" in analysis_of(name).undecided[0]


def test_a_recognised_format_that_parses_the_renderings_wrongly_is_inferred_instead():
    # The template has channels like the format gpt_oss, but its channels have other names, and its
    # calls have another form.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{% if m.reasoning %}{{ '<|channel|>analysis<|message|>' + m.reasoning + '<|end|>' }}"
        "{% endif %}"
        "{% if m.content %}{{ '<|channel|>answer<|message|>' + m.content + '<|end|>' }}{% endif %}"
        "{% for c in m.tool_calls %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}"
        "{% endfor %}{{ '<|stop|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    analysis = analyze_template(template)
    assert analysis.undecided == ()
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|channel|>answer<|message|>Hello.<|end|>"
        '<tool_call>{"name": "list_all", "arguments": {}}</tool_call><|stop|>'
    )
    message = parse(text, format=analysis.format, prompt="<|user|>Hi.<|stop|><|assistant|>")
    assert (message.reasoning, message.content) == ("Hm.", "Hello.")
    assert [call.name for call in message.tool_calls] == ["list_all"]


def test_markers_are_reasoning_if_the_template_removes_the_text_between_them():
    # The template removes the text between <|note> and <note|> from earlier answers.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{% for part in m.content.split('<note|>') %}{{ part.split('<|note>')[0] }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fmt = analyze_template(template).format
    message = parse("<|note>Hm.<note|>Hello.<|end|>", format=fmt, prompt="Hi.<|end|><|assistant|>")
    assert (message.reasoning, message.content) == ("Hm.", "Hello.")

    without_removal = template.replace(".split('<|note>')[0]", " + '<|note>'[:0]")
    assert analyze_template(without_removal).format.layout.reasoning is None


def test_a_marker_in_the_prompt_opens_reasoning_if_the_template_removes_the_text_after_it():
    # The template removes the text up to </ponder> from earlier answers. Its generation prompt ends
    # with <ponder>.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{{ m.content.split('</ponder>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><ponder>\n{% endif %}"
    )
    fmt = analyze_template(template).format
    for prompt in ("Hi.<|end|><|assistant|><ponder>\n", None):
        message = parse("Hm.\n</ponder>\n\nHello.<|end|>", format=fmt, prompt=prompt)
        assert (message.reasoning, message.content) == ("Hm.", "Hello.")

    without_removal = template.replace("[-1]", " | join('</ponder>')")
    assert analyze_template(without_removal).format.layout.reasoning is None


@pytest.mark.parametrize("marker", ["</think>", "<|end_of_plan|>"])
def test_the_output_starts_with_reasoning_if_each_answer_only_closes_it(marker):
    text = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{{ (m.reasoning or '') + 'MARKER' }}{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("MARKER", marker)
    analysis = analyze_template(text)
    assert analysis.undecided == ()
    prompt = "<|user|>Hi.<|end|><|assistant|>"
    message = parse(f"Hm.{marker}Hello.<|end|>", format=analysis.format, prompt=prompt)
    assert (message.reasoning, message.content) == ("Hm.", "Hello.")


def test_unquoted_keys_after_white_space_are_inferred():
    # Example of a call that the template writes: <call>save({ text: "a", n: 1 })</call>.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }}({ "
        "{% for k, v in c.function.arguments.items() %}{{ k }}: {{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %} })</call>{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    analysis = analyze_template(template)
    assert (analysis.supports.calls, analysis.undecided) == ("bare keys", ())
    message = parse('<call>save({ text: "a b", n: 1 })</call>', format=analysis.format)
    assert calls_of(message) == [("save", {"text": "a b", "n": 1})]


def test_a_system_message_that_depends_on_the_generation_prompt_is_no_part_of_the_header():
    # The template adds a system message to a chat without one, but only if it also adds the
    # generation prompt.
    template = (
        "{% if add_generation_prompt and messages[0].role != 'system' %}"
        "{{ '<|system|>Be helpful.<|end|>' }}{% endif %}"
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{% if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}"
        "{{ m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    fmt = analyze_template(template).format
    assert fmt.turn == ("<|assistant|>",)
    prompt = "<|system|>Be helpful.<|end|><|user|>Hi.<|end|><|assistant|>"
    message = parse("<think>Hm.</think>Hello.<|end|>", format=fmt, prompt=prompt)
    assert (message.reasoning, message.content) == ("Hm.", "Hello.")


def test_quarantine_entries_name_a_model_and_a_reason():
    assert len(QUARANTINE) <= 3
    assert all(entry.model and len(entry.reason) > 40 for entry in QUARANTINE)


def test_switches_that_the_caller_sets_are_not_tried():
    given = analyze_template(source("tag_json"), enable_thinking=False)
    assert given.supports.switches == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tag_json", '<tool_call>\n[{"name": "list_all", "arguments": {}}]\n</tool_call>'),
        ("python_list", "<|tool_call_start|>list_all()<|tool_call_end|>"),
    ],
)
def test_calls_with_additional_or_missing_brackets_are_parsed(name, text):
    message = parse(text, format=analysis_of(name).format, tools=TOOLS)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("list_all", "{}")]
    assert not message.content


def test_a_template_without_calls_gives_a_format_without_calls():
    analysis = analyze_template(source("plain"))
    assert analysis.format.layout.tools is None
    assert "The template does not render the call." in analysis.explain()


def test_calls_that_are_parsed_wrongly_are_reported_as_undecided():
    # The template renders only the calls of a message, not its role or its content. A call looks
    # like <|a|><|b|>f<|c|>{}<|d|>.
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        "{{ '<|a|><|b|>' + f.name + '<|c|>' + f.arguments + '<|d|>' }}{% endfor %}{% endfor %}"
    )
    analysis = analyze_template(template)
    assert any("format of the calls could not be inferred" in note for note in analysis.undecided)
    assert analysis.format.layout.tools is None
    assert analysis.format.ends == ()
    for text in ("Hi <|a|>", '{"name": "f", "arguments": {}}'):
        assert parse(text, format=analysis.format).content == text


def test_explain_shows_comparisons_format_and_proofs():
    text = analysis_of("tagged_parameters").explain()
    for words in ("T2 two calls", "TaggedArguments", "parsed correctly", "Constraint"):
        assert words in text


def test_calls_of_an_unknown_form_give_a_format_without_calls():
    unreadable = source("tag_json").replace("(f.arguments | tojson)", "(f.arguments | length)")
    analysis = analyze_template(unreadable)
    assert analysis.format.layout.tools is None


def test_an_analysis_takes_less_than_a_quarter_of_its_time_limit():
    durations_s = []
    # One of three analyses may be slow if another process uses the caches of the processor.
    for _ in range(3):
        start = time.thread_time()
        analyze_template(source("tagged_with_types"))
        durations_s.append(time.thread_time() - start)
    assert min(durations_s) < ANALYSIS_LIMITS.seconds / 4
