"""The sentences that state what an analysis could not infer."""

import pytest
from nereid_parsers import analyze_template, parse

# A template with `PLACE` after the header of each message. It declares the tools first.
MESSAGES = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}PLACE{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}ARGUMENT{% endfor %}"


def template(before_content="", call="", argument=""):
    text = MESSAGES.replace("PLACE", before_content).replace("CALL", call)
    return text.replace("ARGUMENTS", ARGUMENTS).replace("ARGUMENT", argument)


@pytest.mark.parametrize(
    ("source", "words"),
    [
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
                argument="{{ k }}: {{ v | tojson }}\n",
            ),
            "TaggedArguments.open is '{key}: \"', but must start with a visible character",
        ),
        (
            template(before_content="{% if m.reasoning %}<think>{{ m.reasoning }} {% endif %}"),
            "R1: The markers of reasoning cannot be recognised.",
        ),
    ],
    ids=[
        "a value before its key",
        "values without markers",
        "keys without markers",
        "reasoning without an end",
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
    call = (
        '["v1", {"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}]'
    )
    analysis = analyze_template(template(call=f"<call>{call}</call>"))
    written = '<call>["v1", {"name": "f", "arguments": {"a": 1}}]</call>'
    message = parse(written, format=analysis.format)
    assert [(made.name, made.arguments) for made in message.tool_calls] == [("f", '{"a": 1}')]
