"""Tests of arguments without closing tags: only a separator or the next key ends a value."""

import json

import pytest
from nereid_parsers import FormatError, StreamParser, analyze_template, fold, parse
from nereid_parsers.format import TaggedArguments
from parsers.template.support import analysis_of, calls_of, tool

TOOLS = [tool("f", a="string", b="string", n="integer", o="object", l="array"), tool("now")]
MESSAGES = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def format_of(call, argument):
    """Return the format of a template that writes tool calls as in `call`.

    The template replaces NAME in `call` by the name of the function, and ARGUMENTS by the text of
    all arguments. For the text of one argument, the template replaces KEY in `argument` by the key
    and JSON by the value as JSON. It replaces TEXT by the value without quotes around strings.
    """
    values = {
        "KEY": "{{ k }}",
        "TEXT": "{{ v if v is string else v | tojson }}",
        "JSON": "{{ v | tojson }}",
    }
    for name, expression in values.items():
        argument = argument.replace(name, expression)
    pieces, _, separator = argument.partition("SEPARATOR")
    between = f"{{% if not loop.last %}}{{{{ {separator!r} }}}}{{% endif %}}" if separator else ""
    loop = f"{{% for k, v in c.function.arguments.items() %}}{pieces}{between}{{% endfor %}}"
    call = call.replace("NAME", "{{ c.function.name }}").replace("ARGUMENTS", loop)
    return analyze_template(MESSAGES.replace("CALL", call)).format


def assert_parsed(fmt, text, expected, content=None):
    """Assert that a text contains the expected calls, however it is split into two pieces."""
    for split in range(len(text) + 1):
        parser = StreamParser(fmt, tools=TOOLS)
        events = [*parser.feed(text[:split]), *parser.feed(text[split:]), *parser.finish()]
        message = fold(events)
        assert (calls_of(message), message.content) == (expected, content)


@pytest.mark.parametrize(
    ("call", "argument", "text"),
    [
        ("<call>NAME\nARGUMENTS</call>", "KEY: TEXTSEPARATOR\n", "<call>f\na: x y\nn: 3</call>"),
        ("<call>NAME ARGUMENTS</call>", "KEY=TEXTSEPARATOR ", "<call>f a=x y n=3</call>"),
        ("<call>NAME ARGUMENTS</call>", "KEY=TEXTSEPARATOR; ", "<call>f a=x y; n=3</call>"),
        ("<call>NAME ARGUMENTS</call>", "KEY=TEXTSEPARATOR and ", "<call>f a=x y and n=3</call>"),
        ("<call>NAMEARGUMENTS</call>", " --KEY=TEXT", "<call>f --a=x y --n=3</call>"),
        ("<call>NAMEARGUMENTS</call>", " --KEY JSON", '<call>f --a "x y" --n 3</call>'),
        ("<call>NAMEARGUMENTS</call>", "<k>KEY<v>TEXT", "<call>f<k>a<v>x y<k>n<v>3</call>"),
        (
            "<call>NAME(ARGUMENTS)</call>",
            '"KEY"=JSONSEPARATOR, ',
            '<call>f("a"="x y", "n"=3)</call>',
        ),
        ("<call>NAME(ARGUMENTS)</call>", "KEY: JSONSEPARATOR, ", '<call>f(a: "x y", n: 3)</call>'),
        ("<l>(NAMEARGUMENTS)</l>", " :KEY JSON", '<l>(f :a "x y" :n 3)</l>'),
    ],
)
def test_a_value_ends_where_the_next_argument_starts(call, argument, text):
    fmt = format_of(call, argument)
    expected = [("f", {"a": "x y", "n": 3})]
    assert_parsed(fmt, f"Hi.{text}{text}", expected * 2, content="Hi.")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("quoted_pairs", 'f("a"="x, \\"b\\"=1", "n"=3)', {"a": 'x, "b"=1', "n": 3}),
        ("quoted_pairs", 'f("a"=")</call>", "b"="")', {"a": ")</call>", "b": ""}),
        ("quoted_pairs", 'f("l"=["a, b", [")"]], "n"=3)', {"l": ["a, b", [")"]], "n": 3}),
        ("quoted_pairs", 'f("o"={"a": 1, "b"=2}, "n"=3)', {"o": '{"a": 1, "b"=2}', "n": 3}),
        ("quoted_pairs", 'f("a"="x","n"=3 )', {"a": "x", "n": 3}),
        ("quoted_pairs", "f()", {}),
        ("separated_lines", 'f\na: "x\\nn: 3"\nn: 4', {"a": "x\nn: 3", "n": 4}),
        ("separated_lines", "f\n", {}),
        ("argument_options", 'f --a "--b x" --n 3', {"a": "--b x", "n": 3}),
        ("argument_options", 'f --l ["--b", 1] --n 3', {"l": ["--b", 1], "n": 3}),
        ("argument_options", "f", {}),
    ],
)  # fmt: skip
def test_a_value_may_contain_the_text_that_separates_arguments(name, text, arguments):
    fmt = analysis_of(name).format
    call = fmt.layout.tools.calls[0]
    closing = call.close.removeprefix(")")
    assert_parsed(fmt, f"{call.open}{text}{closing} Bye.", [("f", arguments)], content=" Bye.")


@pytest.mark.parametrize(
    "value",
    ["a <|key|>x<|value|>y", "x <|key|> y", "<|key|>zz<|value|>1", "--n 3", "n: 3", "1, n=3"],
)
def test_only_the_name_of_another_argument_ends_a_value(value):
    # The function f has no argument x or zz, so these keys are a part of the value.
    text = f"<|call|>f<|key|>a<|value|>{value}<|key|>n<|value|>3<|done|><|call|>now<|done|>"
    fmt = analysis_of("argument_tokens").format
    assert_parsed(fmt, text, [("f", {"a": value, "n": 3}), ("now", {})])


def test_a_call_at_which_the_message_ends_early_has_no_closed_arguments():
    fmt = analysis_of("argument_tokens").format
    message = parse("<|call|>f<|key|>n<|value|>3<|key|>a<|value|>Par", format=fmt, tools=TOOLS)
    assert message.tool_calls[0].arguments == '{"n": 3, "a": "Par'


def test_the_last_argument_needs_no_separator_in_constrained_output():
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    fmt = format_of("<call>NAME ARGUMENTS</call>", "KEY=TEXTSEPARATOR; ")
    tag = fmt.structural_tag(TOOLS[:1], "required")
    grammar = compiler.compile_structural_tag(json.dumps(tag))
    for text in ("f a=x; y; b=z", "f a=x", "f n=3; l=[1, 2]", "f"):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert all(map(matcher.accept_token, f"<call>{text}</call>".encode()))
        assert matcher.is_completed()
    matcher = xgrammar.GrammarMatcher(grammar)
    refused = "<call>f a=x; a=y</call>"
    assert not all(map(matcher.accept_token, refused.encode()))


def test_a_value_must_have_an_end():
    with pytest.raises(FormatError, match="no text shows where a value ends"):
        TaggedArguments("{key}=", "")
