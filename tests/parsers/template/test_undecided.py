"""Tests of the sentences that state what an analysis could not infer."""

import pytest
from nereid_parsers import analyze_template, parse
from parsers.template.support import calls_of

# A template that declares the tools first and has `PLACE` after the header of each message.
MESSAGES = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}PLACE{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}ARGUMENT{% endfor %}"


def template(before_content="", call="", argument=""):
    """Return a chat template.

    `call` is the template of a call. In `call`, `{{ ARGS }}` stands for the arguments as JSON, and
    ARGUMENTS stands for all arguments, each rendered with the template `argument`.
    Example: `template(call="<call>{{ c.function.name }} {{ ARGS }}</call>")`.
    """
    text = MESSAGES.replace("PLACE", before_content).replace("CALL", call)
    text = text.replace("ARGS", "c.function.arguments | tojson")
    return text.replace("ARGUMENTS", ARGUMENTS).replace("ARGUMENT", argument)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            template(
                call="<call {{ c.function.name }}>ARGUMENTS</call>",
                argument="<arg>{{ {k: v} | tojson }}</arg>",
            ),
            "the parser did not return the call",
        ),
        (
            template(call="<call {{ c.function.name }}>ARGUMENTS</call>", argument="{{v}}<-{{k}};"),
            "The calls have no form that the analysis knows.",
        ),
        (
            template(call="<call>{{ c.function.name }} ARGUMENTS", argument="{{k}}{{v}}"),
            "read_tagged inferred an invalid format of the calls",
        ),
        (
            template(
                call="<call>{{ c.function.name }}\nARGUMENTS<end>",
                argument="{{ k }}: {{ v }} ",
            ),
            "TaggedArguments.close is ' ', but a marker must contain a visible character",
        ),
        (
            template(
                call="<call>{{ c.function.name }}{{ ARGS }}</call>"
                "{% if not loop.last %}<after {{ c.function.name }}>{% endif %}"
            ),
            "could not be inferred: the text between two calls repeats the name of the function",
        ),
        (
            template(
                call='<call>{"name": "{{ c.function.name }}", "arguments": {{ ARGS }}}'
                "</{{ c.function.name }}>"
            ),
            "Call.close is '</{name}>' and contains the field {name}, so Call.head must contain",
        ),
        (
            template(before_content="{% if m.reasoning %}<think>{{ m.reasoning }} {% endif %}"),
            "R1: The markers of reasoning cannot be recognised.",
        ),
        (
            template(call="{% if m.reasoning %}<why>{{ m.reasoning }}</why>{% endif %}").replace(
                "m.tool_calls or []", "[1]"
            ),
            "The message with reasoning and content is parsed wrongly: reasoning, content differ.",
        ),
        (
            template(
                before_content="{% if m.reasoning %}<think words={{ m.reasoning | wordcount }}>"
                "{{ m.reasoning }}</think>{% endif %}"
            ),
            "The message with reasoning and content is parsed wrongly: reasoning, content differ.",
        ),
        (
            template(
                call="<call_{{ loop.index }}>{{ c.function.name }}|{{ ARGS }}"
                "</call_{{ loop.index }}>"
            ),
            "The message with three calls is parsed wrongly: content differ.",
        ),
        (
            template(
                call="<call>{{ c.function.name }} ARGUMENTS</call>",
                argument="<{{ k }}>{{ v | urlencode }}</{{ k }}>",
            ),
            "The message with special characters in a call is parsed wrongly: tool arguments",
        ),
    ],
    ids=[
        "JSON of each argument",
        "a value before its key",
        "values without markers",
        "values that end at a space",
        "the name between two calls",
        "a closing text with the name after a JSON object with the name",
        "reasoning without an end",
        "reasoning after the content",
        "a marker with the length of the reasoning",
        "closing tags with the number of the call",
        "values in an unknown encoding",
    ],
)
def test_what_cannot_be_inferred_is_reported(source, words):
    analysis = analyze_template(source)
    assert any(words in sentence for sentence in analysis.undecided), analysis.undecided


def test_reasoning_that_no_marker_separates_from_a_call_is_reported():
    source = template(
        before_content="{% if m.reasoning %}<think>{{ m.reasoning }}"
        "{% if m.content %}</think>{% endif %}{% endif %}",
        call='{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    )
    analysis = analyze_template(source)
    assert analysis.undecided[0].startswith("R5: The end of reasoning before a call")


def test_an_array_that_does_not_begin_with_a_call_does_not_stop_the_analysis():
    call = '["v1", {"name": "{{ c.function.name }}", "arguments": {{ ARGS }}}]'
    analysis = analyze_template(template(call=f"<call>{call}</call>"))
    text = '<call>["v1", {"name": "f", "arguments": {"a": 1}}]</call>'
    message = parse(text, format=analysis.format)
    assert calls_of(message) == [("f", {"a": 1})]


@pytest.mark.parametrize("opening", ["{call}", "{{call}}", "<{name}>"])
@pytest.mark.parametrize(
    ("call", "written"),
    [
        ('{"name": "{{ c.function.name }}", "x": {{ ARGS }}}', '{"name": "f", "x": {"a": 1}}'),
        ("{{ c.function.name }}{{ ARGS }}", 'f{"a": 1}'),
    ],
    ids=["JSON", "a name, then JSON"],
)
def test_a_marker_with_braces_opens_calls(opening, call, written):
    analysis = analyze_template(template(call=f"{{{{ {opening!r} }}}}{call}<end>"))
    message = parse(f"{opening}{written}<end>", format=analysis.format)
    assert calls_of(message) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            '<call n="{{ loop.index }}"><f={{ c.function.name }}>{{ ARGS }}</call>',
            '<call n="7"><f=f>{"a": 1}</call>',
        ),
        (
            '<call id="{{ c.id }}">{"name": "{{ c.function.name }}", "args": {{ ARGS }}}</call>',
            '<call id="x-1">{"name": "f", "args": {"a": 1}}</call>',
        ),
    ],
    ids=["a number", "an id"],
)
def test_the_opening_tag_of_a_call_may_contain_its_number_or_id(call, written):
    analysis = analyze_template(template(call=call))
    message = parse(f"Hi.{written}{written}", format=analysis.format)
    assert calls_of(message) == [("f", {"a": 1})] * 2
    assert message.content == "Hi."
